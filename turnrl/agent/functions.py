"""Functions described as tools: a typed function's signature and docstring give the text that the
policy reads, and bind a call's arguments to the function's parameters.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, final

from turnrl.plugin.errors import (
    ArgumentTypeError,
    PolicyMistake,
    RecipeError,
    did_you_mean,
    instance_of,
    kind_of,
)
from turnrl.types import ToolSpec

_Part = TypeVar("_Part")

_HOLD_SCHEMAS = ("properties", "patternProperties", "dependentSchemas")
"""Keywords of JSON Schema whose keys are names, and whose values are schemas."""
_HOLD_VALUES = ("const", "default", "enum", "examples", "required")
"""Keywords whose values are not schemas."""
_NOISE = ("title", "discriminator")
"""Keywords that pydantic adds, and that are useless to a policy."""
_FIRST = ("type", "description", "properties", "items", "enum", "anyOf", "required")
"""Keywords that come before all others in a schema, in this order."""


@final
class Described:
    """A function as a tool.

    Args:
        spec: Its description, as the policy reads it.
        adapter: pydantic's adapter of a function with the same parameters, which returns them by
            name.
        plain: The parameters and their types, if the function takes JSON values as they are.
    """

    def __init__(
        self, spec: ToolSpec, adapter: Any, plain: Mapping[inspect.Parameter, type]
    ) -> None:
        from pydantic import ValidationError
        from pydantic_core import ArgsKwargs

        self.spec = spec
        self._plain = {parameter.name: kind for parameter, kind in plain.items()}
        self._defaults = {p.name: p.default for p in plain if p.default is not p.empty}
        self._required = self._plain.keys() - self._defaults
        self._validator, self._args_kwargs = adapter.validator, ArgsKwargs
        self._fault = ValidationError

    def bind(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """The function's arguments by name, defaults included: dates, enums, dataclasses and models
        are objects of their classes.

        Args:
            arguments: JSON values that the schema of `spec` allows. Other values may pass here:
                pydantic would take "1.5" for 1.5.
        Raises:
            PolicyMistake: If they cannot be read, such as the 31st of February for a date.
        """
        # a shortcut: in a thread that has just woken, pydantic takes longer than all the rest
        if self._plain and self._required <= arguments.keys():
            for name, value in arguments.items():
                if type(value) is not self._plain.get(name):
                    break
            else:
                return {**self._defaults, **arguments}
        try:
            by_name = self._args_kwargs((), dict(arguments))
            bound: dict[str, object] = self._validator.validate_python(by_name)
        except self._fault as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise PolicyMistake(f"bad arguments: {where}: {first['msg'][:120]}") from error
        return bound


def described(
    function: Callable[..., object], *, skip: Collection[str] = (), name: str = ""
) -> Described:
    """Describe a function as a tool: its docstring (in Google, NumPy or Sphinx style) becomes the
    description, its annotations become the JSON Schema.

    Args:
        function: A typed function, plain or async; a method, bound or not.
        skip: Parameters that the policy does not fill in, such as `self`.
        name: The name the policy calls it by; the function's own if empty.
    Raises:
        RecipeError: If the policy could not call it: a parameter lacks a type, for example. The
            message names the line to write.
    """
    function_name = name_of(function)
    if isinstance(function, functools.partial):
        skip = {*skip, *function.keywords}
    taken = [parameter for parameter in parameters_of(function) if parameter.name not in skip]
    for parameter in taken:
        _refuse_kind(parameter, function_name)
    if untyped := [parameter for parameter in taken if parameter.annotation is parameter.empty]:
        own = ["self"] if "self" in skip else []
        typed = ", ".join([*own, *map(_with_a_type, taken)])
        if untyped[0].name == "self":
            raise RecipeError(
                f"the function {function_name} is a method without its object. Give the method of "
                "an object in Python, as in tools=[it.method], or write a function that calls it."
            )
        raise RecipeError(
            f"the parameter {untyped[0].name!r} of the function {function_name} has no type. Write "
            f"'def {function_name.rpartition('.')[2]}({typed})', with the types you mean."
        )
    hints = {parameter.name: hint_of(function, parameter) for parameter in taken}
    text, about = _documented(function, function_name)
    adapter, schema = _adapted(taken, hints, about, function_name)
    spec = ToolSpec(name or function_name.rpartition(".")[2], text, schema)
    return Described(spec, adapter, _plain(taken, hints))


def _plain(
    taken: list[inspect.Parameter], hints: Mapping[str, Any]
) -> dict[inspect.Parameter, type]:
    """The types of the parameters if all of them, and their defaults, are texts, numbers or
    booleans; else nothing."""
    for parameter in taken:
        kind, default = hints[parameter.name], parameter.default
        plain_default = default is parameter.empty or type(default) is kind
        if kind not in (str, int, float, bool) or not plain_default:
            return {}
    return {parameter: hints[parameter.name] for parameter in taken}


def name_of(function: Callable[..., object]) -> str:
    """The name of a function in messages, such as `my_module.search`.

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
    """The function that a partial calls; any other function itself."""
    return function.func if isinstance(function, functools.partial) else function


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of a function.

    Raises:
        RecipeError: If Python finds no signature, as for some functions written in C.
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
    """The components of a list that may also contain functions.

    Args:
        kind: The contract that the components extend.
        name: The argument that has the list, for messages.
        values: The list.
        make: Makes a component of a function.
        extends: The classes that a user's own class may extend, for messages.
    Raises:
        ArgumentTypeError: If `values` is not a list of components and functions.
        RecipeError: From `make`.
    """
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ArgumentTypeError(f"{name} is {kind_of(values)}. Pass a list: {name}=[...].")
    parts = list[_Part]()
    for number, value in enumerate(values):
        where = f"{name}[{number}]"
        if isinstance(value, kind):
            parts.append(value)
        elif isinstance(value, str) and (last := value.rpartition(".")[2])[:1].islower():
            raise ArgumentTypeError(
                f"{where} is {kind_of(value)}. In Python, pass the function itself: {last}."
            )
        elif callable(value) and not isinstance(value, type):
            try:
                parts.append(make(value))
            except RecipeError as error:
                raise RecipeError(f"{where}: {error}") from error
        else:
            instance_of(kind, where, value, f"{extends}, or a function")
    return parts


