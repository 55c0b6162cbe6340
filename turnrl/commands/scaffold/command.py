"""`turnrl plugin new NAME [--with KIND ...] [--folder DIR]`: the beginning of a plugin.

It writes a copy of `templates/turnrl-example`, a real package with a component of every kind, under
the name NAME and with only the chosen kinds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from turnrl.plugin.errors import RecipeError, did_you_mean
from turnrl.plugin.hooks import Commands

TEMPLATE = Path(__file__).parent / "templates" / "turnrl-example"

COMPONENTS: Mapping[str, tuple[str, str]] = {
    "tool": (
        "ExampleLookup",
        "class_path: WikiSearch\n"
        "        init_args: {index: indexes/atlas, build_from: Atlas, top_k: 1}",
    ),
    "segmenter": ("ExampleTurns", "TwoTurn"),
    "player": ("ExampleDesk", ""),
    "turn-reward": ("ExampleNewlyFound", "ToolExecuted, AnswerRetrieved"),
    "outcome-reward": ("ExampleLookedUp", "ExactMatch, WellFormed"),
    "source": ("ExampleQuestions", "Atlas"),
    "estimator": ("ExampleToGo", "TurnLevel"),
    "objective": ("ExampleProximal", "ClippedSurrogate"),
    "engine": ("ExampleEngine", "Slots"),
}
"""The template's class of each kind, and its stand-in in the recipe if the kind is left out. A
player takes the place of a segmenter, so it needs no stand-in."""

_SCHEME = re.compile(r" +segmenter:\n(?: {6}.*\n)+")
_PLAYER = re.compile(r"( +)# in place of the segmenter: (.*\n)")

_SHARED = {"facts.py": {"tool", "source"}, "countries.csv": {"tool", "source"}}
"""Files that several kinds share."""


def add_plugin_command(commands: Commands) -> None:
    """Add `plugin` to argparse's sub-parsers."""
    parser = commands.add_parser("plugin", help="begin a plugin of your own")
    actions = parser.add_subparsers(dest="action", required=True, metavar="{new}")
    new = actions.add_parser(
        "new", help="write a package that passes its tests and trains", description=__doc__
    )
    new.add_argument("name", metavar="NAME", help="weather writes the distribution turnrl-weather")
    new.add_argument(
        "--with",
        dest="kinds",
        nargs="+",
        action="extend",
        metavar="KIND",
        help=f"components to write: {', '.join(COMPONENTS)} (default: all); a tool adds a source",
    )
    new.add_argument("--folder", help="where to write it (default: turnrl-NAME, here)")
    new.set_defaults(run=_new)


