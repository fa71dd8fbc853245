"""Build the run's verifiers in the sandbox that this machine allows, and try them before a run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from launch.build.api_key import API_KEY_FILE_VARIABLE, JOB_KEYS, TEACHER_KEY_FILE_VARIABLE
from pipeline.config.recipe import Recipe
from pipeline.data.checksums import write_sealed
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError, RewardError, RunConflictError
from pipeline.rewards.pool import FailureWatch, Verifiers
from pipeline.rewards.sandbox.choice import RUNGS, Needs, choose
from pipeline.rewards.verifiers import EXACT_MATCH, MATH_VERIFY, TRUSTED, boxed
from pipeline.rewards.worker_process import Sandbox
from pipeline.rollout.batch_builder import GroupFilter
from pipeline.tasks.mixture import parts_of
from pipeline.tasks.task import Task
from precision.text import quoted


@contextmanager
def build_verifiers(
    run: RunDirectory, recipe: Recipe, task: Task, event_log: EventLog
) -> Iterator[Mapping[str, Verifiers]]:
    """Yield reward → its workers, one entry for each reward of the task; record their sandbox as an event.

    Raises RecipeError if there is no sandbox and the recipe does not renounce it, and RunConflictError if the run began
    in a better sandbox than this machine has.
    """
    rewards = list(dict.fromkeys(part.reward for part in parts_of(task)))
    sandbox = None
    if recipe.reward.sandbox == "auto":
        sandbox = choose_sandbox(run, rewards, event_log)
    else:
        event_log.event("sandbox", rung="none", why="reward.sandbox is none")
    with ExitStack() as stack:
        yield {reward: stack.enter_context(_verifiers(reward, recipe, sandbox, event_log)) for reward in rewards}


def _verifiers(reward: str, recipe: Recipe, sandbox: Sandbox | None, event_log: EventLog | None) -> Verifiers:
    """Return a reward's verifiers; without a log, for a trial: one worker, failures count from the first sample."""
    section = recipe.reward
    if event_log is None:
        watch = FailureWatch(
            f"reward {reward!r}", 0.0 if reward == MATH_VERIFY else section.max_failed_share, at_least=1
        )
    else:
        watch = FailureWatch(
            f"reward {reward!r}",
            section.max_failed_share,
            tell=lambda reason, detail: event_log.event("reward_failed", reason=reason, detail=detail),
        )
    return Verifiers(
        reward,
        1 if event_log is None else section.workers,
        section.deadline_s,
        sandbox=sandbox,
        memory_mib=section.memory_mib,
        watch=watch,
        concurrency=section.concurrency,
        retries=section.retries,
        program_tolerance=section.program_tolerance,
        math_tolerance=section.math_tolerance,
    )


def build_group_filter(recipe: Recipe) -> GroupFilter | None:
    """Return the user's filter of sampled groups; None without one. Raises RecipeError if it cannot be called."""
    name = recipe.prompts.group_filter
    return None if name is None else GroupFilter.load(name, recipe.reward.deadline_s)


def check_reward(run: RunDirectory, recipe: Recipe, task: Task) -> None:
    """Try each reward on a few answers of the task, before engines take minutes to start.

    Raises RecipeError for a reward that cannot be imported, RewardError for a reward that fails or refuses the task's
    answers, and the sandbox errors of `build_verifiers`.
    """
    build_group_filter(recipe)
    parts = [part for part in parts_of(task) if part.reward != EXACT_MATCH]  # it accepts every answer and never fails
    foreign = [part.reward for part in parts if part.reward not in TRUSTED]
    sandbox = _sandbox_here(run, foreign)[0] if foreign and recipe.reward.sandbox == "auto" else None
    for part in parts:
        with _verifiers(part.reward, recipe, sandbox, None) as verifiers:
            asyncio.run(try_reward(verifiers, part))


