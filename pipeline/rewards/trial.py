"""A reward is tried on the task's own answers before anything is started."""

from __future__ import annotations

import asyncio

from pipeline.errors import RewardError
from pipeline.rewards.pool import Verifiers
from pipeline.rewards.verifiers import MATH_VERIFY, boxed
from pipeline.tasks.base import Problem, Task
from precision.text.short import quoted

_FEW = 4
_MOST_ANSWERS = 1000
"""Different answers that a reward is asked about which must accept them; about three seconds."""


def try_reward(verifiers: Verifiers, task: Task) -> None:
    """Score answers of the task as responses to their own prompts.

    Whatever the reward, a few of them must be scored at all: `verifiers` need a watch that raises RewardError. Rewards
    that must accept a right answer have to give 1 to every one of them, else RewardError names those that they refuse.
    Of a task with very many different answers it is an even choice; the others are looked at when they are used.
    """
    asyncio.run(_try(verifiers, task))


async def _try(verifiers: Verifiers, task: Task) -> None:
    for problem in [task.problem(index) for index in range(min(_FEW, task.num_prompts))]:
        await verifiers.score(problem.text, problem.answer, problem.answer)
    if task.reward != MATH_VERIFY:
        return
    problems = _of_different_answers(task)
    verdicts = [await verifiers.score(p.text, boxed(p.answer), p.answer) for p in problems]
    refused = [p.answer for p, verdict in zip(problems, verdicts, strict=True) if verdict.reward < 1.0]
    if refused:
        raise RewardError(
            f"math_verify does not accept {len(refused)} of {len(problems)} answers as right, the first "
            f"{quoted(refused[0])}; write them as LaTeX or as plain numbers, or set task.reward to a function of yours"
        )


def _of_different_answers(task: Task) -> list[Problem]:
    problems = {p.answer: p for p in map(task.problem, range(task.num_prompts))}
    problems |= {p.answer: p for p in map(task.held_out, range(task.num_held_out))}
    every = -(-len(problems) // _MOST_ANSWERS)
    return list(problems.values())[::every]