def _new(args: argparse.Namespace) -> int:
    name, kinds = plugin_name(args.name), {*(args.kinds or COMPONENTS)}
    for kind in sorted(kinds):
        if kind not in COMPONENTS:
            hint = did_you_mean(kind, COMPONENTS)
            raise RecipeError(f"--with: no kind {kind!r}.{hint} Kinds: {', '.join(COMPONENTS)}.")
    brings = "tool" in kinds and "source" not in kinds
    if brings:  # the recipe has to ask about facts that the tool has
        kinds.add("source")
    folder = Path(args.folder or f"turnrl-{name}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        kind = "a folder that is not empty" if folder.is_dir() else "a file"
        raise RecipeError(
            f"{str(folder)!r} is {kind}. Name another with --folder, or move it away."
        )
    for path, text in package(name, kinds).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    print(f"{folder}: a plugin with {', '.join(k for k in COMPONENTS if k in kinds)}. Next:\n")
    if brings:
        print("    (the source asks what the tool knows: without it the recipe could not train)")
    here, where = _programs(), shlex.quote(str(folder))
    print(f"    {here}pip install -e {shlex.quote(f'{folder}[dev]')}")
    print(f"    {here}python -m pytest {where}")
    print(f"    {here}turnrl fit {shlex.quote(str(folder / 'recipe.yaml'))}")
    return 0


def _programs() -> str:
    """This environment's folder of programs, as a prefix of `pip`; empty if it is on the path."""
    folder, python = Path(sys.executable).parent, shutil.which("python")
    if python and Path(python).parent == folder:
        return ""
    here = Path.cwd()
    return shlex.quote(f"{folder.relative_to(here) if folder.is_relative_to(here) else folder}/")


def plugin_name(word: str) -> str:
    """The name of a new plugin: `weather`, also for `turnrl-weather`.

    Raises:
        RecipeError: If a package cannot have that name, or an installed plugin has it.
    """
    name = word.replace("_", "-").removeprefix("turnrl-")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise RecipeError(
            f"{word!r} cannot be the name of a plugin. Take lower-case letters, digits and single "
            "dashes, a letter first, such as 'weather'."
        )
    brought = {point.name: point.dist for point in importlib.metadata.entry_points(group="turnrl")}
    if name == "core" or name in brought:
        owner = brought.get(name)
        of = f"{owner.name} {owner.version}" if owner else "turnrl itself"
        raise RecipeError(
            f"a plugin {name!r} is installed already, from {of}. Choose another name."
        )
    return name


def package(name: str, kinds: Iterable[str]) -> dict[Path, str]:
    """The files of a new plugin, by their paths within it.

    Args:
        name: The name, as `plugin_name` returns it.
        kinds: Keys of `COMPONENTS`.
    """
    left_out = {kind: COMPONENTS[kind] for kind in COMPONENTS if kind not in set(kinds)}
    classes = [cls for cls, _ in left_out.values()]
    skipped = {f"{kind.replace('-', '_')}.py" for kind in left_out}
    skipped |= {file for file, users in _SHARED.items() if users <= set(left_out)}
    files = {}
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_dir() or path.parent.name.startswith((".", "__")) or path.name in skipped:
            continue
        text = path.read_text(encoding="utf-8")
        if path.name in ("__init__.py", "test_contracts.py"):
            text = without(text, classes)
        elif path.name == "README.md":
            lines = text.splitlines(keepends=True)
            text = "".join(line for line in lines if not any(cls in line for cls in classes))
        elif path.name == "recipe.yaml":
            if "player" in left_out:
                text = _PLAYER.sub("", text)
            elif "segmenter" in left_out:
                text = _PLAYER.sub(r"\1\2", _SCHEME.sub("", text))
            for cls, stand_in in left_out.values():
                text = text.replace(cls, stand_in)
        files[Path(renamed(str(path.relative_to(TEMPLATE)), name))] = renamed(text, name)
    return files


def without(source: str, classes: Iterable[str]) -> str:
    """Remove classes from a module: from its lists, or else together with the functions that
    mention them, and the imports that are then unused.

    The module must be laid out like those of the template: one-line imports, and two empty lines
    between functions.
    """
    for cls in classes:
        source = source.replace(f"{cls}, ", "").replace(f", {cls}", "")
    head, *functions = source.split("\n\n\n")
    functions = [text for text in functions if not any(cls in text for cls in classes)]
    body = "\n\n\n".join(functions)
    lines = []
    for line in head.split("\n"):
        if match := re.fullmatch(r"(from \S+ import )(.+)", line):
            used = [name for name in match[2].split(", ") if re.search(rf"\b{name}\b", body)]
            if not used:
                continue
            line = match[1] + ", ".join(used)
        lines.append(line)
    return "\n".join(lines) + "\n\n\n" + body.rstrip("\n") + "\n"


def renamed(text: str, name: str) -> str:
    """A text of the template, or a path in it, with the plugin's name in place of `example`."""
    text = text.replace("turnrl_example", f"turnrl_{name.replace('-', '_')}")
    text = text.replace("turnrl-example", f"turnrl-{name}")
    text = text.replace("example = ", f"{name} = ")  # the entry point
    return text.replace("Example", "".join(word.capitalize() for word in name.split("-")))
