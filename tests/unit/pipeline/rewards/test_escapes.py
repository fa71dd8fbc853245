"""Attempts to get out of the sandbox, on every rung: what code in it reaches, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.rewards.pool import Verdict, Verifiers
from tests.support.sandboxes import EVERY_RUNG, sandbox_of

HERE = Path(__file__).parent
KEY = "key-that-nobody-else-has"
MEMORY_MIB = 256


@dataclass
class Attacked:
    """A run that lies below the folder in which the command was given, a home, and code that attacks both."""

    rung: str
    folder: Path
    verifiers: Verifiers

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "demo"

    def attack(self, name: str, **needs: object) -> Verdict:
        (verdict,) = self.attacks(name, **needs)
        return verdict

    def attacks(self, *names: str, **needs: object) -> list[Verdict]:
        async def all_of_them() -> list[Verdict]:
            return [await self.verifiers.score(json.dumps(needs), name, "") for name in names]

        return asyncio.run(asyncio.wait_for(all_of_them(), timeout=250))


DAILY = "landlock"
"""Every escape is tried on this rung, which needs no other program; on the others in the slow tests."""
BY_RUNG = [pytest.param(rung, marks=[] if rung == DAILY else pytest.mark.slow) for rung in EVERY_RUNG]


@pytest.fixture(scope="module", params=BY_RUNG)
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with project(request.param, tmp_path_factory.mktemp("project")) as made:
        yield made


@contextmanager
def project(rung: str | None, folder: Path) -> Iterator[Attacked]:
    run = folder / "runs" / "demo"
    for path in (run / "batches", folder / ".ssh", folder / "data"):
        path.mkdir(parents=True)
    for file in (run / "recipe.yaml", run / "batches" / "000000.zarr.zip", folder / ".ssh" / "id", folder / "key"):
        file.write_text("secret")
    (folder / "data" / "table.json").write_text("[1, 2]")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(HERE))
        patch.setenv("EVENKEEL_API_KEY", KEY)
        patch.setenv("EVENKEEL_API_KEY_FILE", str(folder / "key"))
        patch.setenv("SOME_OTHER_SECRET", KEY)
        sandbox = None if rung is None else sandbox_of(rung, run, folder / "key")
        with Verifiers(
            "escape_attempts:attack", workers=1, deadline_s=30.0, sandbox=sandbox, memory_mib=MEMORY_MIB
        ) as verifiers:
            yield Attacked(rung or "none", folder, verifiers)


def nothing_succeeded(verdict: Verdict) -> None:
    assert verdict.failed is None
    assert {name: share for name, share in verdict.parts.items() if share} == {}


def test_the_attacks_succeed_without_a_sandbox(tmp_path: Path) -> None:
    """Otherwise it would be no sign of strength that they fail in one."""
    with project(None, tmp_path) as attacked, subprocess.Popen(["sleep", "600"]) as target:
        try:
            files = [str(attacked.folder / "key"), str(attacked.folder / ".ssh" / "id"), "/etc/hosts"]
            assert set(attacked.attack("secrets", key=KEY, files=files).parts.values()) >= {1.0}
            tries = ["read", "write", "append", "create", "shorten", "mode", "times", "beside_it", "remove"]
            verdict = attacked.attack("run_directory", run=str(attacked.run), only=tries)
            assert verdict.parts == dict.fromkeys(tries, 1.0)
            tries = ["environment", "descriptors", "limits", "slow_down", "kill"]
            verdict = attacked.attack("other_processes", pid=target.pid, own_namespace=1, only=tries)
            assert verdict.parts == dict.fromkeys(tries, 1.0)
            assert target.wait(10) == -9
        finally:
            target.kill()


def test_no_network(attacked: Attacked, tmp_path: Path) -> None:
    abstract = f"evenkeel-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as nameless,
        tempfile.TemporaryDirectory(dir=attacked.folder) as short,
    ):
        named.bind(f"{short}/s")
        nameless.bind("\0" + abstract)
        named.listen()
        nameless.listen()
        verdict = attacked.attack("network", port=tcp.getsockname()[1], named=f"{short}/s", abstract=abstract)
    nothing_succeeded(verdict)
    assert len(verdict.parts) == 8


def test_other_processes_are_out_of_reach(attacked: Attacked) -> None:
    """The target runs as the same user, as the run's own processes do."""
    own = int(attacked.rung == "bubblewrap")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as target:
        limits = psutil.Process(target.pid).rlimit(psutil.RLIMIT_NOFILE)
        verdict = attacked.attack("other_processes", pid=target.pid, own_namespace=own)
        assert target.poll() is None
        assert psutil.Process(target.pid).rlimit(psutil.RLIMIT_NOFILE) == limits
        target.kill()
    nothing_succeeded(verdict)
    assert len(verdict.parts) == 21


