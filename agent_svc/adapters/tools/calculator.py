"""Arithmetic over numbers, nothing else.

The expression is parsed by simpleeval with its own nodes taken away but for numbers, the listed
functions and operators: no attribute, index, text, comprehension or assignment is there to abuse.
Every operand and result is bounded, so that no expression of `EXPRESSION_CHARS_MAX` characters
takes more than a few milliseconds or kilobytes.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import simpleeval

from agent_svc.domain.model import ToolInfo
from agent_svc.ports import ToolContext, ToolError, ToolResult

EXPRESSION_CHARS_MAX: Final = 500
BITS_MAX: Final = 4096  # of a whole number: about 1,200 digits
Number = int | float

PARAMETERS = {
    "type": "object",
    "properties": {
        "expression": {
            "type": "string",
            "minLength": 1,
            "maxLength": EXPRESSION_CHARS_MAX,
            # No example: a small model would copy it.
            "description": "Numbers, + - * / // % ** and parentheses, comparisons; abs ceil cos exp"
            " floor log log10 log2 max min round sin sqrt tan; pi, e.",
        }
    },
    "required": ["expression"],
    "additionalProperties": False,
}


class _RefusedError(Exception):
    """Not an expression that is computed."""


def _bounded(value: object) -> Number:
    if not isinstance(value, int | float):
        raise _RefusedError
    if isinstance(value, bool):  # of a comparison
        return int(value)
    if isinstance(value, int) and value.bit_length() > BITS_MAX:
        raise _RefusedError
    if isinstance(value, float) and not math.isfinite(value):
        raise _RefusedError
    return value


def _power(base: Number, exponent: Number) -> object:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and int(base).bit_length() * exponent > BITS_MAX:
        raise _RefusedError
    return base**exponent


def _round(value: Number, digits: int = 0) -> Number:
    if isinstance(digits, float) or abs(digits) > 300:
        raise _RefusedError
    return round(value, digits) if digits else round(value)


def _safe(function: Callable[..., object]) -> Callable[..., Number]:
    def call(*operands: object) -> Number:
        return _bounded(function(*(_bounded(one) for one in operands)))

    return call


_OPERATORS: Final[Mapping[type[ast.AST], Callable[..., Number]]] = {
    kind: _safe(function)
    for kind, function in (
        (ast.Add, operator.add),
        (ast.Sub, operator.sub),
        (ast.Mult, operator.mul),
        (ast.Div, operator.truediv),
        (ast.FloorDiv, operator.floordiv),
        (ast.Mod, operator.mod),
        (ast.Pow, _power),
        (ast.UAdd, operator.pos),
        (ast.USub, operator.neg),
        (ast.Lt, operator.lt),
        (ast.LtE, operator.le),
        (ast.Gt, operator.gt),
        (ast.GtE, operator.ge),
        (ast.Eq, operator.eq),
        (ast.NotEq, operator.ne),
    )
}
_FUNCTIONS: Final = {
    name: _safe(function)
    for name, function in (
        *((one, getattr(math, one)) for one in ("ceil", "cos", "exp", "floor", "log", "log10")),
        *((one, getattr(math, one)) for one in ("log2", "sin", "sqrt", "tan")),
        *(("abs", abs), ("max", max), ("min", min), ("round", _round)),
    )
}
# As people and models write it.
_SIGNS: Final = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
_NAMES: Final = {"pi": math.pi, "e": math.e}
_NODES: Final = (ast.Expr, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Call, ast.Name, ast.Constant)


def compute(expression: str) -> Number:
    """The value of an expression. Raises ToolError."""
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise _refused()
    evaluator = simpleeval.SimpleEval(
        operators=dict(_OPERATORS), functions=dict(_FUNCTIONS), names=dict(_NAMES)
    )
    evaluator.nodes = {kind: handle for kind, handle in evaluator.nodes.items() if kind in _NODES}
    try:
        text = expression.translate(_SIGNS).strip()
        ast.parse(text, mode="eval")  # one expression, no statement
        return _bounded(evaluator.eval(text))
    except RecursionError:
        raise _refused() from None
    except ZeroDivisionError:
        raise ToolError("TOOL_REFUSED", "Division by zero.", made=False) from None
    except (_RefusedError, ArithmeticError, ValueError, TypeError, SyntaxError, MemoryError):
        raise _refused() from None
    except (simpleeval.InvalidExpression, KeyError, AttributeError):
        raise _refused() from None


def _refused() -> ToolError:
    return ToolError(
        "TOOL_REFUSED",
        "That is no arithmetic expression, or its numbers are too large.",
        made=False,
    )


class CalculatorTool:
    """See Tool."""

    def __init__(self, info: ToolInfo) -> None:
        self._info = info

    @property
    def info(self) -> ToolInfo:
        """See Tool."""
        return self._info

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """See Tool."""
        value = compute(str(arguments.get("expression", "")))
        return ToolResult(json.dumps({"result": value}))
