"""Values of variables, which only the constructors of a recipe's objects get.

A recipe keeps `${NAME}` as it was written, so that no secret is in a saved recipe, a checkpoint, a
printed line or the recipe of another process.
"""

from __future__ import annotations

import copy
import os
from typing import Any

from jsonargparse import Namespace

from turnrl.plugin.text import register_secret
from turnrl.recipe.merging import expand_variables, may_be_secret, variable_names

_SHOWN = ("model.policy.", "data.")
"""Settings whose values are names and paths, which messages show."""


def fill_variables(config: Any) -> Any:
    """A copy of a parsed recipe with the values of its variables, for the constructors."""
    return _fill_settings(config, "")


def _fill_settings(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_fill_settings(item, f"{key}[{n}]") for n, item in enumerate(value)]
    if not isinstance(value, Namespace | dict):
        return _value(value, key)
    filled = copy.copy(value)
    for name, item in (vars(value) if isinstance(value, Namespace) else value).items():
        inner = key if name in ("init_args", "dict_kwargs") else f"{key}.{name}".lstrip(".")
        filled[name] = _fill_settings(item, inner)
    return filled


def _value(value: Any, key: str) -> Any:
    filled = expand_variables(value, key)
    if filled != value and not key.startswith(_SHOWN):
        for name in variable_names(value):
            if may_be_secret(name):
                register_secret(os.environ[name], name)
    return filled