def test_no_secret_is_seen(attacked: Attacked) -> None:
    """Landlock cannot take the names of files away, only what is in them."""
    files = ["key", ".ssh/id", "runs/demo/recipe.yaml", "runs/demo/batches/000000.zarr.zip"]
    if attacked.rung == "bubblewrap":
        files += [".ssh", "runs/demo", "runs/demo/batches"]
    root = Path("~root").expanduser()
    elsewhere = [f"{root}/.bashrc", f"{root}/.ssh", "/etc/shadow", "/etc/hosts", "/proc/1/environ", "/var/log"]
    verdict = attacked.attack("secrets", key=KEY, files=[*(str(attacked.folder / file) for file in files), *elsewhere])
    nothing_succeeded(verdict)


@pytest.mark.parametrize("rung", EVERY_RUNG[:2])
def test_secrets_that_are_saved_anew_or_made_later_are_not_seen(rung: str, tmp_path: Path) -> None:
    """The worker lives on, and what is hidden is another file by then."""
    (tmp_path / ".env").write_text("secret")
    with project(rung, tmp_path) as attacked:
        paths = [tmp_path / name for name in (".env", "key", ".netrc", ".ssh/id", "runs/demo/recipe.yaml")]
        files = [str(path) for path in paths]
        nothing_succeeded(attacked.attack("secrets", key=KEY, files=files))
        workers = set(psutil.Process().children())
        (tmp_path / ".ssh").rename(tmp_path / "old")
        (tmp_path / ".ssh").mkdir()
        for path in paths:
            (tmp_path / "new").write_text("secret")
            (tmp_path / "new").replace(path)
        nothing_succeeded(attacked.attack("secrets", key=KEY, files=files))
        assert set(psutil.Process().children()) == workers


def test_the_run_directory_is_not_read_and_not_written(attacked: Attacked) -> None:
    before = tree(attacked.folder)
    nothing_succeeded(attacked.attack("run_directory", run=str(attacked.run)))
    assert tree(attacked.folder) == before


