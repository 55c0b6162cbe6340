"""Functions described as tools: a typed function's signature and docstring give the text that the
policy reads, and bind a call's arguments to the function's parameters.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

from turnrl.plugin.errors import PolicyMistake, RecipeError
from turnrl.types import ToolSpec

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_Part = TypeVar("_Part")


@final
@dataclass(frozen=True)
class FunctionDescription:
    """A function as a tool.

    Args:
        spec: Its description, as the policy reads it.
        adapter: pydantic's adapter of a function with the same parameters, which returns them by
            name.
    """

    spec: ToolSpec
    adapter: TypeAdapter[dict[str, object]]

    def bind(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """The function's arguments by name, defaults included: dates, enums, dataclasses and models
        are objects of their classes.

        Args:
            arguments: JSON values that the schema of `spec` allows. Other values may pass here:
                pydantic would take "1.5" for 1.5.
        Raises:
            PolicyMistake: If they cannot be read, such as the 31st of February for a date.
        """
        from pydantic import ValidationError
        from pydantic_core import ArgsKwargs

        try:
            return self.adapter.validate_python(ArgsKwargs((), dict(arguments)))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise PolicyMistake(f"bad arguments: {where}: {first['msg'][:120]}") from error


def describe_function(
    function: Callable[..., object], *, skip: Collection[str] = (), name: str = ""
) -> FunctionDescription:
    """Describe a function as a tool: its docstring (in Google, NumPy or Sphinx style) becomes the
    description, its annotations become the JSON Schema.

    Args:
        function: A typed function, plain or async; a method, bound or not.
        skip: Parameters that the policy does not fill in, such as `self`.
        name: The name the policy calls it by; the function's own if empty.
    Raises:
        RecipeError: If the policy could not call it: a parameter lacks a type, for example.
    """
    function_name = name_function(function)
    if isinstance(function, functools.partial):
        skip = {*skip, *function.keywords}
    taken = [parameter for parameter in get_parameters(function) if parameter.name not in skip]
    for parameter in taken:
        _check_parameter(parameter, function_name)
    hints = {parameter.name: resolve_hint(function, parameter) for parameter in taken}
    text, about = _read_docstring(function, function_name)
    adapter, schema = _adapt(taken, hints, function_name)
    for key, part in schema["properties"].items():
        if about.get(key):
            part.setdefault("description", about[key])
    spec = ToolSpec(name or function_name.rpartition(".")[2], text, inline_schema(schema))
    return FunctionDescription(spec, adapter)


def name_function(function: Callable[..., object]) -> str:
    """The name of a function in messages, such as `my_module.search`.

    Raises:
        RecipeError: If it is a lambda, or an object that is not a function.
    """
    plain = _unwrap_partial(function)
    if not inspect.isroutine(plain) or plain.__name__ == "<lambda>":
        raise RecipeError(
            f"{plain!r:.80} is not a function with a name. Write one, such as "
            "'def name(x: str) -> str:', or give a bound method of an object."
        )
    module = getattr(plain, "__module__", None)
    named = plain.__qualname__.rpartition("<locals>.")[2]
    return named if module in (None, "__main__", "builtins") else f"{module}.{named}"


def _unwrap_partial(function: Callable[..., object]) -> Callable[..., object]:
    """The function that a partial calls; any other function itself."""
    return function.func if isinstance(function, functools.partial) else function


def get_parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of a function.

    Raises:
        RecipeError: If Python finds no signature, as for some functions written in C.
    """
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"the function {name_function(function)} does not say what it takes ({error}). Call "
            "it from a function of your own, and give that one."
        ) from error


def _check_parameter(parameter: inspect.Parameter, function_name: str) -> None:
    """Refuse a parameter that a call cannot fill in: it gives values by name, and needs types."""
    named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    if not named or parameter.annotation is parameter.empty:
        fault = "has no type" if named else "has no name that a call can give it by"
        raise RecipeError(
            f"the parameter {str(parameter)!r} of the function {function_name} {fault}. Write each "
            "parameter with its name and type, as in 'def search(query: str, top_k: int = 3):', "
            "and give the method of an object, not of its class."
        )


