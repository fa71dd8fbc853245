"""What must hold of a run directory at the end, whatever happened on the way."""

from __future__ import annotations

import os

from pipeline.analysis.audit import verify_history
from pipeline.data.batch import Batch
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.files import OLD_S, is_temporary, remove_old_leftovers
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from tests.chaos.simulation.learner import HashLearner
from tests.chaos.simulation.plan import Plan
from tests.chaos.simulation.roles import (
    Setting,
    digest_of,
    final_weights,
    oldest_allowed,
    schedule_of,
    solved_rule_of,
    trainer,
)
from tests.chaos.simulation.system import REAL


def judge(setting: Setting) -> None:
    """Name every invariant that does not hold."""
    _history(setting)
    _records(setting)
    _replay(setting)
    _leftovers(setting)


def _history(setting: Setting) -> None:
    world, plan = setting.world, setting.world.plan
    audit = verify_history(setting.path, schedule_of(plan), plan.steps, solved_rule_of(plan))
    if not audit.sound:
        world.problem(f"verify history: {audit}")
    if audit.batches != plan.steps:
        world.problem(f"{audit.batches} batches of {plan.steps}")
    store = BatchStore(setting.run.batches)
    if beyond := [index for index in store.committed() if index >= plan.steps]:
        world.problem(f"batches beyond the end: {beyond}")
    for index, digest in setting.promises.batches.items():
        if not store.exists(index) or digest_of(store.path(index)) != digest:
            world.problem(f"batch {index} is not the one that was committed")
    for index in store.committed():
        batch = store.read(index, None)
        if not (oldest_allowed(plan, index) <= batch.policy_version.min() and batch.policy_version.max() <= index):
            world.problem(f"batch {index} has tokens of versions {sorted(set(batch.policy_version.tolist()))}")
        if plan.refills and (groups := len(set(batch.group.tolist()))) != (expected := _expected_groups(plan, batch)):
            world.problem(f"batch {index} has {groups} groups, expected {expected}")


def _expected_groups(plan: Plan, batch: Batch) -> int:
    """Of a batch with refills. A prompt that does not fit uses up one of the groups that the batch may ask: where all
    other problems are solved, so many do not fit that the rest cannot fill it."""
    unfit = sum(drop.kind == "unfit" for drop in batch.dropped)
    return min(plan.prompts, (1 + plan.refills) * plan.prompts - unfit)


def _records(setting: Setting) -> None:
    world, plan, run = setting.world, setting.world.plan, setting.run
    steps = list(range(plan.steps))
    if (found := [line["step"] for line in read_metrics(run.path)]) != steps:
        world.problem(f"metrics of steps {found}")
    if missing := [step for step in steps if run.learner_logprobs(step) is None]:
        world.problem(f"no learner log-probabilities of steps {missing}")
    if (published := run.published_version()) != plan.steps:
        world.problem(f"version {published} is published at the end")
    elif not run.policy_directory(published).is_dir():
        world.problem(f"version {published} is published, and its folder is missing")
    schedule = schedule_of(plan)
    due = {schedule.published_before(index) for index in range(0, plan.steps, plan.evaluate_every)} | {plan.steps}
    if (evaluated := run.evaluated_versions()) != due:
        world.problem(f"versions {sorted(evaluated)} are evaluated, due are {sorted(due)}")
    committed = [event["batch"] for event in read_events(run.path, "committed")]
    if len(set(committed)) != len(committed) and "power cut" not in world.happened:
        world.problem(f"batches were committed twice: {committed}")
    consumed = {event["step"] for event in read_events(run.path, "consumed")}
    if consumed != set(steps) and "power cut" not in world.happened:  # events are not synced
        world.problem(f"steps {sorted(consumed)} were consumed")


def _replay(setting: Setting) -> None:
    """The same batches again, without interruption and without engines."""
    world = setting.world
    replay = RunDirectory(setting.path.with_name("replay"))
    replay.make_folders()
    again = trainer(setting, replay, setting.run, HashLearner(world), None, "learner-000001", lambda: False)
    again.checkpoint_every = world.plan.steps
    again.train()
    if final_weights(replay) != final_weights(setting.run):
        world.problem("the final weights are not those of a replay of the batches")


def _leftovers(setting: Setting) -> None:
    """What roles share is cleared some minutes later, at the learner's next start."""
    long_ago = REAL.time() - 2 * OLD_S
    for folder, folders, files in os.walk(setting.path):
        for name in (*folders, *files):
            REAL.utime(os.path.join(folder, name), (long_ago, long_ago), follow_symlinks=False)
    remove_old_leftovers(setting.run.shared_folders)
    left = [
        os.path.relpath(os.path.join(folder, name), setting.path)
        for folder, folders, files in os.walk(setting.path)
        for name in (*folders, *files)
        if name.endswith(".tmp") and is_temporary(name)
    ]
    if left:
        setting.world.problem(f"left behind: {', '.join(sorted(left))}")
