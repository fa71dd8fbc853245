"""One case: start the run, let each fault of the plan happen, start again what must be, and judge what is left.

The driver is a process of its own, to which orphans of the run fall (PR_SET_CHILD_SUBREAPER), and where the machine
lets it, one with a /dev/shm of its own: whatever is left behind is seen.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.run_directory import RunDirectory
from tests.chaos.kills import episodes, hooks
from tests.chaos.kills.plan import Fault, Plan
from tests.support.runs import make_recipe

ROOT = Path(__file__).parents[3]
INJECT = Path(__file__).parent / "inject"
FIRE_S = 300.0
"""Longest wait for a point, and for what a fault ended to be back; for a machine with twenty busy processes a core."""
FINISH_S = 600.0
ORPHANS_S = 20.0
_POLL_S = 0.05
_UNPLANNED_ENDS = 3
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


@dataclass
class Drive:
    """A plan under way in `folder`."""

    plan: Plan
    folder: Path
    model: Path
    problems: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    kills: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    _supervisor: int = 0
    _ended: int | None = None
    _expected: bool = False
    _unplanned: int = 0
    _pace: int = 3
    _server: list[int] = field(default_factory=list)
    """Engine 0 before the fault."""

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    def drive(self) -> dict[str, Any]:
        """Everything, to the verdict."""
        began = time.monotonic()
        for name in ("fired", "pids", "runs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if self.plan.disk_mib and not mount_tmpfs(self.folder / "runs", self.plan.disk_mib):
            return dict(verdict="ok", details=dict(skipped="needs root, to mount a small file system"))
        self.recipe = write_recipe(self.folder, self.model, self.plan)
        self._put("pace", str(self._pace))
        self._start()
        for fault in self.plan.faults:
            self._let_happen(fault)
        self._put("pace", str(sys.maxsize))
        self._wait(lambda: self._ended == 0, FINISH_S, "the run to finish")
        took = time.monotonic() - began
        if self._ended == 0:
            self.problems += judge(self)
        else:
            self.end()
        self.problems += [f"not reached: {', '.join(self.missed)}"] if self.missed else []
        used = os.times()
        cpu = round(used.children_user + used.children_system, 1)
        seconds = dict(seconds_of_run=round(took, 1), cpu_seconds=cpu)
        return dict(
            verdict="; ".join(self.problems) or "ok",
            details=dict(kills=self.kills, faults=len(self.plan.faults), **seconds, **self.details, log=self.log),
        )

    # ------------------------------------------------------------------------------------------------------- one fault

    def _let_happen(self, fault: Fault) -> None:
        started = time.monotonic()
        self._pace += self.plan.steps_a_fault
        self._put("pace", str(self._pace))
        if fault.action in ("clock", "fill", "strike"):
            self._expected = fault.action == "fill"
            dict(clock=self._jump, fill=self._fill, strike=self._strike)[fault.action](fault)
            return
        self._put("armed.json", json.dumps([fault.order()]))
        mark = self.folder / "fired" / fault.id
        self._server = hooks.find("engine-0")
        if fault.first:
            self._kill(fault.first)
        self._expected = fault.action == "full" or any(victim.startswith("supervisor") for victim in fault.victims)
        fired = self._wait(lambda: mark.exists() and mark.read_bytes()[-1:] == b"}", FIRE_S, f"{fault.id}")
        if not fired:
            self.missed.append(fault.id)
            self._put("armed.json", "[]")
            return
        said = json.loads(mark.read_text())
        struck = [pid for pids in said["pids"] for pid in pids]
        if fault.action == "stop":
            time.sleep(fault.lasts_s)
            for pid in struck:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        if fault.action == "kill":
            self.kills += len(fault.victims)
            self._wait(lambda: all(self._is_back(v, struck) for v in fault.victims), FIRE_S, f"{fault.victims} back")
        self._put("armed.json", "[]")
        self.log.append(f"{fault.id}: by {said['by']}, {time.monotonic() - started:.1f} s")

    def _is_back(self, victim: str, struck: list[int]) -> bool:
        if victim == "scheduler":
            victim, struck = "engine-0", self._server  # a server without its scheduler ends itself
        if victim == "verifier":
            return True  # replaced when it is asked
        found = hooks.find(victim)
        return bool(found) and not set(found) & set(struck)

    def _kill(self, name: str) -> None:
        self._wait(lambda: hooks.find(name), FIRE_S, f"{name} to be there")
        for pid in hooks.find(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kills += 1

    def _strike(self, fault: Fault) -> None:
        """Kill one of the victims that are there; a run that waits for its pace goes on until there is one."""
        self._wait(lambda: len(read_metrics(self.run)) >= int(fault.point), FIRE_S, f"step {fault.point}")
        ends, found, [victim] = time.monotonic() + fault.lasts_s, list[int](), fault.victims

        def struck() -> bool:
            nonlocal ends
            found[:] = hooks.find(victim)
            if not found and time.monotonic() > ends + 1:
                ends, self._pace = time.monotonic(), self._pace + 1
                self._put("pace", str(self._pace))
            return bool(found)

        self._wait(lambda: time.monotonic() > ends, FIRE_S, "the time of a strike")
        if not self._wait(struck, FIRE_S, f"{victim} to be there"):
            self.log.append(f"{fault.id}: the run ended before")
            return
        with suppress(ProcessLookupError):
            os.kill(random.Random(fault.id).choice(found), signal.SIGKILL)
            self.kills += 1
            self.log.append(f"{fault.id}: of {len(found)}, at step {len(read_metrics(self.run))}")

    def _jump(self, fault: Fault) -> None:
        self._put("clock", json.dumps({fault.victims[0]: fault.jump_s}))
        ends = time.monotonic() + fault.lasts_s
        self._wait(lambda: time.monotonic() > ends, FIRE_S, "a wrong clock")
        self._put("clock", "{}")
        self.log.append(fault.id)

    def _fill(self, fault: Fault) -> None:
        """Leave no room in the run's file system, then give it back, and see the run go on."""
        ballast = self.folder / "runs" / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        ends = time.monotonic() + fault.lasts_s
        self._wait(lambda: time.monotonic() > ends, FIRE_S, "a full disk")
        ballast.unlink()
        before = len(read_metrics(self.run))
        self._wait(
            lambda: len(read_metrics(self.run)) > before or before >= self._pace, FIRE_S, "a step after a full disk"
        )
        self.log.append(f"{fault.id}: {len(read_events(self.run, 'restarted'))} restarts so far")

    # --------------------------------------------------------------------------------------------------- the supervisor

    def _start(self) -> None:
        self._ended = None
        command = [sys.executable, "-m", "launch.cli", "train", str(self.recipe), "--json"]
        self._supervisor = start(command, self.folder, "train", forked=self.plan.forked)

    def _look(self) -> None:
        """Start the supervisor again when it has ended before the run has."""
        if self._ended is not None:
            return
        pid, status = os.waitpid(self._supervisor, os.WNOHANG)
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        if left := self.end():
            self.problems.append(f"outlived their supervisor by {ORPHANS_S:g} s: {', '.join(left)}")
        if code == 0:
            self._ended = 0
            return
        said = last_line(self.folder / "train.err")
        self.log.append(f"train ended with {code}: {said}")
        if not self._expected:
            self._unplanned += 1
            self.problems.append(f"train ended with {code}: {said}")
        if self._unplanned > _UNPLANNED_ENDS:
            self._ended = code
            return
        self._start()

    def end(self) -> list[str]:
        """What is left of the run's processes: given some time, then killed. Returns what they were."""
        deadline = time.monotonic() + ORPHANS_S
        while (left := children()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        names = [command_of(pid) for pid in left]
        for pid in left:
            for one in (*hooks.below([pid]), pid):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
        while children():
            time.sleep(_POLL_S)
        return names

    def _wait(self, condition: Callable[[], object], deadline_s: float, what: str) -> bool:
        ends = time.monotonic() + deadline_s
        while not condition():
            self._look()
            if self._ended is not None and not condition():
                return False
            if time.monotonic() > ends:
                self.problems.append(f"waited {deadline_s:g} s for {what}")
                return False
            time.sleep(_POLL_S)
        return True

    def _put(self, name: str, text: str) -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(text)
        temporary.replace(self.folder / name)


def environment(folder: Path) -> dict[str, str]:
    """Of the run's programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return kept | {
        hooks.VARIABLE: str(folder),
        "PYTHONPATH": f"{INJECT}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str((folder / "tmp").resolve()),
        "COLUMNS": "200",
    }


def start(command: list[str], folder: Path, name: str, *, forked: bool) -> int:
    """A program of ours, which dies with this process. Its output goes to FOLDER/NAME.out and .err."""
    with (folder / f"{name}.out").open("ab") as out, (folder / f"{name}.err").open("ab") as err:
        if not forked:
            wrapper = [sys.executable, "-I", "-S", str(ROOT / "pipeline/child_process.py"), "9", str(os.getpid()), ""]
            started = subprocess.Popen(
                [*wrapper, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(folder),
                cwd=ROOT,
            )
            started.returncode = 0  # it is waited for by its process id
            return started.pid
        from tests.chaos.kills import forks

        parent = os.getpid()

        def body() -> None:
            os.dup2(descriptor, 2)
            forks.install()
            forks.run_cli(command, parent)

        descriptor = os.dup(err.fileno())
        os.set_inheritable(descriptor, True)
        try:
            return forks.fork(body, command, environment(folder), out.fileno(), keep=(descriptor,))
        finally:
            os.close(descriptor)


def ask(folder: Path, name: str, *arguments: str, forked: bool) -> tuple[int, str, str]:
    """Run a command to its end: status, the last line of its output, and of its errors."""
    pid = start([sys.executable, "-m", "launch.cli", *arguments], folder, name, forked=forked)
    ends = time.monotonic() + FINISH_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > ends:
            os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    code = os.waitstatus_to_exitcode(status)
    return code, last_line(folder / f"{name}.out"), last_line(folder / f"{name}.err")


def become_reaper() -> bool:
    """Orphans of this process's descendants are its children. Returns whether it got a /dev/shm of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if libc.unshare(_CLONE_NEWNS):
        return False
    private = libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    return not private and mount_tmpfs(Path("/dev/shm"), 2048)


def mount_tmpfs(folder: Path, mib: int) -> bool:
    """Give a folder a file system of its own, which goes with this process and its children. Whether it could be."""
    libc = ctypes.CDLL(None, use_errno=True)
    return not libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={mib}m".encode())


def children() -> list[int]:
    """Living children of this process; the dead are buried."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    own = f"/proc/self/task/{os.getpid()}/children"
    return [int(word) for word in Path(own).read_text(encoding="utf-8").split()]


def command_of(pid: int) -> str:
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{Path(f'/proc/{pid}/comm').read_text(encoding='utf-8').strip()} ({line[-60:].strip()})"
    return str(pid)


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace", encoding="utf-8").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else ""


def judge(drive: Drive) -> list[str]:
    """What is wrong; the run has finished."""
    # First: what follows makes files of its own. A learner that shares memory may leave its folder to the next one.
    allowed = "evenkeel-learner-" if drive.plan.channel == "ipc" else ""
    found = list(leftovers(drive.folder, drive.run, allowed))
    found += records(drive.run, drive.plan.steps)
    code, said, error = ask(drive.folder, "history", "verify", "history", str(drive.run), "--json", forked=True)
    audit = json.loads(said) if code == 0 and said.startswith("{") else {}
    if not audit.get("ok"):
        found.append(f"verify history: {error or said}")
    for key in ("lost", "duplicated", "version_violations", "missing_batches"):
        if audit.get(key):
            found.append(f"{key}: {audit[key]}")
    if section := drive.plan.overrides.get("episode"):
        found += episodes.faults(drive.run, drive.model, section, drive.details)
        strikes = sum(fault.victims[0] in ("host", "episode", "agent") for fault in drive.plan.faults)
        if strikes < 2 and (given_up := drive.details["given_up"]):  # each is tried twice
            found.append(f"{len(given_up)} groups given up: {given_up[0]}")
    seldom = ("--set", "checkpoint.every=1000")  # which changes no weight, and takes half the time
    code, said, error = ask(drive.folder, "replay", "train", "--replay", str(drive.run), "--json", *seldom, forked=True)
    if code or not json.loads(said).get("bit_identical"):
        found.append(f"replay: {error if code else said}")
    return found


def records(path: Path, steps: int) -> Iterator[str]:
    """What reports and diagnoses need of each step."""
    run = RunDirectory(path)
    have = [line["step"] for line in read_metrics(path)]
    if have != list(range(steps)):
        yield f"metrics of {len(have)} of {steps} steps; missing: {sorted(set(range(steps)) - set(have))}"
    if missing := [step for step in range(steps) if run.learner_logprobs(step) is None]:
        yield f"no log-probabilities of steps {missing}"
    told = {event.get("due", event["version"]) for event in read_events(path, "evaluated")}
    if missing := sorted(run.evaluated_versions() - told):
        yield f"no event of the evaluations of versions {missing}"


def leftovers(folder: Path, run: Path, allowed: str) -> Iterator[str]:
    """Files that a process which ended, however, has left, but for temporary ones whose names begin with `allowed`."""
    for place in (folder / "tmp", Path("/dev/shm")):
        names = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
        names = [name for name in names if not (allowed and name.startswith(allowed))]
        if names and (place.parent != Path("/dev") or os.environ.get("CHAOS_OWN_SHM")):
            yield f"{len(names)} left in {place.name}: {', '.join(names[:4])}"
    temporary = sorted(str(path.relative_to(run)) for path in run.rglob("*.tmp"))
    if temporary:
        yield f"{len(temporary)} temporary files in the run: {', '.join(temporary[:4])}"


SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": dict(kind="sync"),
    "async": dict(kind="async", lag=1),
    "staged": dict(kind="staged", updates_per_stage=2),
}


def write_recipe(folder: Path, model: Path, plan: Plan) -> Path:
    """The recipe of a plan's run, FOLDER/runs/run."""
    data: dict[str, Any] = dict(
        run=dict(steps=plan.steps, max_restarts=12),
        schedule=SCHEDULES[plan.schedule],
        rollout=dict(engines=2, prompts_per_batch=2, group_size=2, max_new_tokens=6),
        learner={plan.layout: 2, "micro_batch_tokens": 128},
        reward=dict(workers=1),
        evaluation=dict(every=2, prompts=2, samples=1),
        weights=dict(channel=plan.channel),
    )
    for name, keys in plan.overrides.items():
        data[name] = {**data.get(name, {}), **keys}
    return make_recipe(folder, model, "run", **data)