def _refuse_kind(parameter: inspect.Parameter, function_name: str) -> None:
    """Refuse a parameter that a call cannot fill in by its name."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise RecipeError(
            f"the function {function_name} takes {str(parameter).partition(':')[0]!r}, which tells "
            "the policy nothing. Name each parameter, with its type."
        )
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise RecipeError(
            f"the parameter {parameter.name!r} of the function {function_name} can only be given "
            "by its place, and a policy gives arguments by their names. Take the '/' out of its "
            "'def'."
        )


def _with_a_type(parameter: inspect.Parameter) -> str:
    """A parameter as its `def` could spell it: `top_k: int = 3`."""
    if parameter.annotation is parameter.empty:
        has = parameter.default not in (parameter.empty, None)
        kind = type(parameter.default) if has else str
        parameter = parameter.replace(annotation=kind)
    return str(parameter)


def hint_of(function: Callable[..., object], parameter: inspect.Parameter) -> object:
    """The type of a parameter. A name in quotes is looked up in the function's module.

    Raises:
        RecipeError: If there is no such name.
    """
    plain = _unbound(function)
    names = getattr(inspect.unwrap(plain), "__globals__", {})
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)[parameter.name]
    except (NameError, SyntaxError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"the type of the parameter {parameter.name!r} of the function {name_of(function)}, "
            f"{parameter.annotation!r}, cannot be read: {error}. Import or define it at the top of "
            "its module, and not below 'if TYPE_CHECKING'."
        ) from error


def _documented(function: Callable[..., object], function_name: str) -> tuple[str, dict[str, str]]:
    """The text of a function's docstring, and its description of each parameter."""
    import docstring_parser

    plain = _unbound(function)
    parsed = docstring_parser.parse(inspect.getdoc(plain) or "")
    text = "\n\n".join(_on_one_line(part) for part in (parsed.description or "").split("\n\n"))
    if not text.strip():
        raise RecipeError(
            f"the function {function_name} has no docstring that says what it does, which the "
            "policy reads. Write one as the first line of its body: "
            '"""What it does, in a sentence."""'
        )
    names = [parameter.name for parameter in parameters_of(plain)]
    about = {part.arg_name.lstrip("*"): _on_one_line(part.description) for part in parsed.params}
    if strange := next((name for name in about if name not in names), None):
        raise RecipeError(
            f"the docstring of the function {function_name} describes {strange!r}, which is no "
            f"parameter.{did_you_mean(strange, names)} Correct the docstring."
        )
    return text, about


