"""Verifiers: whatever they do costs their own sample, and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.errors import RecipeError
from pipeline.rewards import worker_process
from pipeline.rewards.children import RunIsGoneError
from pipeline.rewards.messages import Judgment, failure
from pipeline.rewards.pool import Verdict, Verifiers
from pipeline.rewards.verifiers import EXACT_MATCH, TRUSTED
from pipeline.rewards.worker import judged
from pipeline.rewards.worker_process import Sandbox
from tests.support.processes import unkillable
from tests.support.sandboxes import EVERY_RUNG, sandbox_of

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this process and, through the environment, by spawned workers."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(params=[None, "bubblewrap", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox | None:
    return None if request.param is None else sandbox_of(request.param)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, Verifiers]]:
    """One pool a rung for all tests of this file."""
    made: dict[str, Verifiers] = {}
    yield made
    for verifiers in made.values():
        verifiers.close()


@pytest.fixture(params=["none", "bubblewrap", "landlock", "built in"])
def behave(request: pytest.FixtureRequest, pools: dict[str, Verifiers], monkeypatch: pytest.MonkeyPatch) -> Verifiers:
    name = request.param
    if name not in pools:
        if name == "built in":
            monkeypatch.setattr(worker_process, "TRUSTED", {"verifier_examples:behave"})
        sandbox = sandbox_of(name) if name in EVERY_RUNG else None
        pools[name] = Verifiers("verifier_examples:behave", workers=2, deadline_s=2.0, sandbox=sandbox)
    pools[name].failures.clear()
    return pools[name]


def score(verifiers: Verifiers, *responses: str) -> list[Verdict]:
    async def all_of_them() -> list[Verdict]:
        return await asyncio.gather(*(verifiers.score("prompt", response, "answer") for response in responses))

    return asyncio.run(asyncio.wait_for(all_of_them(), timeout=60))


def test_numbers_booleans_and_parts(behave: Verifiers) -> None:
    plain, true, parts = score(behave, "fine", "true", "parts")
    assert plain == Verdict(reward=1.0)
    assert true == Verdict(reward=1.0)
    assert parts == Verdict(reward=0.5, parts={"format": 1.0, "answer": 0.0})
    assert not behave.failures


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("hang", "timeout"),
        ("hang in C", "timeout"),
        ("hang, deaf to SIGTERM", "timeout"),
        ("exit", "crashed"),
        ("exit 0", "crashed"),
        ("segfault", "crashed"),
        ("sys.exit", "raised"),
        ("raise", "raised"),
        ("unpicklable", "raised"),
        ("nan", "non_finite"),
        ("nan part", "non_finite"),
        ("none", "bad_result"),
        ("inf in float32", "bad_result"),
        ("inf in float32, a part", "bad_result"),
        ("a part for a terminal", "bad_result"),
    ],
)
def test_a_failing_verifier_costs_its_sample_only(behave: Verifiers, response: str, reason: str) -> None:
    before, failed, after = score(behave, "fine", response, "fine")
    assert failed == Verdict(reward=0.0, parts={"verifier_failed": 1.0}, failed=reason)
    assert before.reward == after.reward == 1.0
    assert behave.failures == {reason: 1}
    assert score(behave, "fine")[0].reward == 1.0


def test_a_hanging_verifier_is_killed_at_its_deadline(behave: Verifiers) -> None:
    score(behave, "fine")
    started = time.monotonic()
    score(behave, "hang")
    assert 2.0 <= time.monotonic() - started < 30.0


def test_workers_inherit_nothing_of_the_run(behave: Verifiers) -> None:
    (verdict,) = score(behave, "modules")
    assert verdict.parts == {"torch": 0.0, "sglang": 0.0, "httpx": 0.0}


@pytest.mark.parametrize("whose", ["the worker", "the process of the reward function"])
def test_processes_that_die_between_samples_are_replaced(behave: Verifiers, whose: str) -> None:
    score(behave, *["fine"] * 20)
    # Other children of this process serve other tests.
    workers = [psutil.Process(worker._process.pid) for worker in behave._workers if worker._process is not None]
    assert len(workers) == 2
    for process in workers if whose == "the worker" else [leaf for worker in workers for leaf in leaves(worker)]:
        process.kill()
    time.sleep(0.5)
    assert [v.reward for v in score(behave, "fine", "fine", "fine")] == [1.0, 1.0, 1.0]
    assert not behave.failures


@pytest.mark.parametrize("broken", ["socketpair", "start", "post"])
def test_what_a_worker_s_thread_cannot_do_costs_a_sample_and_no_thread(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a thread that has ended waits for ever."""
    with Verifiers("verifier_examples:behave", workers=1, deadline_s=2.0, sandbox=None) as verifiers:
        (process,) = verifiers._workers
        process._process.kill()
        process._process.wait()

        make = socket.socketpair

        def refuse(*_: object) -> object:
            if threading.current_thread() is threading.main_thread():  # the event loop of this test
                return make()
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(*((socket, broken) if broken == "socketpair" else (process, broken)), refuse)
            (verdict,) = score(verifiers, "fine")
        assert verdict.failed == "crashed"
        assert score(verifiers, "fine", "fine") == [Verdict(reward=1.0)] * 2


