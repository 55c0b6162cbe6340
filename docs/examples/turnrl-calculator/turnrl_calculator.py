"""A calculator that a turnrl policy can call."""

import ast
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import final

from turnrl import Tool, ToolCall, ToolResult, hookimpl

Number = int | float

OPERATORS: dict[type[ast.AST], Callable[..., Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def evaluate(node: ast.expr) -> Number:
    """The value of an expression of numbers and `OPERATORS`; a ValueError for anything else."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
    raise ValueError("only numbers, + - * / // % and parentheses")


@final
class Calculator(Tool):
    """Evaluates arithmetic, and nothing but arithmetic.

    Args:
        digits: Significant digits of a result that is not whole.
    """

    name = "calculate"
    description = "Evaluate an arithmetic expression."
    parameters = {
        "type": "object",
        "properties": {
            "expression": {"type": "string", "maxLength": 100, "examples": ["(3 + 4) * 2.5"]}
        },
        "required": ["expression"],
        "additionalProperties": False,
    }

    def __init__(self, digits: int = 10) -> None:
        self.digits = digits

    def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        return [self._answer(call.arguments["expression"]) for call in calls]

    def _answer(self, expression: str) -> ToolResult:
        try:
            value = evaluate(ast.parse(expression.strip(), mode="eval").body)
            if not math.isfinite(value):
                raise OverflowError("the result is too large")
        except (ValueError, SyntaxError, ArithmeticError, MemoryError, RecursionError) as error:
            # the policy's own mistake: it reads the message as its result
            return ToolResult(f"cannot calculate: {error}", ok=False)
        return ToolResult(str(value) if isinstance(value, int) else f"{value:.{self.digits}g}")


@hookimpl
def turnrl_tools() -> Iterable[type[Tool]]:
    return [Calculator]
