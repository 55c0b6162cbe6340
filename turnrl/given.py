"""What a user gave to `fit` or `eval`: recipes and options, put together.

It is read before anything heavy is imported, so that a missing file or a broken line is told at
once.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from turnrl.errors import RecipeError, did_you_mean

SECTIONS = ("seed_everything", "model", "data", "trainer", "ckpt_path", "split")
"""The top of a recipe."""
_MAPPINGS = ("model", "data", "trainer")
_STDIN = "-"


@dataclass(frozen=True)
class Given:
    """Recipes and options as they were given.

    Args:
        contents: What they say together: later recipes over earlier ones, options over all.
        arguments: The same for the parser that checks and builds.
        files: The recipes.
        asks: Whether help is asked for, or a recipe to be printed, and no run.
    """

    contents: dict[str, Any]
    arguments: list[str]
    files: list[str]
    asks: bool

    @property
    def name(self) -> str:
        """What a run is called: the last recipe's name without its ending."""
        last = self.files[-1] if self.files else ""
        return "stdin" if last == _STDIN else Path(last).stem

    @property
    def folders(self) -> list[str]:
        """Where the recipes lie."""
        return [str(Path(file).absolute().parent) for file in self.files if file != _STDIN]


def read_given(command: str, arguments: Sequence[str]) -> Given:
    """Read what follows a command: recipes, then options.

    Args:
        command: `fit` or `eval`.
        arguments: What follows it; `-` is a recipe on standard input.
    Raises:
        RecipeError: If there is no recipe, one cannot be read, or an option is not one.
    """
    given = Given({}, [], [], any("-h" in a or ".help" in a or "--print_" in a for a in arguments))
    options: list[tuple[str, str]] = []
    for option, value in _options(arguments):
        if option == "--config" and value is not None:
            # its text, where other processes of a run could not read it again
            text = sys.stdin.read() if value == _STDIN else None
            _merge(given.contents, read_recipe(value, text))
            given.files.append(value)
            value = value if text is None else text
        elif value is not None:
            options.append((option.removeprefix("--"), value))
        given.arguments.append(option if value is None else f"{option}={value}")
    if not given.files and not given.asks:
        usage = f"turnrl {command} RECIPE.yaml [--key value ...]"
        raise RecipeError(f"'turnrl {command}' needs a recipe: {usage}")
    for number, (key, value) in enumerate(options):
        made_here = {name.removesuffix("+") for name, _ in options[:number]}
        _set(given.contents, key, value, made_here)
    for key in _MAPPINGS:
        section = given.contents.get(key) or {}
        if not isinstance(section, dict | str):
            raise RecipeError(f"{key} is {section!r}; it must be a mapping of settings.")
        given.contents[key] = _component(section)
    return given


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Options with their values; recipes as values of `--config`."""
    rest, begun = list(arguments), False
    while rest:
        option = rest.pop(0)
        if option == _STDIN or not option.startswith("-"):
            if begun or ("=" in option and not Path(option).exists()):
                hint = f" Did you mean --{option}?" if "=" in option else ""
                raise RecipeError(
                    f"unknown argument {option!r}.{hint} Recipes come first, then options as "
                    "--key value."
                )
            yield "--config", option
            continue
        begun = True
        option, equals, text = option.partition("=")
        value = text if equals else None
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        yield ("--config" if option == "-c" else option), value


class _Loader(yaml.SafeLoader):
    """YAML as it is meant: a key that stands twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for (key, _), name in zip(node.value, keys, strict=True):
            if keys.count(name) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name!r} stands there twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)


def read_recipe(path: str, text: str | None = None) -> dict[str, Any]:
    """A recipe's contents.

    Args:
        path: Its file.
        text: What it says, if that is known.
    Raises:
        RecipeError: If there is no such file, or it is not a YAML mapping.
    """
    file = Path(path)
    if text is None and not file.is_file():
        folder = file if file.is_dir() else file.parent
        here = sorted(str(p) for p in folder.glob("*.y*ml")) if folder.is_dir() else []
        what = f"{path!r} is a folder" if file.is_dir() else f"no recipe at {path!r}"
        hint = did_you_mean(str(file), here) or f" Recipes there: {', '.join(here) or 'none'}."
        raise RecipeError(f"{what}.{hint} Give the path of a YAML file.")
    try:
        contents = yaml.load(text or file.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"recipe {path!r} is not YAML{where}: {what}. Mend that line.") from error
    has = f"A recipe has the keys {', '.join(SECTIONS)}."
    if not isinstance(contents, dict):
        raise RecipeError(f"recipe {path!r} holds {type(contents).__name__}, not a mapping. {has}")
    for key in contents:  # jsonargparse would pass over an unknown one that is empty
        if key not in SECTIONS:
            hint = did_you_mean(str(key), SECTIONS)
            raise RecipeError(f"unknown key {str(key)!r} in recipe {path!r}.{hint} {has}")
    return contents


def _merge(under: dict[str, Any], over: dict[str, Any]) -> None:
    """Put one mapping over another; another class is another component."""
    for key, value in over.items():
        old = under.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _other_class(old, value):
            _merge(old, value)
        else:
            under[key] = value


def _other_class(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return "class_path" in new and old.get("class_path") != new["class_path"]


def _set(contents: dict[str, Any], path: str, text: str, made_here: set[str]) -> None:
    """Put an option into a recipe's contents.

    Raises:
        RecipeError: If it would change one item of a list in a recipe without saying which.
    """
    node, (*parents, leaf) = contents, path.split(".")
    for depth, name in enumerate(parents, 1):
        child, place = node.get(name), ".".join(parents[:depth])
        if isinstance(child, list):
            if place not in made_here:
                raise RecipeError(
                    f"--{path} does not say which of the {len(child)} in {place} it means. Give "
                    f"the whole list as --{place}, or change the recipe."
                )
            child = child[-1] if child else None
            node[name][-1:] = [child := _component(child)]
        else:
            node[name] = child = _component(child)
        following = [*parents[depth:], leaf][0]
        if "class_path" in child and following not in ("class_path", "init_args", "dict_kwargs"):
            child = child.setdefault("init_args", {})
        node = child
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        value = text
    if leaf.endswith("+"):
        old = node.get(leaf := leaf.removesuffix("+")) or []
        value = [
            *(old if isinstance(old, list) else [old]),
            *(value if isinstance(value, list) else [value]),
        ]
    _merge(node, {leaf: value})


def _component(node: Any) -> dict[str, Any]:
    return {"class_path": node} if isinstance(node, str) else node if isinstance(node, dict) else {}
