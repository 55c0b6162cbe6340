"""The program as the reference describes it: public names, components, options, commands, recipes
and metrics, each with its words. Nothing here knows of Sphinx."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import docstring_parser
import jsonargparse
import yaml
from sphinx.pycode import ModuleAnalyzer

import turnrl
import turnrl.engines
import turnrl.types
from turnrl.data.fields import Fields
from turnrl.plugin.hooks import load_classes
from turnrl.policy.settings import Lora
from turnrl.watch.recorder import Recorder

ROOT = Path(__file__).parents[3]
METRICS = ROOT / "docs" / "reference" / "metrics.yaml"


# ---------------------------------------------------------------- classes and their arguments


@dataclass(frozen=True)
class Argument:
    """One argument of a class, as a recipe sets it and the command line's help explains it."""

    name: str
    type: str
    default: str
    text: str


def arguments(cls: type) -> list[Argument]:
    """The arguments of a class, from the parser that reads recipes.

    Those that a section of the recipe has of its own, as `policy` of the module, are left out.
    """
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(cls, "it", fail_untyped=False)
    return [
        Argument(
            name,
            type_text(getattr(action, "_typehint", None)),
            "required" if action.required else value_text(action.default),
            " ".join((action.help or "").split()),
        )
        for action in parser._actions
        if (name := action.dest.removeprefix("it.")) != action.dest
        and "." not in name
        and action.default != argparse.SUPPRESS  # the title of a section
    ]


def type_text(kind: object) -> str:
    """A type as one writes it, without modules; `null` is None in a recipe."""
    text = inspect.formatannotation(kind).replace("NoneType", "None")
    if found := re.fullmatch(r"(?:typing\.)?(Optional|Union)\[(.*)\]", text):
        parts = [type_text(part) for part in getattr(kind, "__args__", ())]
        return " | ".join(parts) if parts else found[2]
    text = re.sub(r"<class '([^']*)'>", r"\1", text)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("None", "null")


def value_text(value: object) -> str:
    """A default as a recipe writes it."""
    if isinstance(value, str) and value:
        return value
    try:
        return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    except yaml.YAMLError:
        return repr(value)


def prose(cls: Any) -> str:
    """What a docstring says before its sections, as the help shows it."""
    own = inspect.cleandoc(cls.__doc__ or "")  # `getdoc` would give its base's
    return (docstring_parser.parse(own).description or "").strip()


# ---------------------------------------------------------------- components


@functools.cache
def hooks() -> dict[str, dict[str, type]]:
    """The classes that each hook brings, by hook; hooks that bring something else are left out."""
    points = importlib.metadata.entry_points(group="turnrl")
    names = {
        name
        for point in points
        for name, value in vars(point.load()).items()
        if hasattr(value, "turnrl_impl")
    }
    found = {}
    for name in sorted(names):
        with contextlib.suppress(AttributeError):  # its things have no names, so are no classes
            brought = load_classes(name)
            if all(isinstance(thing, type) for thing in brought.values()):
                found[name] = brought
    return found


# ---------------------------------------------------------------- the public interface


@dataclass(frozen=True)
class Name:
    """A public name: `kind` is class, error, function or value, `text` its first sentence."""

    name: str
    kind: str
    text: str


def names(module: Any) -> list[Name]:
    """The public names of a module: those that it lists, or else those that it defines. What
    `turnrl` has, and contracts of an engine, are described there and not among the types."""
    listed = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and _home(value).startswith(module.__name__)
    ]
    doors = [turnrl, turnrl.engines, turnrl.types]
    before = doors[: doors.index(module)] if module in doors else []
    known = {name for door in before for name in door.__all__}
    values = ((name, getattr(module, name)) for name in sorted({*listed} - known))
    return [_name(name, value) for name, value in values if not inspect.ismodule(value)]


def _home(value: Any) -> str:
    return str(value.__module__) if inspect.isclass(value) or inspect.isfunction(value) else ""


