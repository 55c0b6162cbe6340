"""Functions as tools: a typed function's signature and docstring say what the policy reads of it,
and bind a call's arguments to what the function takes.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, final

from turnrl.errors import (
    ArgumentTypeError,
    PolicyMistake,
    RecipeError,
    did_you_mean,
    instance_of,
    instances_of,
    kind_of,
)
from turnrl.types import ToolSpec

_Part = TypeVar("_Part")

_HOLD_SCHEMAS = ("properties", "patternProperties", "dependentSchemas")
"""Keywords of JSON Schema whose keys are names, and whose values are schemas."""
_HOLD_VALUES = ("const", "default", "enum", "examples", "required")
"""Keywords whose values are no schemas."""
_NOISE = ("title", "discriminator")
"""Keywords that pydantic adds, and that tell a policy nothing."""
_FIRST = ("type", "description", "properties", "items", "enum", "anyOf", "required")
"""Keywords in the order in which a policy reads them, before all others."""


@final
class Described:
    """A function as a tool.

    Args:
        spec: Its description, as the policy reads it.
        adapter: pydantic's, of a function of the same parameters that returns them by name.
        plain: The parameters and their types, if JSON's own values are what the function takes.
    """

    def __init__(
        self, spec: ToolSpec, adapter: Any, plain: Mapping[inspect.Parameter, type]
    ) -> None:
        from pydantic import ValidationError
        from pydantic_core import ArgsKwargs

        self.spec = spec
        self._plain = {one.name: kind for one, kind in plain.items()}
        self._defaults = {p.name: p.default for p in plain if p.default is not p.empty}
        self._needed = self._plain.keys() - self._defaults
        self._make, self._given, self._fault = adapter.validator, ArgsKwargs, ValidationError

    def bind(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """The function's arguments by name, defaults included: dates, enums, dataclasses and models
        are objects of their classes.

        Args:
            arguments: JSON values that the schema of `spec` allows. What it forbids is not always
                refused here: pydantic would take "1.5" for 1.5.
        Raises:
            PolicyMistake: If they cannot be read, such as the 31st of February for a date.
        """
        # a thread that has just woken takes longer for pydantic than for all the rest
        if self._plain and self._needed <= arguments.keys():
            for name, value in arguments.items():
                if type(value) is not self._plain.get(name):
                    break
            else:
                return {**self._defaults, **arguments}
        try:
            bound: dict[str, object] = self._make.validate_python(self._given((), dict(arguments)))
        except self._fault as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise PolicyMistake(f"bad arguments: {where}: {first['msg'][:120]}") from error
        return bound


def described(
    function: Callable[..., object], *, skip: Collection[str] = (), name: str = ""
) -> Described:
    """Describe a function as a tool: its docstring is the description (in Google's, NumPy's or
    Sphinx's style), its annotations are the JSON Schema.

    Args:
        function: A typed function, plain or async; a method, bound or not.
        skip: Parameters that the policy does not fill in, such as `self`.
        name: The name the policy calls it by; the function's own if empty.
    Raises:
        RecipeError: If the policy could not call it: a parameter lacks a type, for example. The
            message names the line to write.
    """
    its_name = name_of(function)
    if isinstance(function, functools.partial):
        skip = {*skip, *function.keywords}
    taken = [one for one in parameters_of(function) if one.name not in skip]
    for one in taken:
        _refuse_kind(one, its_name)
    if untyped := [one for one in taken if one.annotation is one.empty]:
        own = ["self"] if "self" in skip else []
        typed = ", ".join([*own, *map(_with_a_type, taken)])
        if untyped[0].name == "self":
            raise RecipeError(
                f"the function {its_name} is a method without its object. Give the method of an "
                "object in Python, as in tools=[it.method], or write a function that calls it."
            )
        raise RecipeError(
            f"the parameter {untyped[0].name!r} of the function {its_name} has no type. Write "
            f"'def {its_name.rpartition('.')[2]}({typed})', with the types you mean."
        )
    hints = {one.name: hint_of(function, one) for one in taken}
    text, about = _documented(function, its_name)
    adapter, schema = _adapted(taken, hints, about, its_name)
    spec = ToolSpec(name or its_name.rpartition(".")[2], text, schema)
    return Described(spec, adapter, _plain(taken, hints))


def _plain(
    taken: list[inspect.Parameter], hints: Mapping[str, Any]
) -> dict[inspect.Parameter, type]:
    """The types of parameters that are all texts, numbers and booleans, as their defaults are; else
    nothing."""
    for one in taken:
        kind = hints[one.name]
        plain_default = one.default is one.empty or type(one.default) is kind
        if kind not in (str, int, float, bool) or not plain_default:
            return {}
    return {one: hints[one.name] for one in taken}


def name_of(function: Callable[..., object]) -> str:
    """`my_module.search`: what a message calls a function.

    Raises:
        RecipeError: If it is a lambda, or an object that is not a function.
    """
    plain = _unbound(function)
    if not inspect.isroutine(plain):
        raise RecipeError(
            f"{plain!r:.80} is not a function. Give a function, or a bound method of an object."
        )
    if plain.__name__ == "<lambda>":
        raise RecipeError(
            "a lambda has no name and no types. Write it as a function: 'def name(x: str) -> str:'."
        )
    module = getattr(plain, "__module__", None)
    named = plain.__qualname__.rpartition("<locals>.")[2]
    return named if module in (None, "__main__", "builtins") else f"{module}.{named}"


def _unbound(function: Callable[..., object]) -> Callable[..., object]:
    """The function that a partial one calls; any other itself."""
    return function.func if isinstance(function, functools.partial) else function


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of a function.

    Raises:
        RecipeError: If it is written in C, and does not say.
    """
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"the function {name_of(function)} does not say what it takes ({error}). Call it from "
            "a function of your own, and give that one."
        ) from error


