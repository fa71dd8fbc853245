"""Define the built-in reward functions; pipeline.rewards.calling says how functions are called and what they return.

Every worker imports this module, so it stays light.
"""

from __future__ import annotations

PYTHON_TESTS = "pipeline.rewards.verifiers:python_tests"
MATH_VERIFY = "pipeline.rewards.verifiers:math_verify"
EXACT_MATCH = "pipeline.rewards.verifiers:exact_match"
TRUSTED = frozenset((MATH_VERIFY, EXACT_MATCH))
"""Built-in rewards that run no foreign code: a worker calls them itself, without a sandbox."""
MATH_TOLERANCE = 5e-6
"""Relative error allowed in a decimal: a number rounded to six digits is still right."""


def math_verify(prompt: str, response: str, answer: str, tolerance: float = MATH_TOLERANCE) -> float:  # noqa: ARG001
    """Return 1 if the response's last answer equals `answer` as mathematics, else 0 (the `math-verify` package).

    `answer` is LaTeX, with or without `$` or `\\boxed`, or a plain number, expression, choice or word. A choice or a
    word counts in `\\boxed`, after `Answer:`, or as the whole response. Of a box with choice and value, as in
    `\\boxed{\\textbf{(C)}\\ 28}`, either counts, in the answer and in the response. The package's time limits use
    SIGALRM, which works because a worker runs verifiers in its main thread; the worker's deadline stands behind them.
    """
    from pipeline.rewards.mathematics import equal

    return float(equal(response, answer, tolerance))


def boxed(answer: str) -> str:
    """Return an answer as a response must write it for `math_verify`."""
    return f"\\boxed{{{answer}}}"


def exact_match(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """Return 1 if the response, without its end-of-sequence token, is exactly the answer, else 0."""
    return float(response == answer)


def python_tests(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the Python program in the response passes the tests in `answer`, else 0. Never called: a worker runs
    the program in a process of its own (`pipeline.rewards.programs`)."""
    raise NotImplementedError("python_tests is run by the workers of pipeline.rewards.pool")
