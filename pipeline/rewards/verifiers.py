"""The built-in reward functions. How any is called, and what it may return, is in pipeline.rewards.calling.

Every worker imports this module, so it stays light.
"""

from __future__ import annotations

PYTHON_TESTS = "pipeline.rewards.verifiers:python_tests"
MATH_VERIFY = "pipeline.rewards.verifiers:math_verify"
EXACT_MATCH = "pipeline.rewards.verifiers:exact_match"
TRUSTED = frozenset((MATH_VERIFY, EXACT_MATCH))
"""Built-in rewards that run no code of others: they need no sandbox, and a worker calls them itself."""
MATH_TOLERANCE = 5e-6
"""Share by which a decimal may differ from the number that it stands for: rounded to six digits, it is still right."""


def math_verify(prompt: str, response: str, answer: str, tolerance: float = MATH_TOLERANCE) -> float:  # noqa: ARG001
    """1 if the response's last answer equals `answer` as mathematics, else 0 (the `math-verify` package).

    `answer` is LaTeX, with or without `$` or `\\boxed`, or a plain number, expression, choice or word. A choice or
    a word counts in `\\boxed`, after `Answer:`, or where it is the whole response. Of a box with choice and value, as
    in `\\boxed{\\textbf{(C)}\\ 28}`, either counts, in the answer and in the response. The package's own limits use
    SIGALRM, which works because a worker runs verifiers in its main thread; the worker's deadline stands behind them.
    """
    from pipeline.rewards.mathematics import equal

    return float(equal(response, answer, tolerance))


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
