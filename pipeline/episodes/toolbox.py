"""Run the built-in tools where a policy calls them: in the sandbox, in a process and a folder of one episode.

The process is forked by `pipeline.episodes.host`. It imports the standard library only: each episode has one.
"""

from __future__ import annotations

import ast
import contextlib
import io
import operator
import os
import subprocess
import traceback
from collections.abc import Callable, Mapping
from typing import Any

MOST_CHARACTERS = 1 << 20
_LONGEST_POWER_BITS = 4096
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, power: _power(base, power),
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Toolbox:
    """The tools of one episode. `step` gets {"name", "arguments"} and returns (text, whether the call failed)."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "__main__"}
        """What the episode's Python code has defined."""

    async def reset(self, task: Mapping[str, Any]) -> list[Any]:  # noqa: ARG002
        # Under bubblewrap the user's folder may be mounted somewhere below the only writable folder.
        os.environ["HOME"] = os.path.join(os.environ["TMPDIR"], "work")
        os.makedirs(os.environ["HOME"], exist_ok=True)
        os.chdir(os.environ["HOME"])
        return []

    async def step(self, call: Mapping[str, Any]) -> tuple[str, bool]:
        run = dict(python=self._python, shell=_shell)[call["name"]]
        text, failed = run(call["argument"])
        return text[:MOST_CHARACTERS], failed

    def _python(self, code: str) -> tuple[str, bool]:
        """Run code as a notebook does: its names stay, and the value of a last expression is printed."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                tree, last = ast.parse(code, "<call>"), None
                if tree.body and isinstance(tree.body[-1], ast.Expr):
                    last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
                exec(compile(tree, "<call>", "exec"), self._names)
                if last is not None and (value := eval(compile(last, "<call>", "eval"), self._names)) is not None:
                    print(repr(value))
            except BaseException as error:  # noqa: BLE001 - whatever the code raised is its output
                lines = traceback.format_exception(error)
                print("".join([*lines[:1], *lines[2:]]).strip())  # without the line of this file
                return output.getvalue(), True
        return output.getvalue(), False


def _shell(command: str) -> tuple[str, bool]:
    ended = subprocess.run(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    text = ended.stdout[-MOST_CHARACTERS:].decode(errors="replace")
    return (text + f"\n[exit status {ended.returncode}]" if ended.returncode else text), ended.returncode != 0


def calculated(expression: str) -> tuple[str, bool]:
    """Return the value of an arithmetic expression, or what is wrong with it, and whether it failed. Integers are
    exact; a quotient that is whole is written without a fraction."""
    try:
        value = _value(ast.parse(expression.strip(), "<call>", "eval").body)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        return str(value), False
    except (ArithmeticError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"error: {error}", True


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.operand))
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses are known")
    if isinstance(value, complex) or (isinstance(value, int) and value.bit_length() > _LONGEST_POWER_BITS):
        raise ValueError("the result is no number, or too large")
    return value  # type: ignore[no-any-return]


def _power(base: float, power: float) -> Any:
    if isinstance(base, int) and isinstance(power, int) and abs(power) * base.bit_length() > _LONGEST_POWER_BITS:
        raise ValueError("the result is too large")
    return base**power
