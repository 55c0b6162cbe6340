"""Why a recipe does not fit the classes that it describes: the key, its value, and what would fit.

jsonargparse decides whether a recipe is good. But it reports a mistake below an optional or a union
type once for each member of that type. So `explain` walks the recipe beside the types, down to the
smallest part that does not fit: plain values before torch loads, the rest when jsonargparse has
refused them.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from turnrl.errors import did_you_mean
from turnrl.plugins import find_class
from turnrl.recipe.keys import unknown_key
from turnrl.recipe.merging import Contents

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_NAMES: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a mapping",
    types.NoneType: "null",
}

_LOOKS_ELSE = " In YAML a text that looks like a number or a date needs quotes: write '1', not 1."
_QUOTES: dict[type, str] = {
    types.NoneType: " In YAML a # begins a comment: put a text with one in quotes.",
    bool: " In YAML on, off, yes and no are true and false: put them in quotes, such as 'on'.",
    **dict.fromkeys((int, float, datetime.date, datetime.datetime), _LOOKS_ELSE),
}
"""What a value may have been meant as, where a text should stand."""


def is_plain(kind: object) -> bool:
    """True if values of a type are texts, numbers and the like, and no class is named in them."""
    return all(one in _NAMES or get_origin(one) is Literal for one in _members(kind))


def explain(value: object, kind: object, key: str) -> str | None:
    """Explain why a value of a recipe does not fit; None if it may fit.

    Args:
        value: The value, as YAML gives it.
        kind: The type that it should have.
        key: Where it stands in the recipe.
    """
    if (fits := _fits(value, kind)) and "None" not in repr(value):  # it may hide a null below it
        return None
    faults: list[str | None] = []
    choices: list[str] = []
    for member in _members(kind):
        if isinstance(value, list):
            parts = enumerate(zip(value, _items(member, len(value)), strict=False))
            faults += [explain(item, part, f"{key}[{i}]") for i, (item, part) in parts]
        elif isinstance(value, Mapping) and _is_section(member):
            faults += [explain_section(value, member, key)]
        elif isinstance(value, Mapping | str) and _base(member):
            faults += [explain_class(value, member, key)]
        elif get_origin(member) is Literal:
            choices += map(str, get_args(member))
    if fits or faults:  # or only jsonargparse knows what is wrong
        return next(filter(None, faults), None)
    shown = "null" if value is None else repr(value)
    # libraries write float | int in either order, and every whole number is a number
    kinds = [one for one in _members(kind) if one is not int or float not in _members(kind)]
    named = " or ".join(dict.fromkeys(map(_named, kinds)))
    hint = _QUOTES.get(type(value), "") if str in _members(kind) else ""
    return f"{key} is {shown}; it must be {named}.{did_you_mean(str(value), choices)}{hint}"


def _members(kind: object) -> tuple[Any, ...]:
    """The types in a union; any other type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(value: object, kind: object) -> bool:
    """True if jsonargparse takes it, except for null, which it takes everywhere."""
    if value is None:
        return not {Any, types.NoneType}.isdisjoint(_members(kind))
    parser = _parser()
    try:
        parser.add_argument("--it", type=kind)
        parser.parse_object({"it": copy.deepcopy(value)})  # it writes into what it is given
    except Exception:  # a module that the value names may do anything while it is imported
        return False
    return True


def _parser() -> ArgumentParser:
    from jsonargparse import ArgumentParser  # a tenth of a second, which unknown keys do not need

    return ArgumentParser(exit_on_error=False)


def _items(kind: object, count: int) -> tuple[object, ...]:
    """The types that the items of a list should have; none if it should not be a list."""
    origin, args = get_origin(kind), get_args(kind)
    if not inspect.isclass(origin) or not issubclass(origin, Iterable):  # a callable has items too
        return ()
    if origin is not tuple or ... in args:
        return args[:1] * count
    return args if len(args) == count else ()


def _is_section(kind: object) -> bool:
    """True if a recipe describes it without a `class_path`, because there is no choice."""
    return is_dataclass(kind) or hasattr(kind, "__final__")


def _base(kind: Any) -> Any:
    """The class whose subclass a type asks for, made or to be called; None if it asks for none."""
    if get_origin(kind) is Callable:
        made = get_args(kind)[-1]
        return None if made is Any else made  # a function of any kind is not a class
    known = _plain_name(kind) or kind.__module__ == "builtins" or _is_section(kind)
    return kind if inspect.isclass(kind) and not known else None


def _plain_name(kind: object) -> str | None:
    # signatures such as AdamW's have tensors in the place of numbers; torch may not be loaded yet
    return "a number" if str(kind) == "<class 'torch.Tensor'>" else _NAMES.get(kind)