def _on_one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _adapted(
    taken: list[inspect.Parameter],
    hints: Mapping[str, Any],
    about: Mapping[str, str],
    function_name: str,
) -> tuple[object, dict[str, object]]:
    """pydantic's adapter of a function with these parameters, and their JSON Schema with the
    docstring's descriptions."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Quiet(GenerateJsonSchema):
        ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}

    def bound(**arguments: object) -> dict[str, object]:
        return arguments

    by_name = inspect.Parameter.KEYWORD_ONLY
    typed = [p.replace(kind=by_name, annotation=hints[p.name]) for p in taken]
    vars(bound)["__signature__"] = inspect.Signature(typed)
    bound.__annotations__ = dict(hints)
    try:
        adapter = TypeAdapter(cast(Any, bound))
        schema = adapter.json_schema(schema_generator=Quiet)
    except Exception as error:  # pydantic's, or from a type that describes itself
        for name, hint in hints.items():
            try:
                TypeAdapter(hint).json_schema(schema_generator=Quiet)
            except Exception as fault:
                raise RecipeError(
                    f"the parameter {name!r} of the function {function_name} is of the type "
                    f"{getattr(hint, '__name__', hint)}, which has no JSON Schema "
                    f"({_reason(fault)}). Take a str, int, float, bool, an enum, a list, a dict, "
                    "a dataclass or a pydantic model."
                ) from fault
        raise RecipeError(
            f"the function {function_name} has no JSON Schema ({_reason(error)}). Take simpler "
            "types."
        ) from error
    for name, part in schema["properties"].items():
        if about.get(name) and "description" not in part:
            part["description"] = about[name]
    return adapter, inlined_schema(schema)


def _reason(fault: Exception) -> str:
    """pydantic's message about a type, without its advice."""
    first = _on_one_line(str(fault)).partition(". ")[0]
    return first.partition(" For further")[0].rstrip(".")


def inlined_schema(schema: Mapping[str, Any]) -> dict[str, object]:
    """A JSON Schema with every definition put in place and without titles, because small policies
    read it. A definition that contains itself stays a definition, and any other reference stays.

    Args:
        schema: The schema, which is not changed.
    """
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    recursive = {name for name in definitions if name in _reached(definitions[name], definitions)}

    def plain(part: object) -> Any:
        if isinstance(part, list):
            return [plain(item) for item in part]
        if not isinstance(part, dict):
            return part
        name = _reference(part)
        if name in definitions and name not in recursive:
            beside = {key: value for key, value in part.items() if key != "$ref"}
            return plain({**definitions[name], **beside})
        keys = [key for key in (*_FIRST, *part) if key in part and key not in _NOISE]
        return {key: plain_value(key, part[key]) for key in keys}

    def plain_value(keyword: str, value: Any) -> object:
        if keyword in _HOLD_SCHEMAS:
            return {name: plain(part) for name, part in value.items()}
        return value if keyword in _HOLD_VALUES else plain(value)

    inlined: dict[str, object] = plain({key: schema[key] for key in schema if key != "$defs"})
    kept = {name: plain(definitions[name]) for name in sorted(recursive)}
    return {**inlined, "$defs": kept} if kept else inlined


def _reached(part: object, definitions: Mapping[str, object]) -> set[str]:
    """The definitions that a part of a schema refers to, directly or through others."""
    reached, fresh = set[str](), {*_references(part)}
    while fresh := (fresh & definitions.keys()) - reached:
        reached |= fresh
        fresh = {inner for name in fresh for inner in _references(definitions[name])}
    return reached


def _references(part: object) -> Iterator[str]:
    items = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    for item in items:
        yield from _references(item)
    if isinstance(part, dict):
        yield _reference(part)


def _reference(part: Mapping[str, object]) -> str:
    """The name of the definition that a part refers to; empty if it refers to none."""
    where = part.get("$ref")
    return where.removeprefix("#/$defs/") if isinstance(where, str) else ""