def resolve_hint(function: Callable[..., object], parameter: inspect.Parameter) -> object:
    """The type of a parameter. A name in quotes is looked up in the function's module.

    Raises:
        RecipeError: If there is no such name.
    """
    plain = _unwrap_partial(function)
    names = getattr(inspect.unwrap(plain), "__globals__", {})
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)[parameter.name]
    except (NameError, SyntaxError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"the type of the parameter {parameter.name!r} of the function "
            f"{name_function(function)}, "
            f"{parameter.annotation!r}, cannot be read: {error}. Import or define it at the top of "
            "its module, and not below 'if TYPE_CHECKING'."
        ) from error


def _read_docstring(
    function: Callable[..., object], function_name: str
) -> tuple[str, dict[str, str]]:
    """The text of a function's docstring, and its description of each parameter."""
    import docstring_parser

    parsed = docstring_parser.parse(inspect.getdoc(_unwrap_partial(function)) or "")
    text = "\n\n".join(_on_one_line(part) for part in (parsed.description or "").split("\n\n"))
    if not text.strip():
        raise RecipeError(
            f"the function {function_name} has no docstring that says what it does, which the "
            "policy reads. Write one as the first line of its body: "
            '"""What it does, in a sentence."""'
        )
    return text, {part.arg_name: _on_one_line(part.description) for part in parsed.params}


def _on_one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _adapt(
    taken: Sequence[inspect.Parameter], hints: Mapping[str, Any], function_name: str
) -> tuple[TypeAdapter[dict[str, object]], dict[str, Any]]:
    """pydantic's adapter of a function with these parameters, and their JSON Schema."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Unsorted(GenerateJsonSchema):
        ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}

        def sort(self, value: Any, parent_key: str | None = None) -> Any:
            return value

    def bound(**arguments: object) -> dict[str, object]:
        return arguments

    by_name = inspect.Parameter.KEYWORD_ONLY
    typed = [p.replace(kind=by_name, annotation=hints[p.name]) for p in taken]
    vars(bound)["__signature__"] = inspect.Signature(typed)
    bound.__annotations__ = dict(hints)
    try:
        adapter = TypeAdapter(cast(Any, bound))
        return adapter, adapter.json_schema(schema_generator=Unsorted)
    except Exception as error:  # pydantic's, or from a type that describes itself
        raise RecipeError(
            f"the parameters of the function {function_name} have no JSON Schema: {error}. Take a "
            "str, int, float, bool, an enum, a list, a dict, a dataclass or a pydantic model."
        ) from error


def inline_schema(schema: Mapping[str, Any]) -> dict[str, object]:
    """A JSON Schema with its definitions in the places that refer to them and without titles,
    because small policies read it. A schema with a definition that contains itself keeps them.

    Args:
        schema: The schema, which is not changed.
    """
    definitions: Mapping[str, Any] = schema.get("$defs", {})

    def inline(part: Any, inside: tuple[str, ...] = ()) -> Any:
        if isinstance(part, list):
            return [inline(item, inside) for item in part]
        if not isinstance(part, dict):
            return part
        name = str(part.get("$ref", "")).removeprefix("#/$defs/")
        if name in inside:
            raise RecursionError
        if name in definitions:
            beside = {key: item for key, item in part.items() if key != "$ref"}
            return inline({**definitions[name], **beside}, (*inside, name))
        # a property that is called "title" is a schema, and no text
        shown = {k: item for k, item in part.items() if k != "title" or not isinstance(item, str)}
        return {key: inline(item, inside) for key, item in shown.items()}

    try:
        return cast(
            "dict[str, object]", inline({k: part for k, part in schema.items() if k != "$defs"})
        )
    except RecursionError:
        return dict(schema)
