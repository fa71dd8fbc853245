"""A reward is tried on the task's own answers before anything is started."""

from __future__ import annotations

import asyncio

from pipeline.errors import RewardError
from pipeline.rewards.pool import Verifiers
from pipeline.rewards.verifiers import MATH_VERIFY, boxed
from pipeline.tasks.task import Problem, Task
from precision.text import quoted

_FEW, _MORE = 4, 32
"""Samples of a trial, and of one that saw a failure: at 5 % of its calls a judge fails in 19 of 100 trials of four."""
_MOST_ANSWERS = 1000
"""Different answers that a reward is asked about which must accept them; about three seconds."""


def try_reward(verifiers: Verifiers, task: Task) -> None:
    """Score answers of the task as responses to their own prompts, by `verifiers` with a watch that asks at once.

    `math_verify` has to give 1 to every answer, else RewardError says how many it does not accept; of a task with very
    many different ones it is an even choice, and the others are looked at when they are used. What another reward gives
    to an answer is its own business, but of a few no more may fail than the recipe allows; where one does, more are
    tried.
    """
    asyncio.run(_try_every_answer(verifiers, task) if task.reward == MATH_VERIFY else _try_a_few(verifiers, task))


async def _try_a_few(verifiers: Verifiers, task: Task) -> None:
    tried, failed = 0, False
    while tried < (_MORE if failed else _FEW):
        problem = task.problem(tried % task.num_prompts)
        responses = [problem.answer] * (2 if verifiers.wants.batched else 1)
        verdicts = await verifiers.score_group(problem.text, problem.answer, problem.metadata, responses)
        failed = failed or any(verdict.failed for verdict in verdicts)
        tried += 1


async def _try_every_answer(verifiers: Verifiers, task: Task) -> None:
    problems = _of_different_answers(task)
    refused = [problem.answer for problem in problems if not await _accepted(verifiers, problem)]
    if refused:
        raise RewardError(
            f"math_verify does not accept {len(refused)} of {len(problems)} answers as right, the first "
            f"{quoted(refused[0])}; write them as LaTeX or as plain numbers, leave their rows out by task.filter, or "
            "set task.reward to a function of yours"
        )


async def _accepted(verifiers: Verifiers, problem: Problem) -> bool:
    try:
        return (await verifiers.score(problem.text, boxed(problem.answer), problem.answer)).reward >= 1.0
    except RewardError:
        return False


def _of_different_answers(task: Task) -> list[Problem]:
    problems = {p.answer: p for p in map(task.problem, range(task.num_prompts))}
    problems |= {p.answer: p for p in map(task.held_out, range(task.num_held_out))}
    every = -(-len(problems) // _MOST_ANSWERS)
    return list(problems.values())[::every]
