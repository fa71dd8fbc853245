"""The harness around the GPU checks, with tiny checks that crash, hang, are cut short and resumed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RunConflictError
from tests.gpu.harness import Session
from tests.gpu.results import Results, load_or_begin

HEAD = '''"""A tiny check. Not shown.

More.
"""
import os, signal, subprocess, sys, time
from tests.gpu.goals import Goal, NotMeasured
NAME, AFTER, PARTS, DEADLINE_S = {name!r}, {after!r}, {parts!r}, {deadline}
GOALS = tuple(Goal(figure=part, what=f"what {{part}} shows", at_most=1.0) for part in PARTS)
def derive(figures): return {{}}
def run(scale):
'''


class Workshop:
    """Writes fake checks and runs sessions over them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.modules: list[str] = []

    def check(
        self, name: str, body: str, *, after: tuple[str, ...] = (), parts: Any = ("one",), deadline: float = 20
    ) -> None:
        """`body` is what `run` does."""
        text = HEAD.format(name=name, after=after, parts=parts, deadline=deadline)
        (self.folder / f"fake_{self.folder.name}_{name}.py").write_text(text + f"    {body}\n")
        self.modules.append(f"fake_{self.folder.name}_{name}")

    def run(self, *, chosen: tuple[str, ...] = (), left_s: float = 60.0, device: str = "GPU A") -> Results:
        out = self.folder / "gpu.json"
        fresh = Results(date="2026-11-21", rehearsal=True, machine={"device": device}, versions={"torch": "2.11"})
        results = load_or_begin(out, fresh)
        scratch = self.folder / "scratch"
        session = Session(
            results=results,
            path=out,
            scratch=scratch,
            commit="abc",
            ends=time.monotonic() + left_s,
            say=self.lines.append,
        )
        session.measure(self.modules, chosen or tuple(name.rpartition("_")[2] for name in self.modules))
        return results

    def stored(self) -> Any:
        return json.loads((self.folder / "gpu.json").read_text())

    def table(self) -> str:
        return (self.folder / "gpu.md").read_text()


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    folder = tmp_path / f"w{abs(hash(tmp_path)) % 10**8}"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return Workshop(folder)


def test_figures_are_judged_and_written(workshop: Workshop) -> None:
    workshop.check("good", "return {scale.part: 0.5 if scale.part == 'a' else 2.0}", parts=("a", "b"))
    workshop.run()
    verdicts = {row["what"]: row["verdict"] for row in workshop.stored()["verdicts"]["good"]}
    assert verdicts == {"what a shows": "met", "what b shows": "missed"}
    assert "| what a shows | 0.5 | ≤ 1 | met |" in workshop.table()
    assert "Goals: 1 met, 1 missed, 0 not measured." in workshop.table()
    assert "A tiny check. Not shown." in workshop.table()
    assert "More." not in workshop.table()


def test_a_crash_costs_its_own_part_only(workshop: Workshop) -> None:
    workshop.check("bad", "scale.keep(one=0.25); os.kill(os.getpid(), signal.SIGSEGV)")
    workshop.check("worse", "raise RuntimeError('CUDA error: an illegal memory access')")
    workshop.check("good", "return {'one': 0.5}")
    found = workshop.run()
    bad, worse = found.checks["bad"]["one"], found.checks["worse"]["one"]
    assert bad.status == "failed"
    assert bad.reason.startswith("ended by signal 11")
    assert bad.figures == {"one": 0.25}, "what it had kept before"
    assert worse.reason == "ended with status 1: RuntimeError: CUDA error: an illegal memory access"
    assert found.checks["good"]["one"].status == "measured"
    assert "illegal memory access" in workshop.table()
    assert "Traceback" in (workshop.folder / "gpu.log").read_text()


def test_a_hang_ends_with_all_of_its_processes(workshop: Workshop) -> None:
    pids = workshop.folder / "pid"
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    body = f"scale.keep(one=0.75); open({str(pids)!r}, 'w').write(str({child}.pid)); time.sleep(600)"
    workshop.check("stuck", body, deadline=4.0)
    began = time.monotonic()
    outcome = workshop.run().checks["stuck"]["one"]
    assert time.monotonic() - began < 30
    assert outcome.status == "failed"
    assert "not done within 4 s" in outcome.reason
    assert outcome.figures == {"one": 0.75}
    for _ in range(100):
        if not alive(int(pids.read_text())):
            return
        time.sleep(0.05)
    pytest.fail("the check's own child lives on")


def alive(pid: int) -> bool:
    """A zombie that nobody has reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_time_of_the_call_bounds_a_check(workshop: Workshop) -> None:
    workshop.check("slow", "time.sleep(600)", deadline=500.0)
    outcome = workshop.run(left_s=3.0).checks["slow"]["one"]
    assert outcome.seconds < 10
    assert "not done within" in outcome.reason


def test_files_are_whole_after_every_part(workshop: Workshop) -> None:
    copy = workshop.folder / "copy.json"
    stored = workshop.folder / "gpu.json"
    workshop.check("first", "return {'one': 0.5}")
    workshop.check("second", f"open({str(copy)!r}, 'w').write(open({str(stored)!r}).read()); return {{'one': 0.5}}")
    workshop.run()
    seen = json.loads(copy.read_text())
    assert seen["checks"]["first"]["one"]["figures"] == {"one": 0.5}


def test_figures_of_two_machines_are_not_mixed(workshop: Workshop) -> None:
    workshop.check("good", "return {'one': 0.5}")
    workshop.run(device="NVIDIA H100")
    with pytest.raises(RunConflictError, match="device NVIDIA H100, this is NVIDIA H200; choose another --out"):
        workshop.run(device="NVIDIA H200")
