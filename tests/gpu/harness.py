"""Runs checks one after the other, each part in a process of its own, and writes down what is known after each.

    plan ─▶ (measured before? a check it builds on failed? no time left?) ─▶ child ─▶ figures ─▶ gpu-DATE.json + .md

A crash, a hang or an error of CUDA costs the part in which it happens and what the part had not kept yet.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from launch.run.processes import child_environment
from pipeline.child_process import log_tail
from pipeline.data.files import write_atomically
from tests.gpu.child import missing_file
from tests.gpu.goals import Figures, Goal
from tests.gpu.machine import ROOT
from tests.gpu.report import judged, write_report
from tests.gpu.results import Outcome, Results
from tests.gpu.scale import Scale

LOG_CHARACTERS = 40_000
"""Of the log of an engine or a learner that are kept."""


class Check(Protocol):
    """A module of tests/gpu/checks. It must import without torch: the harness reads its goals on any machine."""

    NAME: str
    AFTER: tuple[str, ...]
    """What this check builds on, `check` or `check.part`; see Results.blocks."""
    PARTS: tuple[str, ...]
    """Each in its own process, in this order."""
    DEADLINE_S: float
    """Of one part."""
    GOALS: tuple[Goal, ...]

    @staticmethod
    def run(scale: Scale) -> Figures:
        """Measure one part. Raises NotMeasured for what this machine lacks."""
        ...

    @staticmethod
    def derive(figures: Figures) -> Figures:
        """Figures that follow from those of several parts, as far as they are there."""
        ...


def load_check(module: str) -> Any:
    """The check of a dotted module name."""
    return importlib.import_module(module)


@dataclass(kw_only=True)
class Session:
    """One call: what to measure, and where what is found goes."""

    results: Results
    path: Path
    """The JSON file; the table and the log lie beside it."""
    scratch: Path
    commit: str
    """Of the sources."""
    ends: float
    """On the monotonic clock."""
    began: float = field(default_factory=time.monotonic)
    say: Callable[[str], None] = lambda line: print(line, flush=True)

    def measure(self, modules: Sequence[str], chosen: Sequence[str]) -> None:
        """Run what is chosen of `modules` and not measured yet; the files are whole after every part."""
        checks = [load_check(module) for module in modules]
        for module, check in zip(modules, checks, strict=True):
            if check.NAME not in chosen:
                continue
            for part in check.PARTS:
                if self.results.done(check.NAME, part):
                    self._tell(check, part, "measured before")
                    continue
                outcome = self._attempt(module, check, part)
                if outcome is None:
                    continue
                self.results.checks.setdefault(check.NAME, {})[part] = outcome
                self._tell(check, part, f"{outcome.status} in {outcome.seconds:.1f} s {outcome.reason}")
                self.write(checks)
        self.write(checks)

    def write(self, checks: Sequence[Any]) -> None:
        """JSON first, then the table made from it."""
        rows = judged(self.results, checks)
        self.results.save(self.path, {name: [row.plain() for row in found] for name, found in rows.items()})
        write_atomically(self.path.with_suffix(".md"), write_report(self.results, checks, rows))

    def _attempt(self, module: str, check: Any, part: str) -> Outcome | None:
        """None when there is no time left: a later call tries again."""
        broken = [name for name in check.AFTER if self.results.blocks(name, part)]
        if broken:
            why = f"builds on {', '.join(broken)}, which failed"
            return Outcome(status="not measured", reason=why, commit=self.commit)
        left_s = self.ends - time.monotonic()
        if left_s < 1.0:
            self._tell(check, part, "left out: this call's time is over")
            return None
        self._tell(check, part, "begins")
        folder = self.scratch / check.NAME
        folder.mkdir(parents=True, exist_ok=True)
        return self._run_child(module, part, folder, min(check.DEADLINE_S, left_s))

    def _run_child(self, module: str, part: str, folder: Path, deadline_s: float) -> Outcome:
        scale = Scale(rehearsal=self.results.rehearsal, part=part, folder=folder)
        for stale in (scale.kept_file, missing_file(folder, part)):
            stale.unlink(missing_ok=True)
        log = folder / f"log-{part}.txt"
        command = [sys.executable, "-m", "tests.gpu.child", module, part, str(folder)]
        began = time.monotonic()
        reason = run_child(command + ["--rehearse"] * self.results.rehearsal, log, deadline_s)
        seconds = time.monotonic() - began
        keep_logs(self.path.with_suffix(".log"), f"{module} {part}", log, folder / "runs")
        missing = missing_file(folder, part)
        outcome = Outcome(status="measured", seconds=round(seconds, 2), commit=self.commit, figures=scale.kept())
        if reason:
            outcome.status, outcome.reason = "failed", reason
        elif missing.exists():
            outcome.status, outcome.reason = "not measured", missing.read_text()
        return outcome

    def _tell(self, check: Any, part: str, what: str) -> None:
        self.say(f"[{time.monotonic() - self.began:6.1f} s] {check.NAME} {part}: {what.strip()}")


def keep_logs(target: Path, title: str, log: Path, runs: Path) -> None:
    """Append a part's log and the ends of those of its runs (engines, learner), then remove the runs: with weights and
    checkpoints of every part a disk would fill."""
    logs = [log, *sorted(runs.glob("*/logs/*.log"))]
    with target.open("a", errors="replace", encoding="utf-8") as file:
        for path in logs:
            text = path.read_text(errors="replace")
            file.write(f"==== {title}: {path.name} ====\n{text if path == log else text[-LOG_CHARACTERS:]}\n")
    shutil.rmtree(runs, ignore_errors=True)


def run_child(command: Sequence[str], log: Path, deadline_s: float) -> str:
    """Run to the end; its output is in `log`. Returns why it failed, empty when it did not.

    The child leads a process group, which dies as a whole when the deadline passes.
    """
    environment = child_environment() | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).strip(os.pathsep)
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            status = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return f"not done within {deadline_s:.0f} s; its log ends: {log_tail(log)}"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if status == 0:
        return ""
    how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"{how}: {log_tail(log)}"
