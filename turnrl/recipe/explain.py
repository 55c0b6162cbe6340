"""Why a recipe does not fit the classes that it describes: the key, its value, and what would do.

jsonargparse decides whether a recipe is good; but of a mistake below an optional or a union type
it tells what is wrong with each of its members. When it has refused a recipe, the recipe is walked
here beside the types, down to the smallest part that does not fit.
"""

import contextlib
import copy
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Union, cast, get_args, get_origin

from jsonargparse import ArgumentParser
from torch import Tensor

from turnrl.errors import did_you_mean
from turnrl.plugins import find_class
from turnrl.recipe.keys import unknown_key

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Tensor: "a number",  # in signatures such as AdamW's
    str: "a text",
    dict: "a mapping",
    types.NoneType: "null",
}


def explain(value: Any, kind: Any, key: str) -> str | None:
    """Explain the fault in a value of a recipe; None if it may do.

    Args:
        value: The value, as YAML gives it.
        kind: The type that it is to have.
        key: Where it stands.
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
    if fits or faults:  # or it is a fault that only jsonargparse can tell
        return next(filter(None, faults), None)
    shown = "null" if value is None else repr(value)
    named = " or ".join(dict.fromkeys(map(_named, _members(kind))))
    quotes = " In YAML a # begins a comment: put a text with one in quotes."
    hint = quotes if value is None and str in _members(kind) else ""
    return f"{key} is {shown}; it must be {named}.{did_you_mean(str(value), choices)}{hint}"


def _members(kind: Any) -> tuple[Any, ...]:
    """The types that a union is of; any other is the one member of itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    """True if jsonargparse takes it. It lets null pass everywhere, so null is judged here."""
    if value is None:
        return not {Any, types.NoneType}.isdisjoint(_members(kind))
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--it", type=kind)
        parser.parse_object({"it": copy.deepcopy(value)})  # it writes into what it is given
    except Exception:  # a module that the value names may do anything while it is imported
        return False
    return True


def _items(kind: Any, count: int) -> tuple[Any, ...]:
    """The types that the items of a list are to have; none if it is to be no list."""
    origin, args = get_origin(kind), get_args(kind)
    if not inspect.isclass(origin) or not issubclass(origin, Iterable):  # and a callable is none
        return ()
    if origin is not tuple or ... in args:
        return args[:1] * count
    return args if len(args) == count else ()


def _is_section(kind: Any) -> bool:
    """True if it is described without a `class_path`: there is nothing to choose."""
    return hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__final__")


def _base(kind: Any) -> Any:
    """The class of which a type asks for a subclass, to be made or to be called; None if none."""
    if get_origin(kind) is Callable:
        return get_args(kind)[-1]
    known = kind in _NAMES or kind.__module__ == "builtins" or _is_section(kind)
    return kind if inspect.isclass(kind) and not known else None


def _named(kind: Any) -> str:
    """A type that is no union, as a user would say it."""
    args = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, args))
    if _is_section(kind):
        return f"a mapping with keys of {', '.join(parameters(kind))}"
    if base := _base(kind):
        return f"the name of a class, such as {', '.join(_classes(base)) or 'my_package.MyClass'}"
    exact = get_origin(kind) is tuple and ... not in args
    few = f"a list of {len(args)}" if exact else "a list, such as [NAME]"
    return _NAMES.get(get_origin(kind) or kind, few)


def explain_section(
    value: Mapping[str, Any], cls: Any, key: str, skip: int = 0, component: bool = False
) -> str | None:
    """Explain the fault in the settings of a class; see `explain`.

    Args:
        value: Settings by name.
        cls: Whose they are.
        key: Where they stand.
        skip: How many of its first parameters are not the recipe's business.
        component: Whether the recipe named the class.
    """
    known = dict(list(parameters(cls).items())[skip:])
    has = f"{cls.__name__} has the keys {', '.join(known) or 'none'}."
    if "class_path" in value and "class_path" not in known:
        return f"{key} names {value['class_path']!r}, but there is no class to choose. {has}"
    for name, item in value.items():
        if name not in known:
            return unknown_key(f"{key}.{name}", known, cls.__name__, component)
        fault = explain(item, known[name].annotation, f"{key}.{name}")
        if fault and item is not known[name].default:
            return fault
    missing = [n for n, p in known.items() if p.default is p.empty and n not in value]
    if not missing:
        return None
    return f"{key}.{missing[0]} is missing, which {cls.__name__} needs. Set {', '.join(missing)}."


def parameters(cls: Any) -> dict[str, inspect.Parameter]:
    """A constructor's parameters with their types, those included that it passes on."""
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
    else:  # the last passes settings on to what is no base of the class
        for name, default in _passed_on(cls):
            passed = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            by_name.setdefault(name, passed.replace(annotation=Any))
    return by_name


def _passed_on(cls: Any) -> Iterator[tuple[str, Any]]:
    """The settings that jsonargparse knows a class by, with their defaults."""
    parser = ArgumentParser(exit_on_error=False)
    with contextlib.suppress(ValueError):  # of a class that it cannot read
        parser.add_class_arguments(cls, fail_untyped=False)
    yield from vars(parser.get_defaults()).items()


def explain_class(value: Any, kind: Any, key: str) -> str | None:
    """Explain the fault in a class given by its name, perhaps with `init_args`; see `explain`."""
    base = _base(kind)
    known = _classes(base)
    some = f" Installed: {', '.join(known) or 'none'}. Or give a path, such as my_package.MyClass."
    given = {"class_path": value} if isinstance(value, str) else value
    name, settings = given.get("class_path"), cast(dict[str, Any], given.get("init_args", {}))
    if not isinstance(name, str):
        words, keys = [*given, *given.values()], set(settings or given)
        likely = [n for n, cls in known.items() if n in words or keys <= {*parameters(cls)}]
        name = (likely or ["NAME"])[0]
        options = "".join(f" --{key}.{one} {given[one]}" for one in given)
        how = f"{{class_path: {name}, init_args: {{...}}}}, or by options --{key} {name}{options}"
        return f"{key} is {value!r}, and does not say of which class. Name it: {how}.{some}"
    for odd in set(given) - {"class_path", "init_args", "dict_kwargs"}:
        if near := did_you_mean(odd, ["init_args", "dict_kwargs"], 0.8):
            return f"{key}: {odd!r} stands beside class_path.{near}"
        put = f"{{class_path: {name}, init_args: {{{odd}: {given[odd]}}}}}"
        return f"{key}: {odd!r} stands beside class_path. Put it under init_args: {put}."
    try:
        cls = find_class(name, known, *_members(base))
    except LookupError as error:
        return f"{key} names {name!r}, {error}"
    fault = explain(settings, dict, f"{key}.init_args")
    # the first parameter of what is to be called is what it is called with
    return fault or explain_section(settings, cls, key, skip=int(base is not kind), component=True)


def _classes(base: Any) -> dict[str, type]:
    """Classes of a kind by their short names: those that are imported, as plugins are by now."""
    by_name: dict[str, type] = {}
    for cls in [sub for one in _members(base) for sub in one.__subclasses__()]:
        if not cls.__name__.startswith("_") and not inspect.isabstract(cls):
            by_name.setdefault(cls.__name__, cls)
        by_name = {**by_name, **_classes(cls), **by_name}
    return by_name
