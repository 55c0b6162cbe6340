"""`turnrl plugin new NAME [--folder DIR]`: the beginning of a plugin.

It writes a copy of `templates/turnrl-example`, a real package with a component of every kind, under
the name NAME.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shlex
import shutil
import sys
from pathlib import Path

from turnrl.plugin.errors import RecipeError
from turnrl.plugin.hooks import Commands

TEMPLATE = Path(__file__).parent / "templates" / "turnrl-example"


def add_plugin_command(commands: Commands) -> None:
    """Add `plugin` to argparse's sub-parsers."""
    parser = commands.add_parser("plugin", help="begin a plugin of your own")
    actions = parser.add_subparsers(dest="action", required=True, metavar="{new}")
    new = actions.add_parser(
        "new", help="write a package that passes its tests and trains", description=__doc__
    )
    new.add_argument("name", metavar="NAME", help="weather writes the distribution turnrl-weather")
    new.add_argument("--folder", help="where to write it (default: turnrl-NAME, here)")
    new.set_defaults(run=_new)


def _new(args: argparse.Namespace) -> int:
    name = plugin_name(args.name)
    folder = Path(args.folder or f"turnrl-{name}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        kind = "a folder that is not empty" if folder.is_dir() else "a file"
        raise RecipeError(
            f"{str(folder)!r} is {kind}. Name another with --folder, or move it away."
        )
    for path, text in render_package(name).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    print(f"{folder}: a plugin with a component of every kind. Delete those that you do not need.")
    print("Next:\n")
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


def render_package(name: str) -> dict[Path, str]:
    """The files of a new plugin, by their paths within it: the template under another name.

    Args:
        name: The name, as `plugin_name` returns it.
    """
    files = {}
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_file() and not path.parent.name.startswith((".", "__")):
            text = path.read_text(encoding="utf-8")
            files[Path(rename_plugin(str(path.relative_to(TEMPLATE)), name))] = rename_plugin(
                text, name
            )
    return files


def rename_plugin(text: str, name: str) -> str:
    """A text of the template, or a path in it, with the plugin's name in place of `example`."""
    text = text.replace("turnrl_example", f"turnrl_{name.replace('-', '_')}")
    text = text.replace("turnrl-example", f"turnrl-{name}")
    text = text.replace("example = ", f"{name} = ")  # the entry point
    return text.replace("Example", "".join(word.capitalize() for word in name.split("-")))
