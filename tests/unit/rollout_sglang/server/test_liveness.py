"""A server is hung when one of its processes is stopped, or when it answers nothing; not when it is busy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from rollout_sglang.server.liveness import SILENCE_S, SILENT_GRACE_S, STOPPED_GRACE_S, STOPPED_S, Liveness

SERVER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
"""With a child, as SGLang's HTTP process has its scheduler."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", SERVER], start_new_session=True)
    top = psutil.Process(process.pid)
    ends = time.monotonic() + 60
    while not top.children():
        assert time.monotonic() < ends
        time.sleep(0.02)
    yield top
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def is_stopped(process: psutil.Process, stopped: bool) -> None:
    process.send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)
    ends = time.monotonic() + 60
    while (process.status() == psutil.STATUS_STOPPED) != stopped:
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.parametrize("which", ["http", "scheduler"])
def test_a_stopped_process_is_found_and_forgotten_when_it_goes_on(server: psutil.Process, which: str) -> None:
    clock = Clock()
    liveness = Liveness(server.pid, lambda: True, clock=clock)
    victim = server if which == "http" else server.children()[0]
    assert liveness.look() is None
    is_stopped(victim, True)
    assert liveness.look() is None, "it may have been stopped in passing"
    clock.now += STOPPED_S
    reason = liveness.look()
    assert reason is not None
    assert f"its process {victim.pid}" in reason
    clock.now += 20
    assert liveness.look() is not None
    assert liveness.hung_s == 20 + STOPPED_S
    assert not liveness.is_lost
    clock.now += 10
    assert liveness.look() is not None
    assert liveness.is_lost
    is_stopped(victim, False)
    assert liveness.look() is None
    assert liveness.hung_s == 0
    is_stopped(victim, True)
    assert liveness.look() is None, "a new stop begins anew"


def test_a_server_that_answers_nothing_is_hung_after_a_while(server: psutil.Process) -> None:
    clock, answers = Clock(), [True]
    liveness = Liveness(server.pid, lambda: answers[0], clock=clock)
    assert liveness.look() is None
    answers[0] = False
    clock.now += SILENCE_S
    assert liveness.look() is None, "busy"
    clock.now += 1
    assert liveness.look() == f"it has answered nothing for {SILENCE_S + 1:.0f} s"
    clock.now += STOPPED_GRACE_S
    assert liveness.look() is not None
    assert not liveness.is_lost, "all its processes run"
    clock.now += SILENT_GRACE_S
    assert liveness.is_lost
    answers[0] = True
    assert liveness.look() is None


def test_a_server_without_http_and_one_that_has_ended_do_not_hang(server: psutil.Process) -> None:
    clock = Clock()
    liveness = Liveness(server.pid, None, clock=clock)
    clock.now += 1000
    assert liveness.look() is None
    os.killpg(server.pid, signal.SIGKILL)
    assert liveness.look() is None