def tree(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """What can be changed of every file below."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
    return found


def test_rare_doors_into_the_kernel_are_shut(attacked: Attacked) -> None:
    nothing_succeeded(attacked.attack("keyring"))


def test_no_privilege_is_left(attacked: Attacked) -> None:
    """Root without capabilities is nobody in particular."""
    nothing_succeeded(attacked.attack("privileges"))


def test_forged_verdicts_cost_their_own_sample_at_most(attacked: Attacked) -> None:
    """F7: one extra message in the pipe shifted all later rewards of its worker."""
    attacked.verifiers.failures.clear()
    verdicts = attacked.attacks("honest", "verdicts", "honest", "honest", "verdicts", "honest", "honest")
    assert [verdict.reward for verdict in verdicts] == [0.0] * 7
    assert [verdict.failed for verdict in verdicts] == [None, "bad_result", None, None, "bad_result", None, None]
    assert attacked.verifiers.failures == {"bad_result": 2}


def test_messages_after_a_verdict_reach_no_later_sample(attacked: Attacked) -> None:
    verdicts = attacked.attacks("later_verdicts")
    for _ in range(10):
        time.sleep(0.05)
        verdicts += attacked.attacks("honest")
    assert [(verdict.reward, verdict.failed) for verdict in verdicts] == [(0.0, None)] * 11


def test_a_process_that_stays_behind_answers_no_later_sample(attacked: Attacked) -> None:
    (stolen,) = attacked.attacks("stolen_requests")
    time.sleep(1.0)
    later = attacked.attacks("honest", "honest", "honest")
    assert stolen.failed == (None if attacked.rung == "bubblewrap" else "raised")
    assert [(verdict.reward, verdict.failed) for verdict in later] == [(0.0, None)] * 3


@pytest.mark.parametrize(
    ("bomb", "reasons"),
    [
        ("fork_bomb", {"bubblewrap": {"processes", "raised", "memory"}, "landlock": {"raised"}}),
        ("thread_bomb", {"bubblewrap": {"processes", "raised"}, "landlock": {"processes", "raised"}}),
        ("memory_bomb", {"bubblewrap": {"raised", "memory"}, "landlock": {"raised", "memory"}}),
        ("shared_memory_bomb", {"bubblewrap": {"raised"}, "landlock": {"raised"}}),
        ("fill_the_disk", {"bubblewrap": {"raised", "files"}, "landlock": {"files"}}),
        pytest.param(
            "many_files", {"bubblewrap": {"files", "timeout"}, "landlock": {"files", "timeout"}}, marks=pytest.mark.slow
        ),
        ("dig_deep", {"bubblewrap": {None}, "landlock": {None, "files"}}),
        ("fill_beside_a_mount", {"bubblewrap": {"raised", "files"}, "landlock": {"raised"}}),
        ("fill_a_file", {"bubblewrap": {"raised"}, "landlock": {"raised", "files"}}),
    ],
)
def test_bombs_end_with_their_sample(attacked: Attacked, bomb: str, reasons: dict[str, set[str | None]]) -> None:
    before = len(psutil.Process().children(recursive=True))
    verdict = attacked.attack(bomb)
    assert verdict.failed in reasons["bubblewrap" if attacked.rung == "bubblewrap" else "landlock"]
    assert attacked.attack("honest") == Verdict(reward=0.0)
    assert len(psutil.Process().children(recursive=True)) <= before + 1


def test_the_worker_is_out_of_reach(attacked: Attacked) -> None:
    """It answers the next sample as before, and is the same process."""
    workers = set(psutil.Process().children())
    nothing_succeeded(attacked.attack("limits_of_the_worker"))
    assert attacked.attack("honest") == Verdict(reward=0.0)
    assert set(psutil.Process().children()) == workers


@pytest.mark.parametrize(
    "attacked", EVERY_RUNG, indirect=True
)  # bubblewrap every day: here alone a process stays behind
def test_a_program_without_parents_ends_with_its_sample(attacked: Attacked) -> None:
    mark = f"orphan of {os.getpid()}"
    verdict = attacked.attack("double_fork", mark=mark)
    assert verdict.failed == (None if attacked.rung == "bubblewrap" else "raised")
    assert attacked.attack("honest") == Verdict(reward=0.0)
    assert not [process for process in psutil.process_iter(["cmdline"]) if mark in " ".join(command_of(process))]


def command_of(process: psutil.Process) -> list[str]:
    command: list[str] | None = process.info["cmdline"]
    return command or []


def test_programs_may_be_started_where_they_can_all_be_ended(attacked: Attacked) -> None:
    verdict = attacked.attack("start_a_program")
    assert verdict.failed is None if attacked.rung == "bubblewrap" else verdict.failed == "raised"


def test_legitimate_code_works(attacked: Attacked) -> None:
    assert attacked.attack("what_is_left").parts == {"works": 1.0}


@pytest.mark.parametrize("rung", EVERY_RUNG[:2])
@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_nothing_is_left_of_a_pool(rung: str, ending: str, tmp_path: Path) -> None:
    """However the process that holds it ends, and whatever a sample is doing: no process, no file."""
    sandbox_of(rung)
    program = (
        "import asyncio, os, signal, sys\n"
        "from pipeline.rewards.pool import Verifiers\n"
        "from pipeline.rewards.worker_process import Sandbox\n"
        "sandbox = Sandbox(rung=sys.argv[1], landlock_abi=1)\n"
        "verifiers = Verifiers('verifier_examples:behave', workers=2, deadline_s=600.0, sandbox=sandbox)\n"
        "async def hang():\n"
        "    await asyncio.wait_for(verifiers.score('', 'hang', ''), 1.0)\n"
        "try:\n"
        "    asyncio.run(hang())\n"
        "except TimeoutError:\n"
        "    pass\n"
        "os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == 'killed' else verifiers.close()\n"
    )
    mark = f"pool-{rung}-{ending}-{os.getpid()}"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "LC_MARK": mark}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, rung, ending]
    done = subprocess.run(command, env=environment, timeout=200, check=False)
    assert done.returncode == (0 if ending == "closed" else -9)
    give_up = time.monotonic() + 30.0
    while left := [*marked(mark), *tmp_path.glob("evenkeel-*")]:
        assert time.monotonic() < give_up, left
        time.sleep(0.1)


def marked(mark: str) -> list[Any]:
    """Processes with this variable in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LC_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found