def _named(kind: Any) -> str:
    """A type other than a union, in a user's words."""
    args = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, args))
    if _is_section(kind):
        return f"a mapping with keys of {', '.join(parameters(kind))}"
    if get_origin(kind) is Callable and _base(kind) is None:
        return "the path of a function, such as my_module.my_function"
    if base := _base(kind):
        return f"the name of a class, such as {', '.join(_classes(base)) or 'my_package.MyClass'}"
    exact = get_origin(kind) is tuple and ... not in args
    few = f"a list of {len(args)}" if exact else "a list, such as [NAME]"
    return _plain_name(get_origin(kind) or kind) or few


def explain_section(
    value: Contents, cls: type, key: str, skip: int = 0, component: bool = False
) -> str | None:
    """Explain why the settings of a class do not fit; see `explain`.

    Args:
        value: Settings by name.
        cls: The class.
        key: Where they stand in the recipe.
        skip: How many of its first parameters the recipe does not set.
        component: True if the recipe named the class.
    """
    known = dict(list(parameters(cls).items())[skip:])
    if "class_path" in value and "class_path" not in known:
        return (
            f"{key} names {value['class_path']!r}, but there is no class to choose. "
            f"{cls.__name__} has the keys {', '.join(known) or 'none'}."
        )
    for name, item in value.items():
        if name not in known:
            return unknown_key(f"{key}.{name}", known, cls.__name__, component)
        fault = explain(item, known[name].annotation, f"{key}.{name}")
        if fault and item is not known[name].default:
            return fault
    if missing := [n for n, p in known.items() if p.default is p.empty and n not in value]:
        first, every = missing[0], ", ".join(missing)
        return f"{key}.{first} is missing, which {cls.__name__} needs. Set {every}."
    return None


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    """A constructor's parameters with their types, including those that it passes on."""
    by_name: dict[str, inspect.Parameter] = {}
    for made in [vars(owner)["__init__"] for owner in cls.__mro__ if "__init__" in vars(owner)]:
        try:
            hints = typing.get_type_hints(made)
        except (NameError, TypeError, AttributeError):  # names that only a type checker sees
            hints = {}
        own = list(inspect.signature(made).parameters.values())[1:]
        for one in own:
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                by_name.setdefault(one.name, one.replace(annotation=hints.get(one.name, Any)))
        if all(one.kind is not one.VAR_KEYWORD for one in own):
            break
    else:  # the last passes settings on to something that is no base of the class
        parser = _parser()
        with contextlib.suppress(ValueError):  # of a class that jsonargparse cannot read
            parser.add_class_arguments(cls, fail_untyped=False)
        for name, default in vars(parser.get_defaults()).items():
            passed = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            by_name.setdefault(name, passed.replace(annotation=Any))
    return by_name


def explain_class(value: Contents | str, kind: Any, key: str) -> str | None:
    """Explain why a class does not fit that is named, perhaps with `init_args`; see `explain`."""
    base = _base(kind)
    known = _classes(base)
    given: Contents = {"class_path": value} if isinstance(value, str) else value
    name, settings = given.get("class_path"), given.get("init_args", {})
    if not isinstance(name, str):
        words, keys = [*given, *given.values()], set(settings or given)
        likely = [n for n, cls in known.items() if n in words or keys <= {*parameters(cls)}]
        name = (likely or ["NAME"])[0]
        options = "".join(f" --{key}.{one} {given[one]}" for one in given)
        return (
            f"{key} is {value!r}, which does not name a class. Name it: {{class_path: {name}, "
            f"init_args: {{...}}}}, or by options --{key} {name}{options}. Installed: "
            f"{', '.join(known) or 'none'}. Or give a path, such as my_package.MyClass."
        )
    for odd in set(given) - {"class_path", "init_args", "dict_kwargs"}:
        if near := did_you_mean(odd, ["init_args", "dict_kwargs"], 0.8):
            return f"{key}: {odd!r} is next to class_path.{near}"
        put = f"{{class_path: {name}, init_args: {{{odd}: {given[odd]}}}}}"
        return f"{key}: {odd!r} is next to class_path. Put it under init_args: {put}."
    try:
        cls = find_class(name, known, *_members(base))
    except LookupError as error:
        return f"{key} names {name!r}, {error}"
    if fault := explain(settings, dict, f"{key}.init_args"):
        return fault
    # a function's first parameter is not the recipe's: turnrl passes it
    return explain_section(settings, cls, key, skip=int(base is not kind), component=True)


def _classes(base: object) -> dict[str, type]:
    """Classes of a kind by short name: the imported ones, which are all that plugins bring."""
    by_name: dict[str, type] = {}
    for cls in [sub for one in _members(base) for sub in one.__subclasses__()]:
        if not cls.__name__.startswith("_") and not inspect.isabstract(cls):
            by_name.setdefault(cls.__name__, cls)
        by_name = {**by_name, **_classes(cls), **by_name}
    return by_name
