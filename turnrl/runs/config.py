"""The settings of a run, as its `config.yaml` has them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import yaml

from turnrl.plugin.errors import summarize_error

SECTIONS = ("seed_everything", "model", "data", "trainer", "record", "ckpt_path")
"""The keys at the top of a recipe."""
COMMAND = "command"
"""The key of the command that made a run."""
SEEDS = ("seed_everything", "model.seed", "data.seed")
"""Settings in which runs of one recipe may differ and still be the same experiment."""
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
        raise yaml.YAMLError(summarize_error(error)) from error
    if _count_values(contents, {}) > _MOST_VALUES:
        raise yaml.YAMLError(f"its aliases stand for more than {_MOST_VALUES:,} values")
    return contents


def _count_values(value: object, sizes: dict[int, float]) -> float:
    """The number of values in YAML's contents; infinite if an alias stands for what it is in."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = math.inf
        items = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_count_values(item, sizes) for item in items)
    return sizes[id(value)]


def flatten_settings(
    settings: Mapping[str, object], before: str = ""
) -> Iterator[tuple[str, object]]:
    """The settings of a recipe by dotted keys, such as `model.policy.model`. Values that are not
    text are JSON."""
    for key, value in settings.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            yield from flatten_settings(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, default=str)