def test_a_worker_that_cannot_be_started_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(worker_process.WorkerProcess, "start", refuse)
    with pytest.raises(RecipeError, match="RuntimeError: no"):
        Verifiers("verifier_examples:behave", workers=1, deadline_s=2.0, sandbox=None)


def leaves(process: psutil.Process) -> list[psutil.Process]:
    """The processes below it that have started no other one."""
    below = process.children(recursive=True)
    return [child for child in below if not child.children()]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("no_such_package:function", "No module named 'no_such_package'"),
        ("verifier_examples:no_such_function", "no attribute 'no_such_function'"),
        ("verifier_examples:not_a_function", "is a int, not a function"),
        ("verifier_examples", "is not package.module:function"),
    ],
)
def test_a_reward_that_cannot_be_imported_is_refused_at_the_start(
    reward: str, message: str, sandbox: Sandbox | None
) -> None:
    with pytest.raises(RecipeError, match=message):
        Verifiers(reward, workers=1, deadline_s=1.0, sandbox=sandbox)


@pytest.mark.parametrize("built_in", [False, True])
def test_close_kills_what_hangs(built_in: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if built_in:
        monkeypatch.setattr(worker_process, "TRUSTED", {"verifier_examples:behave"})
    verifiers = Verifiers("verifier_examples:behave", workers=1, deadline_s=600.0, sandbox=None)
    (verdict,) = score(verifiers, "pid")

    async def hang() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(verifiers.score("", "hang, deaf to SIGTERM", ""), timeout=0.5)

    asyncio.run(hang())
    verifiers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(verdict.reward), 0)


@pytest.mark.parametrize("last", ["fine", "hang"])
@pytest.mark.parametrize("built_in", ["", "verifier_examples:behave"])
def test_workers_do_not_outlive_a_killed_parent(last: str, built_in: str) -> None:
    program = (
        "import asyncio, os, signal, sys, threading\n"
        "from pipeline.rewards import worker_process\n"
        "from pipeline.rewards.pool import Verifiers\n"
        "worker_process.TRUSTED = {sys.argv[2]}\n"
        "if __name__ == '__main__':\n"
        "    verifiers = Verifiers('verifier_examples:behave', workers=1, deadline_s=60.0, sandbox=None)\n"
        "    print(int(asyncio.run(verifiers.score('', 'pid', '')).reward), flush=True)\n"
        "    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGKILL]).start()\n"
        "    asyncio.run(verifiers.score('', sys.argv[1], ''))\n"
    )
    command = [sys.executable, "-c", program, last, built_in]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    worker, give_up = int(done.stdout), time.monotonic() + 20.0
    while Path(f"/proc/{worker}/status").exists() and "Z (zombie)" not in Path(f"/proc/{worker}/status").read_text(
        encoding="utf-8"
    ):
        assert time.monotonic() < give_up, f"worker {worker} outlived its parent"
        time.sleep(0.1)


