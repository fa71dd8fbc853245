"""Work beside the event loop: one thread for all of it, which is asked for Python's lock often."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading

import pytest

from pipeline.beside_loop import SWITCH_S, beside_loop, spare_collections


def test_all_work_is_done_by_one_thread_that_is_asked_for_the_lock_often() -> None:
    async def many() -> list[int]:
        return await asyncio.gather(*(beside_loop(threading.get_ident) for _ in range(20)))

    first, second = asyncio.run(many()), asyncio.run(many())
    assert len({*first, *second}) == 1, "also of loops that come one after the other"
    assert threading.get_ident() not in first
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert SWITCH_S < 0.005


def test_what_the_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(beside_loop(divmod, 1, 0))


def test_what_is_there_is_left_out_of_later_collections() -> None:
    there = [[] for _ in range(1000)]
    spare_collections()
    try:
        looked_at = {id(each) for each in gc.get_objects()}
        new = [[] for _ in range(1000)]
        assert not looked_at & {id(each) for each in there}
        assert {id(each) for each in gc.get_objects()} >= {id(each) for each in new}
    finally:
        gc.unfreeze()
