"""The built-in reward functions. How any is called, and what it may return, is in pipeline.rewards.calling.

Every worker imports this module, so it stays light.
"""

from __future__ import annotations

import re
from typing import Any

MATH_VERIFY_TIMEOUT_S = 5
PYTHON_TESTS = "pipeline.rewards.verifiers:python_tests"
MATH_VERIFY = "pipeline.rewards.verifiers:math_verify"
EXACT_MATCH = "pipeline.rewards.verifiers:exact_match"
TRUSTED = frozenset((MATH_VERIFY, EXACT_MATCH))
"""Built-in rewards that run no code of others: they need no sandbox, and a worker calls them itself."""
_CHOICE = re.compile(
    r"\\boxed\s*\{\s*(?P<written>\\(?:text|math)[a-z]*\s*\{\s*\((?P<letter>[A-Z])\)(?:\\[ ,;:!]|[~\s])*\})(?!\s*\})"
)
"""A box that begins with a choice, after which more stands: `\\boxed{\\textbf{(C)}\\ 28}`."""


def math_verify(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1 if the response's last answer equals `answer` as mathematics, else 0 (the `math-verify` package).

    `answer` is LaTeX, with or without `$` or `\\boxed`, or a plain number, expression, choice or word. A choice or
    a word counts in `\\boxed`, or where it is the whole response. Of a box with choice and value, as in
    `\\boxed{\\textbf{(C)}\\ 28}`, either counts, in the answer and in the response. The package's own limits use
    SIGALRM, which works because a worker runs verifiers in its main thread; the worker's deadline stands behind them.
    """
    from math_verify import verify

    gold = _parsed(boxed(answer))
    if not gold:
        raise ValueError(f"answer {answer!r} is not mathematics that math-verify can parse")
    if response.strip() == answer.strip():  # a word alone, such as Paris, is no mathematics that `parse` would find
        return 1.0
    return float(verify(gold, _parsed(response), timeout_seconds=MATH_VERIFY_TIMEOUT_S))


def _parsed(text: str) -> list[Any]:
    """What the last answer of a text may be, as `verify` takes it: one of these is enough."""
    from math_verify import parse

    choice = _CHOICE.match(text, max(0, text.rfind(r"\boxed")))
    texts = [text]
    if choice:  # `parse` takes the two for a product
        texts = [boxed(choice["letter"]), text[: choice.start("written")] + text[choice.end("written") :]]
    return [one for each in texts for one in parse(each, parsing_timeout=MATH_VERIFY_TIMEOUT_S)]


def boxed(answer: str) -> str:
    """How a response names its answer for `math_verify`."""
    return f"\\boxed{{{answer}}}"


def exact_match(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1 if the response, without its end-of-sequence token, is the answer and nothing else; otherwise 0."""
    return float(response == answer)


def python_tests(prompt: str, response: str, answer: str) -> float:
    """1 if the Python program in the response passes the tests in `answer`. Never called: a worker runs the program
    itself, in a process of its own (`pipeline.rewards.programs`)."""
    raise NotImplementedError("python_tests is run by the workers of pipeline.rewards.pool")