def with_functions(
    kind: Any,
    name: str,
    values: Sequence[_Part | Callable[..., object]],
    make: Callable[[Callable[..., object]], _Part],
    extends: str,
) -> list[_Part]:
    """Components of a list in which functions may stand for them.

    Args:
        kind: The contract that the components extend.
        name: The argument that has the list, for messages.
        values: The list.
        make: Makes a component of a function.
        extends: The classes that a user's own may extend, for messages.
    Raises:
        ArgumentTypeError: If it is not a list of components and functions.
        RecipeError: From `make`.
    """
    if inspect.isroutine(values):
        raise ArgumentTypeError(
            f"{name} is {kind_of(values)}, not a list. Pass a list: {name}=[{values.__name__}]."
        )
    if not isinstance(values, Sequence) or isinstance(values, str):
        instances_of(kind, name, values, extends)
    parts = list[_Part]()
    for number, one in enumerate(values):
        where = f"{name}[{number}]"
        if isinstance(one, kind):
            parts.append(one)
        elif isinstance(one, str) and (last := one.rpartition(".")[2])[:1].islower():
            raise ArgumentTypeError(
                f"{where} is {kind_of(one)}. In Python, pass the function itself: {last}."
            )
        elif callable(one) and not isinstance(one, type):
            try:
                parts.append(make(one))
            except RecipeError as error:
                raise RecipeError(f"{where}: {error}") from error
        else:
            instance_of(kind, where, one, f"{extends}, or a function")
    return parts


def _refuse_kind(parameter: inspect.Parameter, its_name: str) -> None:
    """Refuse a parameter that cannot be filled in by its name."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise RecipeError(
            f"the function {its_name} takes {str(parameter).partition(':')[0]!r}, which tells the "
            "policy nothing. Name each parameter, with its type."
        )
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise RecipeError(
            f"the parameter {parameter.name!r} of the function {its_name} can only be given by its "
            "place, and a policy gives arguments by their names. Take the '/' out of its 'def'."
        )


def _with_a_type(parameter: inspect.Parameter) -> str:
    """A parameter as it could be written: `top_k: int = 3`."""
    if parameter.annotation is parameter.empty:
        has = parameter.default not in (parameter.empty, None)
        kind = type(parameter.default) if has else str
        parameter = parameter.replace(annotation=kind)
    return str(parameter)


def hint_of(function: Callable[..., object], parameter: inspect.Parameter) -> object:
    """The type of a parameter, a name in quotes looked up in the function's module.

    Raises:
        RecipeError: If there is no such name.
    """
    plain = _unbound(function)
    known = getattr(inspect.unwrap(plain), "__globals__", {})
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, known, include_extras=True)[parameter.name]
    except (NameError, SyntaxError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"the type of the parameter {parameter.name!r} of the function {name_of(function)}, "
            f"{parameter.annotation!r}, cannot be read: {error}. Import or define it at the top of "
            "its module, and not below 'if TYPE_CHECKING'."
        ) from error


def _documented(function: Callable[..., object], its_name: str) -> tuple[str, dict[str, str]]:
    """The text of a function's docstring, and what it says about each parameter."""
    import docstring_parser

    plain = _unbound(function)
    parsed = docstring_parser.parse(inspect.getdoc(plain) or "")
    text = "\n\n".join(_on_one_line(part) for part in (parsed.description or "").split("\n\n"))
    if not text.strip():
        raise RecipeError(
            f"the function {its_name} has no docstring that says what it does, which the policy "
            'reads. Write one as the first line of its body: """What it does, in a sentence."""'
        )
    known = [one.name for one in parameters_of(plain)]
    about = {one.arg_name.lstrip("*"): _on_one_line(one.description) for one in parsed.params}
    if strange := next((one for one in about if one not in known), None):
        raise RecipeError(
            f"the docstring of the function {its_name} describes {strange!r}, which is no "
            f"parameter.{did_you_mean(strange, known)} Correct the docstring."
        )
    return text, about


