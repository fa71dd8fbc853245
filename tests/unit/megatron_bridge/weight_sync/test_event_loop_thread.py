"""The loop beside the learner: its end leaves neither a thread nor a connection nor a task."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from megatron_bridge.weight_sync import event_loop_thread
from megatron_bridge.weight_sync.event_loop_thread import EventLoopThread
from pipeline.errors import DeadlineExceededError, EngineUnavailableError
from rollout_sglang.transport import Transport
from tests.doubles.sglang_double import EngineDouble


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_it_runs_what_it_is_given_and_ends() -> None:
    loop = EventLoopThread("test-loop")
    assert loop.run(double(3)) == 6
    assert loop.start(double(4)).result(5) == 8
    loop.close()
    loop.close()
    assert "test-loop" not in [thread.name for thread in threading.enumerate()]


def test_a_call_that_hangs_is_cancelled_with_its_connection() -> None:
    """A connection that stayed open would be reported by the garbage collector, as an error here."""
    with EngineDouble() as engine:
        engine.generate_faults = ["hang"]
        loop, transport = EventLoopThread("test-loop"), Transport(engine.url, None)
        call = loop.start(transport.call("POST", "/generate", deadline_s=60, json={}))
        while "POST /generate" not in engine.calls:
            time.sleep(0.01)
        loop.close()
        assert call.cancelled()
        del loop, call, transport
        gc.collect()


def test_a_coroutine_that_blocks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop_thread, "CLOSE_DEADLINE_S", 0.1)
    loop, released = EventLoopThread("test-loop"), threading.Event()

    async def block() -> None:
        released.wait(30)

    loop.start(block())
    with pytest.raises(DeadlineExceededError, match=r"test-loop thread did not end in 0\.1 s"):
        loop.close()
    released.set()
    monkeypatch.undo()
    loop.close()


def test_an_error_reaches_the_caller() -> None:
    loop = EventLoopThread("test-loop")

    async def fail() -> None:
        raise EngineUnavailableError("gone")

    with pytest.raises(EngineUnavailableError, match="gone"):
        loop.run(fail())
    loop.close()
