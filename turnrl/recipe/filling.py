"""Values of variables, which only the constructors of a recipe's objects get.

A recipe keeps `${NAME}` as it was written, so that no secret is in a saved recipe, a checkpoint, a
printed line or the recipe of another process.
"""

from __future__ import annotations

import copy
import os
from typing import Any

from jsonargparse import Namespace

from turnrl.plugin.text import keep_secret
from turnrl.recipe.merging import filled_in, may_be_secret, variables

_SHOWN = ("model.policy.", "data.")
"""Settings whose values are names and paths, which messages show."""


def fill(config: Any) -> Any:
    """A copy of a parsed recipe with the values of its variables, for the constructors."""
    return _filled(config, "")


def _filled(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_filled(item, f"{key}[{n}]") for n, item in enumerate(value)]
    if not isinstance(value, Namespace | dict):
        return _value(value, key)
    filled = copy.copy(value)
    for name, item in (vars(value) if isinstance(value, Namespace) else value).items():
        inner = key if name in ("init_args", "dict_kwargs") else f"{key}.{name}".lstrip(".")
        filled[name] = _filled(item, inner)
    return filled


def _value(value: Any, key: str) -> Any:
    filled = filled_in(value, key)
    if filled != value and not key.startswith(_SHOWN):
        for name in variables(value):
            if may_be_secret(name):
                keep_secret(os.environ[name], name)
    return filled
