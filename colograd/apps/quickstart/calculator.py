"""A task with a tool for the quickstart's model: products of two-digit numbers, with a calculator."""

from __future__ import annotations

import ast
import operator
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.USub: operator.neg,
}  # fmt: skip


def calculator(expression: str) -> str:
    """Calculates.

    Args:
        expression: numbers with + - * / and parentheses, such as 2 * 3
    """

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        raise ValueError(f"not an expression: {expression}")

    return f"{value(ast.parse(expression.strip(), mode='eval').body):.10g}"


def products(size: int = 2048, seed: int = 0, examples: int = 2) -> Dataset:
    """Make questions for the product of two numbers from 11 to 99. Without the calculator the untrained model answers
    none of them correctly.

    Args:
        examples: number of solved products, with tool calls, before each question. With 2 examples the untrained model
            calls the tool in half of its completions.
    """
    from datasets import Dataset

    if size < 1:
        raise ValueError(f"products: size is {size}, but must be at least 1: raise it.")
    draw, rows = random.Random(seed), []
    shown: list[dict[str, Any]] = []
    for place in range(examples + size):
        a, b = draw.randint(11, 99), draw.randint(11, 99)
        question = _message("user", f"What is {a} * {b}?")
        if place >= examples:
            rows.append({"prompt": [_message("system", "Use the tool."), *shown, question], "answer": str(a * b)})
            continue
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": f"{a} * {b}"}}}
        calling = _message("assistant", "") | {"tool_calls": [call]}
        answer = _message("tool", str(a * b)) | {"name": "calculator"}
        shown += [question, calling, answer, _message("assistant", str(a * b))]
    return Dataset.from_list(rows)


def _message(role: str, content: str) -> dict[str, Any]:
    """Make a message with all keys, because all messages in a dataset's column have the same keys."""
    return {"role": role, "content": content, "name": None, "tool_calls": None}
