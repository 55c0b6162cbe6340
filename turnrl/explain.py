"""Why a recipe does not fit the classes that it describes: the key, its value, and what would do.

jsonargparse decides whether a recipe is good; but of a mistake below an optional or a union type
it tells what is wrong with each of its members. When it has refused a recipe, the recipe is walked
here beside the types, down to the smallest part that does not fit.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser

from turnrl.errors import did_you_mean
from turnrl.plugins import KINDS, installed

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list, such as [NAME]",
    dict: "a mapping",
    types.NoneType: "null",
}


def explain(value: Any, kind: Any, key: str) -> str | None:
    """What is wrong with a value of a recipe; None if it may do.

    Args:
        value: The value, as YAML gives it.
        kind: The type that it is to have.
        key: Where it stands.
    """
    if _fits(value, kind):
        return None
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        shape = [member for member in args if _like(value, member)]
        told = [explain(value, member, key) for member in shape]
        if told:
            return told[-1]
    elif isinstance(value, list) and args and _is_list(kind):
        told = [explain(item, args[0], f"{key}[{i}]") for i, item in enumerate(value)]
        if found := list(filter(None, told)):
            return found[0]
    elif origin is Callable:
        return explain_class(value, args[-1], key, 1)
    elif _is_section(kind):
        return explain_section(value, kind, key)
    elif _is_class(kind):
        return explain_class(value, kind, key)
    near = did_you_mean(str(value), map(str, args)) if origin is Literal else ""
    return f"{key} is {value!r}; it must be {_named(kind)}.{near}"


def _fits(value: Any, kind: Any) -> bool:
    """Whether jsonargparse takes it."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--it", type=kind)
        parser.parse_object({"it": value})
    except (ArgumentError, ValueError, TypeError, KeyError):
        return False
    return True


def _is_list(kind: Any) -> bool:
    origin = get_origin(kind)
    return inspect.isclass(origin) and issubclass(origin, Sequence)


def _is_class(kind: Any) -> bool:
    return inspect.isclass(kind) and kind.__module__ != "builtins"


def _is_section(kind: Any) -> bool:
    """Whether it is described without a `class_path`: there is nothing to choose."""
    return _is_class(kind) and (hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__final__"))


def _like(value: Any, kind: Any) -> bool:
    """Whether a value looks like an attempt at a type."""
    if isinstance(value, list):
        return _is_list(kind)
    component = get_origin(kind) is Callable or (_is_class(kind) and not _is_section(kind))
    if isinstance(value, Mapping):
        return component or _is_section(kind)
    return isinstance(value, str) and component


def _named(kind: Any) -> str:
    """A type as a user would say it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_named, args)))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if _is_section(kind):
        return "a mapping"
    return _NAMES.get(origin or kind) or f"a {getattr(kind, '__name__', kind)}"


def explain_section(value: Any, cls: Any, key: str, skip: int = 0) -> str | None:
    """What is wrong with the settings of a class; see `explain`.

    Args:
        value: Settings by name.
        cls: Whose they are.
        key: Where they stand.
        skip: How many of its first parameters are not the recipe's business.
    """
    known = dict(list(_parameters(cls).items())[skip:])
    some = ", ".join(known) or "none"
    if not isinstance(value, Mapping):
        return f"{key} is {value!r}; it must be a mapping with keys of {some}."
    for name, item in value.items():
        if name not in known:
            colon = " In YAML a space follows the colon." if ":" in str(name) else ""
            has = f"{colon} {cls.__name__} has the keys {some}."
            return f"unknown key '{key}.{name}'.{did_you_mean(str(name), known) or has}"
        if told := explain(item, known[name].annotation, f"{key}.{name}"):
            return told
    missing = [n for n, p in known.items() if p.default is p.empty and n not in value]
    if not missing:
        return None
    return f"{key}.{missing[0]} is missing, which {cls.__name__} needs. Set {', '.join(missing)}."


def _parameters(cls: Any) -> dict[str, inspect.Parameter]:
    """A constructor's parameters with their types, those included that it passes on."""
    found: dict[str, inspect.Parameter] = {}
    for made in [vars(owner)["__init__"] for owner in cls.__mro__ if "__init__" in vars(owner)]:
        try:
            hints = typing.get_type_hints(made)
        except (NameError, TypeError, AttributeError):  # names that only a type checker sees
            hints = {}
        own = list(inspect.signature(made).parameters.values())[1:]
        for one in own:
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                found.setdefault(one.name, one.replace(annotation=hints.get(one.name, Any)))
        if all(one.kind is not one.VAR_KEYWORD for one in own):
            break
    return found


def explain_class(value: Any, base: Any, key: str, skip: int = 0) -> str | None:
    """What is wrong with a class given by its name, perhaps with `init_args`; see `explain`."""
    known = _classes(base)
    some = ", ".join(list(known)[:20]) or "none"
    given = {"class_path": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(name := given.get("class_path"), str):
        how = "as NAME or as {class_path: NAME, init_args: {...}}"
        return f"{key} is {value!r}; it must name a class, {how}. Installed: {some}."
    for odd in set(given) - {"class_path", "init_args", "dict_kwargs"}:
        put = f"{{class_path: {name}, init_args: {{{odd}: {given[odd]}}}}}"
        return f"{key}: {odd!r} stands beside class_path. Put it under init_args: {put}."
    module, _, attribute = name.rpartition(".")
    if not module and name not in known:
        return (
            f"{key} names {name!r}, which is not installed.{did_you_mean(name, known, 0.5)} "
            f"Installed: {some}. Or give the full path of a class, such as my_package.MyClass."
        )
    try:
        cls = getattr(importlib.import_module(module), attribute) if module else known[name]
    except Exception as error:  # a user's module may do anything
        cause = str(error) or type(error).__name__
        return f"{key} names {name!r}, but {cause}. Give a class that can be imported."
    if not (inspect.isclass(cls) and issubclass(cls, get_args(base) or base)):
        return f"{key} names {name!r}, which is not a subclass of {_named(base)[2:]}. Name one."
    return explain_section(given.get("init_args") or {}, cls, key, skip)


def _classes(base: Any) -> dict[str, type]:
    """Classes of a kind by their short names."""
    for hook, kind in KINDS.items():
        if kind is base:
            return installed(hook)
    found: dict[str, type] = {}
    waiting = list(get_args(base) or (base,))
    while waiting:
        for cls in waiting.pop().__subclasses__():
            waiting.append(cls)
            if not cls.__name__.startswith("_") and not inspect.isabstract(cls):
                found.setdefault(cls.__name__, cls)
    return found
