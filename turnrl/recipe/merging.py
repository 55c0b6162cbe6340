"""Values of recipes: merged, and changed text by text."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from turnrl.errors import RecipeError

Contents: TypeAlias = Mapping[str, Any]
"""A recipe, or a mapping in it, as YAML gives it."""
Editable: TypeAlias = dict[str, Any]
"""The same, to be changed."""
PARTS = {"class_path", "init_args", "dict_kwargs"}
"""Keys of a class with its settings."""
_NO_PATHS = ("answer_pattern", "instructions")
"""Settings in which a $ is a $."""
_VARIABLE = r"(?<!\\)\$(?:[A-Za-z_]\w*|\{\w+\})"


def listed(value: object) -> list[Any]:
    """A list as it is, anything else as a list of one; null and false are left out."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if item is not None and item is not False]


class _Added(list[object]):
    """A list that ends with what an option has added. The options after it set that last item."""


def merged(old: object, new: object, key: str = "") -> Any:
    """Merge a value into another, which it overrides. Only mappings are merged.

    A class may be given by its name alone, its settings without `init_args`, and the two in either
    order. Settings do not pass from one class to another.

    Raises:
        RecipeError: If the new value is for an item of a list, and does not say which.
    """
    if isinstance(old, list) and isinstance(new, dict):
        if isinstance(old, _Added):
            return _Added([*old[:-1], merged(old[-1], new, key)])
        raise RecipeError(
            f"{key} is a list of {len(old)}, and {new} does not name the item to change. "
            f"Give the whole list, as --{key} '[...]', or change the recipe."
        )
    if not isinstance(new, dict) and not (isinstance(new, str) and isinstance(old, dict) and old):
        return new
    under, over = (
        {"class_path": one} if isinstance(one, str) else one if isinstance(one, dict) else {}
        for one in (old, new)
    )
    if "class_path" in {**under, **over}:
        under, over = (one if PARTS & {*one} else {"init_args": one} for one in (under, over))
        names = {str(one.get("class_path", "")).rpartition(".")[2] for one in (under, over)}
        if len(names - {""}) > 1:
            return new
    both = dict(under)
    for name, value in over.items():
        place = str(name).removesuffix("+")
        there = both.get(place)
        if str(name).endswith("+"):
            there, value = None, _Added(listed(there) + listed(value))
        both[place] = merged(there, value, f"{key}.{place}".lstrip("."))
    return both


def dropped(old: object, new: object, key: str = "") -> Iterator[str]:
    """A line for each class that another one replaces, with the settings that it loses by that.

    Args:
        old: A recipe, or a part of it.
        new: The same after a merge.
        key: Where the part stands.
    """
    if not isinstance(old, dict):
        return
    after = {"class_path": new} if isinstance(new, str) else new if isinstance(new, dict) else {}
    was, now = (str(one.get("class_path") or "").rpartition(".")[2] for one in (old, after))
    if was and now and was != now:
        lost = {*(old.get("init_args") or {})} - {*(after.get("init_args") or {}), *after}
        if lost:
            names = ", ".join(sorted(lost))
            yield f"{key} is {now} instead of {was}, and starts without its settings: {names}."
        return
    for name in old.keys() & after.keys():
        inner = key if name == "init_args" else f"{key}.{name}".lstrip(".")
        yield from dropped(old[name], after[name], inner)


def each_value(value: object, change: Callable[[object, str], object], key: str = "") -> Any:
    """Change every value in a recipe that is neither a mapping nor a list.

    Args:
        value: The recipe, or a part of it, as YAML gives it.
        change: Called with a value and its key; returns the value to put in its place.
        key: Where the part stands.
    """
    if isinstance(value, dict):
        return {name: each_value(item, change, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [each_value(item, change, f"{key}[{i}]") for i, item in enumerate(value)]
    return change(value, key)


def relocated(file: Path, value: object, key: str) -> object:
    """Find a path of the recipe that a run keeps. It starts from the folder in which the run was
    begun. If it leads nowhere from here, it is tried from the folders above the run's file. The
    path of a model is also tried without its first folders, for the case that the run has moved."""
    exists = os.path.exists  # unlike Path's, it takes texts of any length
    model = key.endswith(".model") and "://" not in str(value)
    if not isinstance(value, str) or not (model or "/" in value) or exists(value):
        return value
    # the run's own folder has the model that it trained, and nothing that it began with
    above = [folder for folder in file.resolve().parents if not (folder / "checkpoints").is_dir()]
    there = [folder / value for folder in above]
    if model:  # a hub name may also be the end of a path: only a folder with a model counts
        parts = Path(value).parts
        ends = [Path(*parts[n:]) for n in range(1, len(parts))]
        moved = (folder / end for end in ends for folder in above)
        there += [path for path in moved if exists(path / "config.json")]
    return next((str(path) for path in there if exists(path)), value)


def filled_in(value: object, key: str) -> object:
    """Fill in `~`, `$NAME` and `${NAME}` as a shell would, in a text that may be a path: one
    without spaces, in which every $ begins a name.

    Raises:
        RecipeError: If the path, or a folder in it, is a variable that is not set.
    """
    setting = key.rpartition(".")[2]
    if not isinstance(value, str) or setting in _NO_PATHS:
        return value
    if not re.fullmatch(rf"(?:[^\s$]|{_VARIABLE})+", value):
        return value
    filled = os.path.expandvars(Path(value).expanduser() if value.startswith("~/") else value)
    if missing := re.search(rf"(?:^|/){_VARIABLE}", filled):
        name = missing[0].strip("/${}")
        raise RecipeError(
            f"{key} is {value!r}, and no variable {name} is set. "
            f"Run 'export {name}=...' first, or write the path out."
        )
    return filled
