"""Recipes and options as text: YAML files, and the words of a command line."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import yaml

from turnrl.plugin.errors import RecipeError, suggest_name
from turnrl.recipe.bundled import suggest_recipe
from turnrl.runs.config import SECTIONS, load_yaml

MAPPINGS = ("model", "data", "trainer", "record")
"""The sections of a recipe."""
ASKS = ("--help", "--print_config")
"""Options that ask for a text instead of a run."""


def parse_value(text: str) -> object:
    """The value of an option: lists, mappings, true, false and null as YAML, all else as text."""
    try:
        return load_yaml(text) if re.match(r"[\[{]|(?i:null|true|false)$", text) else text
    except yaml.YAMLError:
        return text


def read_recipe(file: str) -> dict[str, object]:
    """Read a recipe.

    Raises:
        RecipeError: If there is no such file, or it is not a YAML mapping.
    """
    try:
        with Path(file).open(encoding="utf-8") as stream:  # whose name YAML's errors have
            contents = load_yaml(stream)
        if not isinstance(contents, dict):
            holds = "it is empty" if contents is None else f"it holds {contents!r:.40}"
            raise yaml.YAMLError(holds)
        return contents
    except OSError as error:
        raise _missing(file, error) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {file!r} is not UTF-8: {error}. Save it as UTF-8.") from error
    except yaml.YAMLError as error:
        raise RecipeError(
            f"recipe {file!r} is not a YAML mapping: {' '.join(str(error).split())}. "
            f"Fix it; its keys are {', '.join(SECTIONS)}."
        ) from error


def _missing(file: str, error: OSError) -> RecipeError:
    folder = Path(file) if isinstance(error, IsADirectoryError) else Path(file).parent
    here = sorted(map(str, folder.glob("*.y*ml")))
    near = f" Recipes there: {', '.join(here) or 'none'}."
    if isinstance(error, FileNotFoundError):
        near = suggest_name(file, here, cutoff=0.7) or suggest_recipe(file) or near
    return RecipeError(
        f"no recipe at {file!r}: {error.strerror}.{near} Give the path of a YAML file, or a "
        "name that 'turnrl recipes' lists."
    )


def read_options(
    command: str, words: Sequence[str], lists: Collection[str], switches: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Split the words of a command into options and their values. Recipes become values of
    `--config`. An option that asks for help may have an empty value.

    Args:
        command: The command.
        words: Recipes, then options.
        lists: Options that take several words.
        switches: Options that mean `true` without a word.
    Raises:
        RecipeError: If a word is neither a recipe nor an option, or an option has no value.
    """
    rest, in_options = list(words), False
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        in_options = in_options or word.startswith("-")
        if not in_options and (not equals or Path(word).exists()):
            yield "--config", word
            continue
        option = {"-c": "--config", "-h": "--help"}.get(option, option)
        if not re.fullmatch(r"--\w[\w.-]*\+?", option):
            meant = "--" + re.sub(r"\W+", ".", option.partition(" ")[0]).strip(".") + equals + value
            close = equals or (word.startswith("-") and meant != word and len(option) > 2)
            hint = f" Did you mean {meant}?" if close else ""
            raise RecipeError(
                f"unknown argument {word!r}.{hint} Recipes come first, then options as --key value."
            )
        values, takes_word = [value] if equals else [], not equals and option not in ASKS
        if takes_word and option in switches and rest[:1] not in (["true"], ["false"]):
            values, takes_word = ["true"], False
        while takes_word and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
            takes_word = option in lists
        if option in lists and values and not (len(values) == 1 and values[0][:1] in ("[", "{")):
            values = [json.dumps(values)]
        if not values and option not in ASKS and not option.endswith(".help"):
            raise RecipeError(
                f"{option} has no value. Give it as {option} VALUE; "
                f"'turnrl {command} --help' lists what there is."
            )
        yield option, values[0] if values else ""
