"""Explains why a recipe does not fit the classes that it describes: the key, its value, and what
would fit.

jsonargparse decides whether a recipe is valid. But it reports a mistake below an optional or union
type once for each member of the type. So `explain` walks the recipe and the types in parallel, down
to the smallest part that does not fit: plain values before torch loads, the rest after jsonargparse
has refused the recipe.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import inspect
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from turnrl.plugin.errors import PluginError, RecipeError, TurnRLError, suggest_name
from turnrl.plugin.hooks import KINDS, find_class, load_classes
from turnrl.recipe.keys import suggest_key_below, unknown_key_message
from turnrl.recipe.merging import Contents
from turnrl.runs.config import SECTIONS

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
"""Hints for a value of another type in the place of a text."""


def explain_refusal(
    error: Exception, contents: Contents, kinds: Mapping[str, object], classes: Mapping[str, type]
) -> RecipeError | None:
    """Explain why a recipe is refused. None if its values fit: then its classes have failed.

    Args:
        error: The error of jsonargparse, or of a constructor that got a wrong value, such as a null
            in the place of a number.
        contents: The recipe.
        kinds: Types of its keys at the top that are not sections.
        classes: The classes of its sections.
    """
    for hook in KINDS:  # messages list the installed classes
        with contextlib.suppress(PluginError):
            load_classes(hook)
    for fault in filter(None, faults(contents, kinds, classes)):
        return RecipeError(fault)
    if not isinstance(error, ArgumentError) and "Union subtypes" not in str(error):
        return None
    # jsonargparse wraps the error in which a component explains its own settings
    cause: BaseException = error
    while not isinstance(cause, TurnRLError) and (cause.__cause__ or cause.__context__):
        cause = cause.__cause__ or cause.__context__ or cause
    return RecipeError(" ".join(str(cause).split()))


def faults(
    contents: Contents, kinds: Mapping[str, object], classes: Mapping[str, type]
) -> Iterator[str | None]:
    """For each part of a recipe, a message about its fault, or None if it seems to have none."""
    if (unknown := unknown_section_message(contents, kinds, classes)) is not None:
        yield unknown
        return
    for key, value in contents.items():
        cls = classes.get(key)
        if cls is None:
            yield explain(value, kinds[key], key)
        elif key in ("model", "data") and "class_path" in value:
            yield explain_class(value, cls.__mro__[1], key)
        else:
            yield explain_section(value, cls, key)


def unknown_section_message(
    contents: Contents, kinds: Collection[str], classes: Mapping[str, type]
) -> str | None:
    """The message about an unknown key at the top of a recipe; None if there is none."""
    top = [*dict.fromkeys([*SECTIONS, *kinds])]
    for key, value in contents.items():
        if key not in top:
            homes = [
                f"{name}.{key}"
                for name, cls in classes.items()
                if key in constructor_parameters(cls)
            ]
            near = suggest_name(str(key), top) or suggest_key_below(str(key), value)
            near = near or suggest_name(str(key), homes)
            return f"unknown key '{key}'.{near} There are {', '.join(top)}."
    return None


def explain(value: object, kind: object, key: str) -> str | None:
    """Explain why a value of a recipe does not fit; None if it may fit.

    Args:
        value: The value, as YAML gives it.
        kind: The type that it should have.
        key: The value's key in the recipe.
    """
    if (fits := _fits(value, kind)) and "None" not in repr(value):  # a null below it may not fit
        return None
    faults: list[str | None] = []
    choices: list[str] = []
    for member in _union_members(kind):
        if isinstance(value, list):
            parts = enumerate(zip(value, _item_types(member, len(value)), strict=False))
            faults += [explain(item, part, f"{key}[{i}]") for i, (item, part) in parts]
        elif isinstance(value, Mapping) and _is_section(member):
            faults += [explain_section(value, member, key)]
        elif isinstance(value, Mapping | str) and _base(member):
            faults += [explain_class(value, member, key)]
        elif get_origin(member) is Literal:
            choices += map(str, get_args(member))
    if fits or faults:  # if all faults are None, only jsonargparse knows what is wrong
        return next(filter(None, faults), None)
    shown = "null" if value is None else repr(value)
    # libraries write float | int in either order, and every whole number is a number
    members = _union_members(kind)
    kinds = [member for member in members if member is not int or float not in members]
    wanted = " or ".join(dict.fromkeys(map(_describe_type, kinds)))
    hint = _QUOTES.get(type(value), "") if str in members else ""
    return f"{key} is {shown}; it must be {wanted}.{suggest_name(str(value), choices)}{hint}"


def _union_members(kind: object) -> tuple[Any, ...]:
    """The types in a union; any other type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(value: object, kind: object) -> bool:
    """True if jsonargparse takes a value for a type. Null is checked here, because jsonargparse
    takes it everywhere."""
    if value is None:
        return not {Any, types.NoneType}.isdisjoint(_union_members(kind))
    parser = _parser()
    try:
        parser.add_argument("--value", type=kind)
        parser.parse_object({"value": copy.deepcopy(value)})  # it writes into its argument
    except Exception:  # the value may name a module, whose import may raise anything
        return False
    return True


def _parser() -> ArgumentParser:
    # takes a tenth of a second; unknown keys need no parser
    from jsonargparse import ArgumentParser

    return ArgumentParser(exit_on_error=False)


def _item_types(kind: object, count: int) -> tuple[object, ...]:
    """The types that the `count` items of a list should have; empty if the type is not a list."""
    origin, args = get_origin(kind), get_args(kind)
    if not inspect.isclass(origin) or not issubclass(origin, Iterable):  # a callable has items too
        return ()
    if origin is not tuple or ... in args:
        return args[:1] * count
    return args if len(args) == count else ()


