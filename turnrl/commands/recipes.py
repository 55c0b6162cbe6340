"""`turnrl recipes`: lists the recipes that come with turnrl, and copies one for you to change.

Only the tables of `recipes/README.md` say what each recipe reproduces and needs.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from turnrl.plugin.errors import RecipeError
from turnrl.plugin.hooks import Commands
from turnrl.recipe.bundled import bundled_recipes, suggest_recipe

_WIDTH = 80
_UNKNOWN = "not measured"


def add_recipes_command(commands: Commands) -> None:
    """Add `recipes` to argparse's sub-parsers."""
    about = "list the recipes that come with turnrl, or copy one"
    parser = commands.add_parser("recipes", help=about, description=about)
    parser.set_defaults(run=_list)
    actions = parser.add_subparsers(metavar="{copy}")
    copy = actions.add_parser("copy", help="copy a recipe into a file to change")
    copy.add_argument("name", metavar="NAME", help="as 'turnrl recipes' lists it")
    copy.add_argument("file", metavar="FILE", nargs="?", help="NAME.yaml in this folder by default")
    copy.set_defaults(run=_copy)


def iterate_tables() -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of the tables of `recipes/README.md`: a recipe's name, then its cells by column."""
    recipes = bundled_recipes()
    columns: list[str] = []
    for line in recipes["quickstart"].with_name("README.md").read_text("utf-8").splitlines():
        first, *cells = line.strip("| ").split(" | ")
        link = re.fullmatch(r"\[.*\]\((.+)\.yaml\)", first)
        if first in ("recipe", "variant"):
            columns = cells
        elif link and link[1] in recipes and len(cells) == len(columns):
            yield link[1], dict(zip(columns, cells, strict=True))


def _command(name: str, row: dict[str, str]) -> str:
    base = row.get("overrides", "").removesuffix(".yaml")
    return " ".join(["turnrl fit", *filter(None, [base]), name])


def _list(_: argparse.Namespace) -> None:
    """Print every recipe with its command and its row of the table."""
    for name, row in iterate_tables():
        print(_command(name, row))
        for column, cell in row.items():
            if cell != _UNKNOWN and column != "overrides":
                column = f"    {column.split()[-1]:12}"  # of "what it reproduces"
                print(
                    textwrap.fill(cell, _WIDTH, initial_indent=column, subsequent_indent=" " * 16)
                )
    print("\n'turnrl recipes copy NAME' copies one into a file to change.")


def _copy(parsed: argparse.Namespace) -> None:
    """Write a recipe into the user's own file.

    Raises:
        RecipeError: If there is no such recipe, or the file cannot be written.
    """
    recipes = bundled_recipes()
    name: str = parsed.name.removeprefix("recipes/").removesuffix(".yaml")
    if name not in recipes:
        raise RecipeError(
            f"no recipe {parsed.name!r} comes with turnrl.{suggest_recipe(name)} "
            "'turnrl recipes' lists those that do."
        )
    file = Path(parsed.file or recipes[name].name)
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(recipes[name].read_text("utf-8"))
    except FileExistsError as error:
        raise RecipeError(
            f"{str(file)!r} is there already. Name another: turnrl recipes copy {name} FILE."
        ) from error
    except OSError as error:
        raise RecipeError(f"cannot write {str(file)!r}: {error.strerror}. Name another.") from error
    print(f"written to {file}. Run it with\n  {_command(str(file), dict(iterate_tables())[name])}")
