"""Text is UTF-8 on every machine, whatever its locale says.

Ruff (PLW1514) sees files that are opened without naming one; here is what is written where the locale has another.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.analysis.report import write_report
from pipeline.child_process import ChildProcess, program_environment
from pipeline.rewards.pool import Verdict, Verifiers
from pipeline.rewards.verifiers import PYTHON_TESTS
from tests.support.written_runs import write_run

ASCII = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")


@pytest.fixture(params=["ASCII", "Latin-1"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose locale has another encoding."""
    if request.param == "ASCII":
        return program_environment() | ASCII
    made = tmp_path / "locales/en_US.ISO-8859-1"
    made.parent.mkdir()
    if subprocess.run(["localedef", "-i", "en_US", "-f", "ISO-8859-1", made], capture_output=True).returncode:
        pytest.skip("this machine cannot make a Latin-1 locale")
    return program_environment() | dict(LOCPATH=str(made.parent), LC_ALL=made.name, PYTHONUTF8="0")


def test_pages_are_the_same_in_every_locale(elsewhere: dict[str, str], tmp_path: Path) -> None:
    run = write_run(tmp_path, 6)
    expected = write_report(run).read_text(encoding="utf-8")
    command = [sys.executable, "-m", "launch.cli", "report", str(run)]
    done = subprocess.run(command, env=elsewhere, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    written = (run / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"[^\x00-\x7f]", written) == re.findall(r"[^\x00-\x7f]", expected) != []


def test_what_a_child_prints_is_logged_in_utf_8(elsewhere: dict[str, str], tmp_path: Path) -> None:
    """Logs are read as UTF-8: the reason of an end must not be lost, and saying it must not be another one."""
    child = ChildProcess([sys.executable, "-c", r"print('1 \xd7 2 \u2192 \xe9')"], tmp_path / "log", elsewhere)
    while child.poll() is None:
        os.sched_yield()
    assert child.said() == "1 × 2 → é\n"


def test_programs_get_the_same_reward_in_every_locale(
    elsewhere: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCPATH", "LC_ALL"):
        monkeypatch.setenv(name, elsewhere.get(name, ""))
    tests = json.dumps([{"input": "né →\n", "output": "→ én\n"}])
    with Verifiers(PYTHON_TESTS, workers=1, deadline_s=60.0, sandbox=None, memory_mib=256) as verifiers:
        verdict = asyncio.run(verifiers.score("", "```python\nprint(input()[::-1])\n```", tests))
    assert verdict == Verdict(reward=1.0, parts={"passed": 1.0, "cut": 0.0})
