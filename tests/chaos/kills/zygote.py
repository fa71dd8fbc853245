"""The process that has everything imported, of which each case is a fork: `python -m tests.chaos.kills.zygote`.

A line of JSON comes in (the id of a plan, a folder, a model), a line goes out: the verdict and its details.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from tests.chaos.kills.driver import ROOT, Drive, become_reaper
from tests.chaos.kills.plan import Plan, in_short, plans, shares

CASE_S = 3600.0
"""Longest time of one case."""


def ask(plan: Plan, folder: Path, model: Path) -> dict[str, Any]:
    """Run a plan in the zygote of this process, which is started once. Returns `verdict` and `details`."""
    zygote = _zygote()
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    print(json.dumps(dict(plan=plan.id, folder=str(folder), model=str(model))), file=zygote.stdin, flush=True)
    answer = zygote.stdout.readline()
    if not answer:
        _zygote.cache_clear()
        return dict(verdict=f"the zygote ended with {zygote.wait(20)}", details={})
    result: dict[str, Any] = json.loads(answer)
    return result


@cache
def _zygote() -> subprocess.Popen[str]:
    """It dies with this process, and its cases with it."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.chaos.kills.zygote"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        text=True,
    )


def main() -> None:
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "r+", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)  # what imports print is no answer
    from pipeline.child_process import die_with_parent
    from tests.chaos.kills import forks

    die_with_parent()
    forks.preload()
    known = {plan.id: plan for plan in (*plans(), in_short(), shares())}
    while line := orders.readline():
        order = json.loads(line)
        folder = Path(order["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            orders.close()
            answers.close()
            _run(known[order["plan"]], folder, Path(order["model"]))
        answers.write(json.dumps(_wait(pid, folder)) + "\n")


def _wait(pid: int, folder: Path) -> dict[str, Any]:
    ends = time.monotonic() + CASE_S
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > ends:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    verdict = folder / "verdict.json"
    if not verdict.exists():
        status = os.waitstatus_to_exitcode(found[1])
        return dict(verdict=f"the case ended with {status}; see {folder}/driver.log", details={})
    result: dict[str, Any] = json.loads(verdict.read_text())
    return result


def _run(plan: Plan, folder: Path, model: Path) -> None:
    """Body of a case."""
    try:
        descriptor = os.open(folder / "driver.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        from pipeline.child_process import die_with_parent

        die_with_parent()
        os.environ["EVENKEEL_CHAOS"] = str(folder)
        from tests.chaos.kills import hooks

        hooks.look_in(str(folder))
        if become_reaper():
            os.environ["CHAOS_OWN_SHM"] = "1"
        temporary = tempfile.mkdtemp(prefix="ek-")  # the path of a socket has 107 characters at most
        (folder / "tmp").unlink(missing_ok=True)
        (folder / "tmp").symlink_to(temporary)
        result = Drive(plan, folder, model).drive()
        shutil.rmtree(temporary, ignore_errors=True)
        (folder / "verdict.tmp").write_text(json.dumps(result))
        (folder / "verdict.tmp").replace(folder / "verdict.json")
    except BaseException:  # noqa: BLE001 - `os._exit` would discard it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