def _is_section(kind: object) -> bool:
    """True if a recipe describes a class without `class_path`, because there is no choice."""
    return is_dataclass(kind) or hasattr(kind, "__final__")


def _base(kind: Any) -> Any:
    """The class of which a type takes subclasses, as instances or as callables that make one; None
    if it takes none."""
    if get_origin(kind) is Callable:
        made = get_args(kind)[-1]
        return None if made is Any else made  # a function of any kind is not a class
    not_component = _plain_name(kind) or kind.__module__ == "builtins" or _is_section(kind)
    return kind if inspect.isclass(kind) and not not_component else None


def _plain_name(kind: object) -> str | None:
    # signatures such as AdamW's take tensors as numbers; compared as text, without importing torch
    return "a number" if str(kind) == "<class 'torch.Tensor'>" else _NAMES.get(kind)


def _describe_type(kind: Any) -> str:
    """A type that is not a union, in a user's words."""
    args = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, args))
    if _is_section(kind):
        return f"a mapping with keys of {', '.join(constructor_parameters(kind))}"
    if get_origin(kind) is Callable and _base(kind) is None:
        return "the path of a function, such as my_module.my_function"
    if base := _base(kind):
        names = ", ".join(find_imported_classes(base)) or "my_package.MyClass"
        return f"the name of a class, such as {names}"
    exact = get_origin(kind) is tuple and ... not in args
    a_list = f"a list of {len(args)}" if exact else "a list, such as [NAME]"
    return _plain_name(get_origin(kind) or kind) or a_list


def explain_section(
    value: Contents, cls: type, key: str, skip: int = 0, component: bool = False
) -> str | None:
    """Explain why the settings of a class do not fit; see `explain`.

    Args:
        value: Settings by name.
        cls: The class.
        key: The section's key in the recipe.
        skip: Number of first parameters that the recipe does not set.
        component: True if the recipe named the class.
    """
    settable = dict(list(constructor_parameters(cls).items())[skip:])
    if "class_path" in value and "class_path" not in settable:
        return (
            f"{key} names {value['class_path']!r}, but there is no class to choose. "
            f"{cls.__name__} has the keys {', '.join(settable) or 'none'}."
        )
    for name, item in value.items():
        if name not in settable:
            return unknown_key_message(f"{key}.{name}", settable, cls.__name__, component)
        fault = explain(item, settable[name].annotation, f"{key}.{name}")
        if fault and item is not settable[name].default:
            return fault
    if missing := [n for n, p in settable.items() if p.default is p.empty and n not in value]:
        first, every = missing[0], ", ".join(missing)
        return f"{key}.{first} is missing, which {cls.__name__} needs. Set {every}."
    return None


def constructor_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """A constructor's parameters with their types, including those that it passes on."""
    by_name: dict[str, inspect.Parameter] = {}
    for init in [vars(owner)["__init__"] for owner in cls.__mro__ if "__init__" in vars(owner)]:
        try:
            hints = typing.get_type_hints(init)
        except (NameError, TypeError, AttributeError):  # names that only a type checker sees
            hints = {}
        own = list(inspect.signature(init).parameters.values())[1:]
        for p in own:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                by_name.setdefault(p.name, p.replace(annotation=hints.get(p.name, Any)))
        if all(p.kind is not p.VAR_KEYWORD for p in own):
            break
    else:  # the last constructor passes settings on to something that is not a base of the class
        parser = _parser()
        with contextlib.suppress(ValueError):  # jsonargparse cannot read every class
            parser.add_class_arguments(cls, fail_untyped=False)
        for name, default in vars(parser.get_defaults()).items():
            passed = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            by_name.setdefault(name, passed.replace(annotation=Any))
    return by_name


def explain_class(value: Contents | str, kind: Any, key: str) -> str | None:
    """Explain why a named class, perhaps with `init_args`, does not fit; see `explain`."""
    base = _base(kind)
    classes = find_imported_classes(base)
    described: Contents = {"class_path": value} if isinstance(value, str) else value
    name, settings = described.get("class_path"), described.get("init_args", {})
    if not isinstance(name, str):
        return (
            f"{key} is {value!r}, which does not name a class. Name it: {{class_path: NAME, "
            f"init_args: {{...}}}}, or by an option --{key} NAME before its settings. Installed: "
            f"{', '.join(classes) or 'none'}. Or give a path, such as my_package.MyClass."
        )
    for odd in set(described) - {"class_path", "init_args", "dict_kwargs"}:
        put = f"{{class_path: {name}, init_args: {{{odd}: {described[odd]}}}}}"
        return f"{key}: {odd!r} is next to class_path. Put it under init_args: {put}."
    try:
        cls = find_class(name, classes, *_union_members(base))
    except LookupError as error:
        return f"{key} names {name!r}, {error}"
    if fault := explain(settings, dict, f"{key}.init_args"):
        return fault
    # turnrl itself passes the first parameter of a callable
    return explain_section(settings, cls, key, skip=int(base is not kind), component=True)


def find_imported_classes(base: object) -> dict[str, type]:
    """The imported classes of a kind by short name, which include all that plugins bring."""
    by_name: dict[str, type] = {}
    for cls in [
        subclass for member in _union_members(base) for subclass in member.__subclasses__()
    ]:
        if not cls.__name__.startswith("_") and not inspect.isabstract(cls):
            by_name.setdefault(cls.__name__, cls)
        by_name = {**by_name, **find_imported_classes(cls), **by_name}
    return by_name