def _name(name: str, value: Any) -> Name:
    if inspect.isclass(value):
        kind = "error" if issubclass(value, Exception) else "class"
    else:
        kind = "function" if inspect.isroutine(value) else "value"
    text = value_doc(name, value) if kind == "value" else inspect.cleandoc(value.__doc__ or "")
    return Name(name, kind, first_sentence(text))


def first_sentence(text: str) -> str:
    """What a docstring says in its first sentence, as one line."""
    first = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s(?=[A-Z`(])", first)[0]


def value_doc(name: str, value: object) -> str:
    """The string that stands below the assignment of a value, wherever in turnrl that is."""
    for module, loaded in list(sys.modules.items()):
        if module.partition(".")[0] == "turnrl" and vars(loaded).get(name) is value:
            found = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
            if found:
                return "\n".join(found).strip()
    doc = getattr(value, "__doc__", "") or ""
    return inspect.cleandoc(doc) if type(value).__module__.partition(".")[0] != "typing" else ""


# ---------------------------------------------------------------- commands


@functools.cache
def help_of(*command: str) -> str:
    """The help that `turnrl COMMAND --help` prints, in a terminal of 88 columns."""
    (point,) = importlib.metadata.entry_points(group="console_scripts", name="turnrl")
    main: Callable[[Sequence[str]], int] = point.load()
    shown = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "88"}),
        contextlib.redirect_stdout(shown),
        contextlib.suppress(SystemExit),
    ):
        main([*command, "--help"])
    return shown.getvalue().rstrip()


def commands(*above: str) -> Iterator[tuple[str, ...]]:
    """Every command as its words, those below a command after it."""
    section = re.search(r"^positional arguments:\n  \S+\n((?: {4}.*\n)+)", help_of(*above), re.M)
    for name in re.findall(r"^ {4}([a-z][\w-]*)", section[1] if section else "", re.M):
        yield (*above, name)
        yield from commands(*above, name)


# ---------------------------------------------------------------- recipes


@dataclass(frozen=True)
class Recipe:
    """A bundled recipe: the comment that opens it, and its whole text."""

    name: str
    comment: str
    text: str


def recipes() -> list[Recipe]:
    """Every recipe of the repository, the variants last."""
    folder = ROOT / "recipes"
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file.name))
    found = []
    for file in files:
        text = file.read_text("utf-8")
        lines = re.match(r"(?:#.*\n)*", text)[0].splitlines()  # type: ignore[index]
        comment = " ".join(line.lstrip("# ") for line in lines if not line.startswith("#  "))
        name = file.relative_to(folder).with_suffix("").as_posix()
        found.append(Recipe(name, comment, text))
    return found


# ---------------------------------------------------------------- metrics


@dataclass(frozen=True)
class Metric:
    """A column of `metrics.csv`.

    Args:
        name: Its name; `NAME` in it stands for any word, such as a reward's.
        unit: Its unit, or its range.
        text: Its meaning.
        when: The runs that have it; empty for all.
    """

    name: str
    unit: str
    text: str
    when: str = ""

    def matches(self, column: str) -> bool:
        """Tell if this is the metric of a column."""
        return re.fullmatch(re.escape(self.name).replace("NAME", r"\w+"), column) is not None


def metrics(file: Path = METRICS) -> list[tuple[str, str, list[Metric]]]:
    """The metrics by group: its title, its opening words, and what is in it."""
    groups = yaml.safe_load(file.read_text("utf-8"))
    return [
        (
            group["title"],
            group["text"],
            [
                Metric(
                    name, *(str(row.get(key, "")).strip() for key in ("unit", "meaning", "when"))
                )
                for name, row in group["metrics"].items()
            ],
        )
        for group in groups
    ]


# ---------------------------------------------------------------- sections of a recipe

SECTIONS = {
    "model.policy": turnrl.Policy,
    "model.policy.lora": Lora,
    "model.rollout": turnrl.Rollout,
    "model.objective": turnrl.ClippedSurrogate,
    "model": turnrl.MTGRPO,
    "record": Recorder,
    "data": turnrl.QuestionData,
    "data.fields": Fields,
}
"""The sections of a recipe, and the class that each one makes."""
