"""One simulation: the operator starts the two roles, starts them again whenever they die, and looks at what is left."""

from __future__ import annotations

import gc
import shutil
import tempfile
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path

from pipeline.errors import FATAL_EXIT_CODE, SUPERSEDED_EXIT_CODE, EvenKeelError
from tests.chaos.simulation.disk import Disk
from tests.chaos.simulation.encoding import quick_files
from tests.chaos.simulation.engines import EngineRoom
from tests.chaos.simulation.invariants import judge
from tests.chaos.simulation.plan import Plan
from tests.chaos.simulation.roles import Promises, Setting, collector_role, guarded, learner_role
from tests.chaos.simulation.system import switched
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
