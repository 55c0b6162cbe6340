"""Lists of components in which functions may stand. The modules that read a function are loaded
only for a list that has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from turnrl.plugin.errors import ArgumentTypeError, RecipeError, check_instance, describe_value
from turnrl.types import Toolset

_Part = TypeVar("_Part")


def convert_functions(
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
        raise ArgumentTypeError(f"{name} is {describe_value(values)}. Pass a list: {name}=[...].")
    parts = list[_Part]()
    for number, value in enumerate(values):
        where = f"{name}[{number}]"
        if isinstance(value, kind):
            parts.append(value)
        elif callable(value) and not isinstance(value, type):
            try:
                parts.append(make(value))
            except RecipeError as error:
                raise RecipeError(f"{where}: {error}") from error
        else:
            check_instance(kind, where, value, f"{extends}, or a function")
    return parts


def as_toolsets(tools: Sequence[Toolset | Callable[..., object]]) -> tuple[Toolset, ...]:
    """The toolsets of a list that may also contain functions.

    Raises:
        ArgumentTypeError: If `tools` is not a list of tools and functions.
        RecipeError: If the policy could not call one of the functions.
    """
    return tuple(convert_functions(Toolset, "tools", tools, _make_tool, "Tool or Toolset"))


def _make_tool(function: Callable[..., object]) -> Toolset:
    from turnrl.agent.function_tools import FunctionTool

    return FunctionTool(function)