def _on_one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _adapted(
    taken: list[inspect.Parameter],
    hints: Mapping[str, Any],
    about: Mapping[str, str],
    its_name: str,
) -> tuple[object, dict[str, object]]:
    """pydantic's adapter of a function of these parameters, and their JSON Schema with what the
    docstring says about them."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Quiet(GenerateJsonSchema):
        ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}

    def bound(**arguments: object) -> dict[str, object]:
        return arguments

    by_name = inspect.Parameter.KEYWORD_ONLY
    as_taken = [one.replace(kind=by_name, annotation=hints[one.name]) for one in taken]
    vars(bound)["__signature__"] = inspect.Signature(as_taken)
    bound.__annotations__ = dict(hints)
    try:
        adapter = TypeAdapter(cast(Any, bound))
        schema = adapter.json_schema(schema_generator=Quiet)
    except Exception as error:  # pydantic's, or of a type that describes itself
        for one, hint in hints.items():
            try:
                TypeAdapter(hint).json_schema(schema_generator=Quiet)
            except Exception as fault:
                raise RecipeError(
                    f"the parameter {one!r} of the function {its_name} is of the type "
                    f"{getattr(hint, '__name__', hint)}, which has no JSON Schema "
                    f"({_reason(fault)}). Take a str, int, float, bool, an enum, a list, a dict, "
                    "a dataclass or a pydantic model."
                ) from fault
        raise RecipeError(
            f"the function {its_name} has no JSON Schema ({_reason(error)}). Take simpler types."
        ) from error
    for one, its in schema["properties"].items():
        its |= {"description": about[one]} if about.get(one) and "description" not in its else {}
    return adapter, inlined_schema(schema)


def _reason(fault: Exception) -> str:
    """What pydantic says of a type, without its advice."""
    first = _on_one_line(str(fault)).partition(". ")[0]
    return first.partition(" For further")[0].rstrip(".")


def inlined_schema(schema: Mapping[str, Any]) -> dict[str, object]:
    """A JSON Schema with each definition in its place, and without titles: small policies read it.
    A definition that contains itself stays one, and so does a reference to anything else.

    Args:
        schema: The schema, which is not changed.
    """
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    endless = {name for name in definitions if name in _reached(definitions[name], definitions)}

    def plain(part: object) -> Any:
        if isinstance(part, list):
            return [plain(one) for one in part]
        if not isinstance(part, dict):
            return part
        name = _reference(part)
        if name in definitions and name not in endless:
            beside = {key: value for key, value in part.items() if key != "$ref"}
            return plain({**definitions[name], **beside})
        keys = [key for key in (*_FIRST, *part) if key in part and key not in _NOISE]
        return {key: of(key, part[key]) for key in keys}

    def of(key: str, value: Any) -> object:
        if key in _HOLD_SCHEMAS:
            return {name: plain(one) for name, one in value.items()}
        return value if key in _HOLD_VALUES else plain(value)

    inlined: dict[str, object] = plain({key: schema[key] for key in schema if key != "$defs"})
    kept = {name: plain(definitions[name]) for name in sorted(endless)}
    return {**inlined, "$defs": kept} if kept else inlined


def _reached(part: object, definitions: Mapping[str, object]) -> set[str]:
    """The definitions that a part of a schema refers to, directly or through others."""
    reached, fresh = set[str](), {*_references(part)}
    while fresh := (fresh & definitions.keys()) - reached:
        reached |= fresh
        fresh = {one for name in fresh for one in _references(definitions[name])}
    return reached


def _references(part: object) -> Iterator[str]:
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    for one in inner:
        yield from _references(one)
    if isinstance(part, dict):
        yield _reference(part)


def _reference(part: Mapping[str, object]) -> str:
    """The name of the definition that a part stands for; empty if for none."""
    where = part.get("$ref")
    return where.removeprefix("#/$defs/") if isinstance(where, str) else ""
