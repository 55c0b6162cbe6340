"""Recipes and options as text: YAML files, and the words of a command line."""

import io
import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from turnrl.errors import RecipeError, did_you_mean, in_short
from turnrl.recipe.bundled import find_recipe, recipe_like

MAPPINGS = {
    "model": "turnrl.MTGRPO",
    "data": "turnrl.QuestionData",
    "trainer": "lightning.pytorch.trainer.trainer.Trainer",
    "record": "turnrl.Recorder",
    "plan": "turnrl.Plan",
}
"""The sections of a recipe, each with the class that it describes unless it names another."""
SECTIONS = ("seed_everything", *MAPPINGS, "ckpt_path")
"""The keys at the top of a recipe."""
ASKS = ("--help", "--print_config")
"""Options that ask for a text instead of a run."""
DASHES = ("-", "\N{EN DASH}", "\N{EM DASH}")  # word processors join two hyphens

_MOST_VALUES = 200_000
"""The most values of a recipe, with those of an alias counted each time: a few lines of aliases of
aliases stand for more values than any memory holds."""
_DEEPEST = 200
"""The most brackets inside each other."""


class _Loader(yaml.SafeLoader):
    """Loads YAML, and refuses a key that appears twice."""

    def compose_mapping_node(self, anchor: dict[object, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set[str]()
        for key, _ in node.value:
            if str(key.value) in names:
                problem = f"the key {key.value!r} appears twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.add(str(key.value))
        return node

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level >= _DEEPEST:  # beyond, each bracket takes longer to read than the last
            raise yaml.YAMLError(f"it has more than {_DEEPEST} brackets inside each other")
        super().fetch_flow_collection_start(token)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_VALUES:  # by aliases that are merged, `<<: [*a, *a]`
            raise yaml.YAMLError(f"it has more than {_MOST_VALUES:,} values")


def load_yaml(source: str | TextIO) -> Any:
    """The contents of a YAML text or file, which a stranger may have written.

    Raises:
        yaml.YAMLError: If it is not YAML, has a key twice, or has more values than any recipe.
    """
    try:
        contents = yaml.load(source, _Loader)
    except (ValueError, RecursionError) as error:  # a date or a number that Python does not have
        if isinstance(error, UnicodeDecodeError):
            raise
        raise yaml.YAMLError(in_short(error)) from error
    if _size(contents, {}) > _MOST_VALUES:
        raise yaml.YAMLError(f"its aliases stand for more than {_MOST_VALUES:,} values")
    return contents


def _size(value: object, sizes: dict[int, float]) -> float:
    """The number of values in YAML's contents; infinite if an alias stands for what it is in."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = math.inf
        items = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_size(item, sizes) for item in items)
    return sizes[id(value)]


def value_of(text: str) -> object:
    """The value of an option: lists, mappings, true, false and null as YAML, all else as text."""
    try:
        return load_yaml(text) if re.match(r"[\[{]|(?i:null|true|false)$", text) else text
    except yaml.YAMLError:
        return text


@dataclass(frozen=True)
class RecipeFile:
    """A recipe that has not been read yet.

    Args:
        path: The recipe's file; None for standard input.
        text: The text that was read from standard input.
    """

    path: str | None
    text: str = ""

    @classmethod
    def of(cls, word: str) -> "RecipeFile":
        """The recipe that a word of a command means: a file or a bundled recipe. A word with a line
        break is the text that `read_options` has read from standard input."""
        return cls(None, word) if "\n" in word else cls(find_recipe(word))

    def __str__(self) -> str:
        return "-" if self.path is None else self.path

    def read(self) -> dict[str, object]:
        """Read the recipe.

        Raises:
            RecipeError: If there is no such file, or it is not a YAML mapping.
        """
        try:
            with self._opened() as file:  # whose name YAML's errors have
                contents = load_yaml(file)
            if not isinstance(contents, dict):
                holds = "it is empty" if contents is None else f"it holds {contents!r:.40}"
                raise yaml.YAMLError(holds)
            return contents
        except OSError as error:
            raise self._missing(error) from error
        except UnicodeDecodeError as error:
            raise RecipeError(
                f"recipe {str(self)!r} is not UTF-8: {error}. Save it as UTF-8."
            ) from error
        except yaml.YAMLError as error:
            raise RecipeError(
                f"recipe {str(self)!r} is not a YAML mapping: {' '.join(str(error).split())}. "
                f"Fix it; its keys are {', '.join(SECTIONS)}."
            ) from error

    def _opened(self) -> TextIO:
        return (
            io.StringIO(self.text) if self.path is None else Path(self.path).open(encoding="utf-8")
        )

    def _missing(self, error: OSError) -> RecipeError:
        name = str(self)
        folder = Path(name) if isinstance(error, IsADirectoryError) else Path(name).parent
        here = sorted(map(str, folder.glob("*.y*ml")))
        near = f" Recipes there: {', '.join(here) or 'none'}."
        if isinstance(error, FileNotFoundError):
            near = did_you_mean(name, here, cutoff=0.7) or recipe_like(name) or near
        return RecipeError(
            f"no recipe at {name!r}: {error.strerror}.{near} Give the path of a YAML file, or a "
            "name that 'turnrl recipes' lists."
        )


def read_options(
    command: str, words: Sequence[str], lists: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Split the words of a command into options and their values. Recipes become values of
    `--config`. An option that asks for help may have an empty value.

    Args:
        command: The command.
        words: Recipes, then options.
        lists: Options that take several words.
    Raises:
        RecipeError: If a word is neither a recipe nor an option, or an option has no value.
    """
    rest, in_options = list(words), False
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        in_options = in_options or (word.startswith(DASHES) and word != "-")
        if not in_options and (not equals or Path(word).exists()):
            # the first process of a run reads standard input, and passes the text to the others
            yield "--config", sys.stdin.read() + "\n" if word == "-" else word
            continue
        option = {"-c": "--config", "-h": "--help"}.get(option, option)
        if not re.fullmatch(r"--\w[\w.-]*\+?", option):
            meant = "--" + re.sub(r"\W+", ".", option.partition(" ")[0]).strip(".") + equals + value
            close = equals or (word.startswith(DASHES) and meant != word and len(option) > 2)
            hint = f" Did you mean {meant}?" if close else ""
            raise RecipeError(
                f"unknown argument {word!r}.{hint} Recipes come first, then options as --key value."
            )
        values = [value] if equals else []
        while rest and not rest[0].startswith("--") and not equals and option not in ASKS:
            values.append(rest.pop(0))
            if option not in lists:
                break
        if option in lists and values and not (len(values) == 1 and values[0][:1] in ("[", "{")):
            values = [json.dumps(values)]
        if not values and option not in ASKS and not option.endswith(".help"):
            raise RecipeError(
                f"{option} has no value. Give it as {option} VALUE; "
                f"'turnrl {command} --help' lists what there is."
            )
        yield option, values[0] if values else ""