def choose_sandbox(run: RunDirectory, rewards: Sequence[str], event_log: EventLog) -> Sandbox | None:
    """Return the rewards' sandbox and record it; None if all rewards are built in. Raises as `build_verifiers`."""
    foreign = [reward for reward in rewards if reward not in TRUSTED]
    if not foreign:
        event_log.event("sandbox", rung="none", why=f"{rewards[0]} runs no code of others")
        return None
    sandbox, reasons = _sandbox_here(run, foreign)
    if run.sandbox() is None:
        run.fence()
        write_sealed(run.sandbox_file, sandbox.rung + "\n")
    event_log.event("sandbox", rung=sandbox.rung, why=reasons)
    return sandbox


def _sandbox_here(run: RunDirectory, rewards: Sequence[str]) -> tuple[Sandbox, str]:
    """Return the rewards' sandbox on this machine, and why not a higher one. Raises as `build_verifiers`."""
    began, hidden = run.sandbox(), [run.path.absolute()]
    # The sandbox also hides files that appear later in the folder of a hidden file, such as another job's key.
    for variable in (API_KEY_FILE_VARIABLE, TEACHER_KEY_FILE_VARIABLE):
        if named := os.environ.get(variable):
            path = Path(named).absolute()
            hidden += [path, *sorted({*path.parent.glob(JOB_KEYS)} - {path})]
    needs = Needs(rewards=tuple(rewards), hidden=tuple(hidden), runs=run.path.resolve().parent, began=began)
    choice = choose(needs)
    reasons = "; ".join(f"{rung}: {reason}" for rung, reason in choice.refused.items())
    if choice.rung is None:
        raise RecipeError(
            f"reward {rewards[0]!r} is code that is not our own, and this machine allows no sandbox for it ({reasons})"
            "; install or allow one of them, or set reward.sandbox to none: it then runs with all rights of this user"
        )
    if began is not None and (began not in RUNGS or RUNGS.index(choice.rung) > RUNGS.index(began)):
        raise RunConflictError(
            f"{run.path} began with its reward code under {began}, and here there is only {choice.rung} ({reasons}); "
            f"bring {began} back, or remove {run.sandbox_file} to go on with less"
        )
    return needs.on(choice.rung), reasons


_FEW, _MORE = 4, 32
"""Samples of a trial, more after a failure: a judge that fails 5 % of its calls fails in 19 % of trials of four."""
_MOST_ANSWERS = 1000
"""Most answers that math_verify is tried on, in about three seconds."""


async def try_reward(verifiers: Verifiers, task: Task) -> None:
    """Score answers of the task as responses to their prompts; the watch of `verifiers` counts from the first sample.

    math_verify must give 1 to every answer, else RewardError says how many it refuses; of very many answers an even
    choice is tried. Other rewards may give any value, but no more of a few samples may fail than the recipe allows;
    after a failure more samples are tried.
    """
    tried, failed = 0, False
    while task.reward != MATH_VERIFY and tried < (_MORE if failed else _FEW):
        problem = task.problem(tried % task.num_prompts)
        responses = [problem.answer] * (2 if "batched" in verifiers.wants else 1)
        verdicts = await verifiers.score_group(problem.text, problem.answer, problem.metadata, responses)
        failed = failed or any(verdict.failed for verdict in verdicts)
        tried += 1
    if task.reward != MATH_VERIFY:
        return
    every = {p.answer: p for p in map(task.problem, range(task.num_prompts))}
    every |= {p.answer: p for p in map(task.held_out, range(task.num_held_out))}
    problems = list(every.values())[:: -(-len(every) // _MOST_ANSWERS)]
    refused = []
    for problem in problems:
        try:
            verdict = await verifiers.score(problem.text, boxed(problem.answer), problem.answer)
        except RewardError:
            verdict = None
        if verdict is None or verdict.reward < 1.0:
            refused.append(problem.answer)
    if refused:
        raise RewardError(
            f"math_verify does not accept {len(refused)} of {len(problems)} answers as right, the first "
            f"{quoted(refused[0])}; write them as LaTeX or as plain numbers, leave their rows out by task.filter, or "
            "set task.reward to a function of yours"
        )
