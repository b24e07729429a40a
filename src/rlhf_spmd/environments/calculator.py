"""A calculator for word problems: the model writes ``<<48/2=`` and reads ``24>>``.

The form is that of GSM8K's annotations (Cobbe et al. 2021, arXiv 2110.14168). Let ``=`` end a turn
(``sampling.stop=["="]``). A turn that ends with an open calculation gets its result. A turn that ends with another
``=`` gets nothing and goes on. Any other turn is the last. The reward is 1 if the number after the last ``####`` equals
the one in the row's ``answer``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_OPEN = re.compile(r"<<([^<>=]{1,200})=$")
_ANSWER = re.compile(r"####\s*([-+]?[$]?[\d,]*\.?\d+)")
DIGITS = 10  # significant digits of a fractional result
LARGEST_EXPONENT = 308  # about that of a float; exact arithmetic beyond it takes minutes


class Calculator:
    """The environment. ``answer``: the column with the right number, alone or after ``####``."""

    def __init__(self, answer: str = "answer") -> None:
        self.column = answer
        self.response = ""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a number to compare with."""
        answer = str(row.get(self.column))
        self.right_number = final_number(answer if "####" in answer else f"#### {answer}")
        if self.right_number is None:
            raise ValueError(f"no number in the row's {self.column!r}: {answer[-80:]!r}")

    def step(self, text: str) -> tuple[str, float, bool]:
        self.response += text
        calculation = _OPEN.search(self.response)
        if calculation:
            return f"{calculate(calculation[1])}>>", 0.0, False
        if text.endswith("="):
            return "", 0.0, False
        return "", float(final_number(self.response) == self.right_number), True


environment = Calculator


def final_number(text: str) -> Fraction | None:
    """Return the number after the last ``####``, or None. Commas and a dollar sign are dropped."""
    numbers = _ANSWER.findall(text)
    try:
        return Fraction(numbers[-1].replace(",", "").replace("$", "")) if numbers else None
    except ValueError:  # thousands of digits
        return None


def calculate(expression: str) -> str:
    """Return the value of sums, differences, products, quotients and brackets of decimal numbers.

    Returns ``error`` if there is none, or if it is beyond a float's range.
    """
    source = expression.replace(",", "").strip()
    try:
        value = _value(ast.parse(source, mode="eval").body, source)
        rounded = float(value)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"
    return str(value.numerator) if value.denominator == 1 else f"{rounded:.{DIGITS}g}"


def _value(node: ast.expr, source: str) -> Fraction:
    """Return the value of an expression. Raises ValueError for anything but arithmetic."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number = ast.get_source_segment(source, node) or ""
        if abs(int(number.lower().partition("e")[2] or 0)) > LARGEST_EXPONENT:
            raise ValueError(f"out of range: {number}")
        return Fraction(number)  # exactly as it is written: 0.1 is a tenth
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        return _value(node.operand, source) * (1 if isinstance(node.op, ast.UAdd) else -1)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, source), _value(node.right, source))
    raise ValueError(f"not arithmetic: {ast.dump(node)}")
