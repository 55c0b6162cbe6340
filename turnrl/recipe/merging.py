"""Merges values of recipes, and changes them one by one."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from turnrl.plugin.errors import RecipeError

Contents: TypeAlias = Mapping[str, Any]
"""A recipe, or a mapping in it, as YAML gives it."""
Editable: TypeAlias = dict[str, Any]
"""A recipe that may be changed in place."""
PARTS = {"class_path", "init_args", "dict_kwargs"}
"""Keys that describe a class with its settings."""
_NO_PATHS = ("answer_pattern", "instructions")
"""Settings in which a $ has no special meaning."""
_SHORTEST = 6
_VARIABLE = r"(?<!\\)\$(?:[A-Za-z_]\w*|\{\w+\})"
_IN_PROSE = r"(?<!\\)\$\{([A-Z_][A-Z0-9_]*)\}"


def as_list(value: object) -> list[Any]:
    """A list as it is, anything else as a list of one item; without null and false."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if item is not None and item is not False]


class _Added(list[object]):
    """A list to which an option has added items. The options after it set the last item."""


def merge(old: object, new: object, key: str = "") -> Any:
    """Merge a new value into an old one, which it overrides. Only mappings are merged.

    A class may be written as its name alone, its settings may stand without `init_args`, and name
    and settings may come in either order. Settings do not pass from one class to another.

    Raises:
        RecipeError: If the new value is for an item of a list, and does not name the item.
    """
    if isinstance(old, list) and isinstance(new, dict):
        if isinstance(old, _Added):
            return _Added([*old[:-1], merge(old[-1], new, key)])
        raise RecipeError(
            f"{key} is a list of {len(old)}, and {new} does not name the item to change. "
            f"Give the whole list, as --{key} '[...]', or change the recipe."
        )
    if not isinstance(new, dict) and not (isinstance(new, str) and isinstance(old, dict) and old):
        return new
    under, over = _as_mapping(old), _as_mapping(new)
    if "class_path" in {**under, **over}:
        under, over = (part if PARTS & {*part} else {"init_args": part} for part in (under, over))
        names = {_class_name(part.get("class_path", "")) for part in (under, over)}
        if len(names - {""}) > 1:
            return new
    both = dict(under)
    for name, value in over.items():
        setting = str(name).removesuffix("+")
        before = both.get(setting)
        if str(name).endswith("+"):
            before, value = None, _Added(as_list(before) + as_list(value))
        both[setting] = merge(before, value, f"{key}.{setting}".lstrip("."))
    return both


def _as_mapping(value: object) -> Editable:
    """A class's name as a mapping with `class_path`, a mapping as it is, else an empty mapping."""
    if isinstance(value, str):
        return {"class_path": value}
    return value if isinstance(value, dict) else {}


def _class_name(path: object) -> str:
    return str(path).rpartition(".")[2]


def map_values(value: object, change: Callable[[object, str], object], key: str = "") -> Any:
    """Change every value in a recipe that is neither a mapping nor a list.

    Args:
        value: The recipe, or a part of it, as YAML gives it.
        change: Called with a value and its key; returns the value to put in its place.
        key: The part's key.
    """
    if isinstance(value, dict):
        return {name: map_values(item, change, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [map_values(item, change, f"{key}[{i}]") for i, item in enumerate(value)]
    return change(value, key)


def relocate(file: Path, value: object, key: str) -> object:
    """Find a path of the recipe that a run keeps. The path is relative to the folder in which the
    run began. If it does not exist from here, it is tried from the folders above the run's file."""
    exists = os.path.exists  # unlike Path.exists, it takes texts of any length
    may_be_path = isinstance(value, str) and ("/" in value or key.endswith(".model"))
    if not isinstance(value, str) or not may_be_path or "://" in value or exists(value):
        return value
    # skip the run's own folder: it has the model that it trained, and nothing that it began with
    above = [folder for folder in file.resolve().parents if not (folder / "checkpoints").is_dir()]
    return next((str(folder / value) for folder in above if exists(folder / value)), value)


def expand_variables(value: object, key: str) -> object:
    """Fill in `~`, `$NAME` and `${NAME}` as a shell would, in a text that may be a path, an address
    or a key: it has no spaces, and every $ begins a name. In any other text, such as `Bearer
    ${MY_KEY}`, only `${NAME}` in capitals is filled in, and only if the variable is set.

    A recipe keeps what was written, because a variable may hold a secret, and a run's recipe is
    saved, printed and compared. Only the constructor of an object gets the value.

    Raises:
        RecipeError: If `${NAME}` stands for a variable that is not set, or if the text, or a folder
            in it, begins with such a `$NAME`.
    """
    setting = key.rpartition(".")[2]
    if not isinstance(value, str) or setting in _NO_PATHS:
        return value
    if not re.fullmatch(rf"(?:[^\s$]|{_VARIABLE})+", value):
        return re.sub(_IN_PROSE, lambda found: os.environ.get(found[1], found[0]), value)
    missing = [name for name in variable_names(value) if name not in os.environ]
    begins = re.findall(rf"(?:^|/)({_VARIABLE})", value)
    if name := next((n for n in missing if "${" + n + "}" in value or f"${n}" in begins), None):
        raise RecipeError(
            f"{key} is {value!r}, and no variable {name} is set. "
            f"Run 'export {name}=...' first, or write the value out."
        )
    return os.path.expandvars(Path(value).expanduser() if value.startswith("~/") else value)


def may_be_secret(name: str) -> bool:
    """True if the value of a variable may be a secret: it is no path, and not so short that it
    would occur in other words."""
    value = os.environ.get(name, "")
    return len(value) >= _SHORTEST and not os.path.exists(value)  # noqa: PTH110 - any text


def variable_name(text: str) -> str | None:
    """The name of the variable that a whole text refers to; None if it does not."""
    return text.strip("${}") if re.fullmatch(_VARIABLE, text) else None


def variable_names(text: str) -> list[str]:
    """The names of the variables in a text."""
    return [name.strip("${}") for name in re.findall(_VARIABLE, text)]