def test_any_text_reaches_the_verifier(sandbox: Sandbox | None) -> None:
    with Verifiers("verifier_examples:echo", workers=1, deadline_s=60.0, sandbox=sandbox) as verifiers:
        for text in ("", "\x00\n\r", "é漢🙂", "\udcff", "long" * 500_000):
            verdict = asyncio.run(verifiers.score(text, text, text))
            assert (verdict.reward, verdict.parts) == (1.0, {"characters": float(len(text))})


class Stumbling:
    """A judge that a sample makes raise."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def judge(self, texts: bytes) -> Judgment:
        raise self._error


def test_a_sample_over_which_a_worker_stumbles_is_a_failed_one() -> None:
    found = judged(Stumbling(OverflowError("too large")), b"")  # type: ignore[arg-type]
    assert found == failure("raised", "OverflowError: too large")
    for error in (RunIsGoneError(), OSError(11, "no process"), MemoryError()):  # a fresh worker may do better
        with pytest.raises(type(error)):
            judged(Stumbling(error), b"")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(TRUSTED))
def test_a_built_in_reward_needs_no_process_beside_its_worker(name: str) -> None:
    """It runs no code of others: another process would double what a sample costs."""
    before = set(psutil.Process().children())
    with Verifiers(name, workers=1, deadline_s=60.0, sandbox=Sandbox(rung="landlock")) as verifiers:
        assert [asyncio.run(verifiers.score("", text, "7")).reward for text in ("7", "8")] == [1.0, 0.0]
        (worker,) = set(psutil.Process().children()) - before
        assert worker.children() == []


def test_nobody_waits_for_ever_for_a_worker_that_cannot_be_killed(capsys: pytest.CaptureFixture[str]) -> None:
    worker = worker_process.WorkerProcess(EXACT_MATCH, deadline_s=60.0, memory_mib=512, sandbox=None)
    assert worker.start() is None
    with unkillable(worker._process):
        worker.end()
    worker.release()
    assert "was killed and has not ended" in capsys.readouterr().err


def test_a_built_in_reward_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVENKEEL_API_KEY", "EVENKEEL_TEACHER_API_KEY"):
        monkeypatch.setenv(name, "secret")
        monkeypatch.setenv(f"{name}_FILE", "/secret")
    monkeypatch.setattr(worker_process, "TRUSTED", {"verifier_examples:variables"})
    with Verifiers("verifier_examples:variables", workers=1, deadline_s=60.0, sandbox=None) as verifiers:
        (verdict,) = score(verifiers, "")
    assert "PATH" in verdict.parts
    assert {name for name in verdict.parts if "API_KEY" in name} == set()


def test_a_built_in_reward_without_memory_gets_a_fresh_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one sample that used it up would spoil all later ones."""
    monkeypatch.setattr(worker_process, "TRUSTED", {"verifier_examples:hoard"})
    with Verifiers("verifier_examples:hoard", 1, 60.0, sandbox=None, memory_mib=300) as verifiers:
        verdicts = score(verifiers, "100", "100", "100", "100", "100", "100", "400", "100")
    assert [verdict.failed for verdict in verdicts] == [None] * 6 + ["memory", None]


def test_large_samples_behind_one_that_hangs_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that scores does not read: what is posted ahead must fit into its socket, or the run would wait."""
    monkeypatch.setattr(worker_process, "TRUSTED", {"verifier_examples:behave"})
    with Verifiers("verifier_examples:behave", workers=1, deadline_s=2.0, sandbox=None) as verifiers:
        verdicts = score(verifiers, "fine", "fine", "hang", *["long" * 500_000] * 3)
    assert [verdict.failed for verdict in verdicts] == [None, None, "timeout", None, None, None]


def test_a_function_that_names_metadata_gets_what_the_data_says_beside_prompt_and_answer() -> None:
    with Verifiers("reward_examples:of_metadata", workers=1, deadline_s=30.0, sandbox=None) as verifiers:
        easy, hard = asyncio.run(two_levels(verifiers))
    assert (easy.reward, easy.failed, hard.reward) == (1.0, None, 0.0)


async def two_levels(verifiers: Verifiers) -> list[Verdict]:
    return [await verifiers.score("", "easy", "", dict(levels=[level, None])) for level in ("easy", "hard")]
