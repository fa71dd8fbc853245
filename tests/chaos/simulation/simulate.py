"""One simulation: the operator starts the two roles, starts them again whenever they die, and looks at what is left."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import tempfile
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path

from pipeline.analysis.audit import verify_history
from pipeline.data.batch import Batch
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.files import OLD_S, is_temporary, remove_old_leftovers
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import FATAL_EXIT_CODE, SUPERSEDED_EXIT_CODE, EvenKeelError
from tests.chaos.simulation.disk import Disk
from tests.chaos.simulation.encoding import quick_files
from tests.chaos.simulation.engines import EngineRoom
from tests.chaos.simulation.learner import HashLearner
from tests.chaos.simulation.plan import Plan
from tests.chaos.simulation.roles import (
    Promises,
    Setting,
    collector_role,
    digest_of,
    final_weights,
    guarded,
    learner_role,
    oldest_allowed,
    schedule_of,
    solved_rule_of,
    trainer,
)
from tests.chaos.simulation.system import REAL, switched
from tests.chaos.simulation.world import Process, World

MEMORY = Path("/dev/shm")
POLL_S = 0.5
ROLES = {"collector": collector_role, "learner": learner_role}
MOST_STARTS = 80
SHORT_LIFE_S, LONGEST_PAUSE_S = 5.0, 20.0


@dataclass(frozen=True)
class Result:
    """What came of a simulation."""

    plan: Plan
    problems: tuple[str, ...]
    happened: tuple[str, ...]
    """Kinds of the faults that struck."""
    digest: str
    """Of everything that happened, in order."""
    points: int
    seconds: float
    """Virtual."""
    trace: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """ "ok", or what is wrong."""
        return "; ".join(self.problems) or "ok"


def simulate(plan: Plan, *, traced: bool = False) -> Result:
    """Run one plan to its end."""
    folder = Path(tempfile.mkdtemp(prefix="evenkeel-simulation-", dir=MEMORY if MEMORY.is_dir() else None))
    world = World(plan)
    world.trace = [] if traced else None
    collecting = gc.isenabled()
    gc.disable()
    try:
        with ExitStack() as stack:
            if not plan.real_files:
                stack.enter_context(quick_files())
            disk = Disk(world, folder / "disk")
            stack.enter_context(switched(world, disk))
            stack.enter_context(redirect_stdout(StringIO()))  # of waits without progress
            stack.enter_context(redirect_stderr(StringIO()))
            setting = Setting(world, folder / "disk" / "run", EngineRoom(world), Promises())
            disk.on_name = partial(watch_published, setting)
            world.run(lambda process: operate(setting, disk))
    finally:
        if collecting:
            gc.enable()
        shutil.rmtree(folder)
    return Result(
        plan,
        tuple(world.problems),
        tuple(world.happened),
        world.digest.hexdigest(),
        world.points,
        world.now,
        tuple(world.trace or ()),
    )


def watch_published(setting: Setting, path: str) -> None:
    """Called after a name was given: what is published never falls."""
    if "/policy/" in path and "published" in path.lower():
        version = setting.run.published_version()
        if version < setting.promises.published:
            setting.world.problem(f"version {version} is published after {setting.promises.published}")
        setting.promises.published = max(setting.promises.published, version)


def operate(setting: Setting, disk: Disk) -> int:
    """What a supervisor does on one machine, and a cluster on several; no fault meets it."""
    operator = Operator(setting, disk)
    while not operator.is_done():
        operator.look()
        setting.world.sleep(POLL_S)
        if setting.world.ends:
            return 1
    judge(setting)
    return 0


class Operator:
    """Starts each role, and starts it again when it has died, or is given up for frozen."""

    def __init__(self, setting: Setting, disk: Disk) -> None:
        self._setting, self._disk = setting, disk
        self._running: dict[str, Process] = {}
        self._hosts = {role: role for role in ROLES}
        self._pauses = dict.fromkeys(ROLES, 0.0)
        self._finished: set[str] = set()

    def is_done(self) -> bool:
        """Both roles have nothing left to do, and none is left, not even a frozen one."""
        return self._finished >= ROLES.keys() and not self._alive()

    def look(self) -> None:
        """Power, deaths, starts."""
        world = self._setting.world
        if world.power_cut is not None:
            if self._alive():
                return
            self._disk.cut_power(world.random(f"power {world.power_cut}"))
            world.power_cut = None
            self._setting.room.lose_all()
            self._finished.clear()
            run, promises = self._setting.run, self._setting.promises
            promises.published = run.published_version() if run.is_published() else 0
            if promises.published < promises.announced:
                world.problem(f"version {promises.announced} was published, and {promises.published} is, after the cut")
            saved, removed = run.saved_steps(), BatchStore(run.batches).removed()
            if removed and saved[0] <= removed[-1]:
                world.problem(f"after the cut there is checkpoint {saved[0]}, and batch {removed[-1]} is removed")
        for role in ROLES:
            process = self._running.get(role)
            if process is not None and process.status is not None:
                self._note_end(process)
            gone = process is None or process.status is not None or (process.frozen and process.replaced)
            if gone and role not in self._finished and not self._is_taken_over(role, process):
                self._start(role, process)

    def _alive(self) -> bool:
        return any(process.role in ROLES for process in self._setting.world.processes)

    def _is_taken_over(self, role: str, process: Process | None) -> bool:
        """Whether the role goes on in another process: one that thawed before it had claimed its epoch."""
        if process is None or process.status != SUPERSEDED_EXIT_CODE:
            return False
        return any(other.role == role and not other.frozen for other in self._setting.world.processes)

    def _start(self, role: str, before: Process | None) -> None:
        """Without delay when the one before did well for a while."""
        world = self._setting.world
        if world.started > MOST_STARTS:
            world.end(f"{world.started} starts of roles, and no end")
        short = before is not None and world.now - before.began < SHORT_LIFE_S
        self._pauses[role] = min(2 * self._pauses[role] + POLL_S, LONGEST_PAUSE_S) if short else 0.0
        if before is not None and before.frozen:
            self._hosts[role] = f"{role}{world.started}"
        body = guarded(partial(ROLES[role], self._setting))
        self._running[role] = world.start(role, body, self._pauses[role], self._hosts[role])

    def _note_end(self, process: Process) -> None:
        world, error = self._setting.world, process.error
        if process.status == 0:
            self._finished.add(process.role)
        full = "full" in world.happened
        if process.status == FATAL_EXIT_CODE and not full:
            world.problem(f"{process.role} refuses to go on: {world.said(error)}")
            world.end("the run has failed")
        if process.status == SUPERSEDED_EXIT_CODE and "freeze" not in world.happened:
            world.problem(f"{process.role}, which nobody replaced, says: {world.said(error)}")
        if error is not None and not isinstance(error, EvenKeelError) and not (full and isinstance(error, OSError)):
            world.problem(f"{process.role} raised {world.said(error)}")


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
    store, saved = BatchStore(setting.run.batches), setting.run.saved_steps()
    first = 0 if plan.keep_batches is None else max(0, min(saved[0], plan.steps - plan.keep_batches))
    removed = len(audit.removed)
    if (audit.removed, audit.batches) != (tuple(range(removed)), plan.steps - removed):
        world.problem(f"{audit.batches} batches of {plan.steps}; removed are {audit.removed}")
    if removed > first or (removed < first and "freeze" not in world.happened):  # which may remove a checkpoint later
        world.problem(f"{removed} batches are removed, expected {first}")
    if leftover := [index for index in audit.removed if store.path(index).exists()]:
        world.problem(f"removed batches that are there: {leftover}")
    if beyond := [index for index in store.committed() if index >= plan.steps]:
        world.problem(f"batches beyond the end: {beyond}")
    for index, digest in setting.promises.batches.items():
        if index in audit.removed:
            if hashlib.sha256(setting.promises.removed[index]).hexdigest() != digest:
                world.problem(f"batch {index} was not the one that was committed when it was removed")
        elif not store.path(index).exists() or digest_of(store.path(index)) != digest:
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
    steps = set(range(plan.steps))
    keeps = [keep for keep in (plan.keep_batches, plan.keep_logprobs) if keep is not None]
    scored = set(range(min(run.saved_steps()[0], plan.steps - min(keeps, default=plan.steps)), plan.steps)) & steps
    expected = {"metrics": steps, "learner log-probabilities": scored}
    diagnostics = {
        "metrics": {line["step"] for line in read_metrics(run.path)},
        "learner log-probabilities": {step for step in steps if run.learner_logprobs(step) is not None},
    }
    if "freeze" in world.happened:  # a frozen learner may remove a checkpoint later
        diagnostics["learner log-probabilities"] &= scored
    if "power cut" not in world.happened:  # events are not synced
        diagnostics["events consumed"] = {event["step"] for event in read_events(run.path, "consumed")}
    for what, found in diagnostics.items():  # one that meets a full disk is skipped, and fails no run
        wanted = expected.get(what, steps)
        if found - wanted or len(wanted - found) > world.counts["learner", "refused"]:
            world.problem(f"{what} of steps {sorted(found)}, expected {sorted(wanted)}")
    if (published := run.published_version()) != plan.steps:
        world.problem(f"version {published} is published at the end")
    elif not run.policy_directory(published).is_dir():
        world.problem(f"version {published} is published, and its folder is missing")
    schedule = schedule_of(plan)
    due = {schedule.published_before(index) for index in range(0, plan.steps, plan.evaluate_every)} | {plan.steps}
    found = {version: run.evaluation(version) for version in run.evaluated_versions()}
    skipped = [version for one in found.values() for version in one.get("skipped", ())]
    if sorted([*found, *skipped]) != sorted(due):
        world.problem(f"versions {sorted(found)} are evaluated and {skipped} skipped, due are {sorted(due)}")
    if mixed := [
        version
        for version, one in found.items()
        if "answered" in one and (plan.kind != "async" or version == plan.steps)
    ]:
        world.problem(f"the evaluations of {mixed} were answered by other versions")
    if stale := [
        version for version, one in found.items() for answered, _ in one.get("answered", ()) if answered < version
    ]:
        world.problem(f"the evaluations of {stale} were answered by older versions")
    committed = [event["batch"] for event in read_events(run.path, "committed")]
    if len(set(committed)) != len(committed) and "power cut" not in world.happened:
        world.problem(f"batches were committed twice: {committed}")


def _replay(setting: Setting) -> None:
    """The same batches again, without interruption and without engines."""
    world = setting.world
    replay = RunDirectory(setting.path.with_name("replay"))
    replay.make_folders()
    source = RunDirectory(setting.path.with_name("source"))
    store, put_back = BatchStore(setting.run.batches), BatchStore(source.batches)
    for index in range(world.plan.steps):
        removed = setting.promises.removed.get(index)
        put_back.path(index).write_bytes(store.path(index).read_bytes() if removed is None else removed)
    again = trainer(setting, replay, source, HashLearner(world), None, "learner-000001", lambda: False)
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
