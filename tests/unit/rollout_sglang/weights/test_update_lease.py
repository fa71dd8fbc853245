"""Numbers of weight updates: who waits for whom, what a later start of a role changes, what is remembered."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.checksums import write_sealed_json
from pipeline.data.epochs import claim
from pipeline.errors import DeadlineExceededError, SupersededError
from rollout_sglang.weights import update_lease
from rollout_sglang.weights.update_lease import KEPT, UpdateKind, Updates


def updates_of(run: Path, role: str | None = None, stale_s: float = 60.0) -> Updates:
    return Updates(run / "policy" / "updates", None if role is None else claim(run, role), stale_s)  # type: ignore[arg-type]


async def number_of(updates: Updates, kind: UpdateKind, patience_s: float = 1.0, given: int | None = None) -> int:
    async with updates.take(kind, patience_s) as update:
        if given is not None:
            update.given = given
        return update.number


def begin_and_vanish(updates: Updates, kind: UpdateKind) -> int:
    """As a process does that is killed in the middle of an update."""
    number = asyncio.run(number_of(updates, kind))
    (updates.folder / f"{number}.released").unlink()
    return number


def test_numbers_rise_and_the_version_given_last_survives_pruning(tmp_path: Path) -> None:
    updates = updates_of(tmp_path)
    numbers = [asyncio.run(number_of(updates, "publish", given=13))]
    numbers += [asyncio.run(number_of(updates, "resync_single")) for _ in range(3 * KEPT)]
    assert numbers == sorted(set(numbers))
    assert updates.given() == 13
    assert len(list(updates.folder.iterdir())) == 2 * KEPT


def test_an_update_under_way_is_waited_for_until_patience_ends(tmp_path: Path) -> None:
    async def both() -> None:
        async with updates_of(tmp_path, "learner").take("publish", 1.0):
            with pytest.raises(DeadlineExceededError, match=r"learner-000001 .* for more than 0\.2 s"):
                await number_of(updates_of(tmp_path, "collector"), "resync", 0.2)

    asyncio.run(both())


def test_the_next_start_of_the_role_is_not_waited_for(tmp_path: Path) -> None:
    dead = updates_of(tmp_path, "learner")
    number = begin_and_vanish(dead, "publish")
    assert dead.under_way() == number
    successor = updates_of(tmp_path, "learner")
    assert asyncio.run(number_of(successor, "publish", 0.2)) > number
    with pytest.raises(SupersededError):
        asyncio.run(number_of(dead, "publish"))


def test_one_that_is_superseded_after_it_took_a_number_gives_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen between the two: the successor's number, taken before it goes on, would be the lower one."""
    frozen = updates_of(tmp_path, "learner")
    create = update_lease.create_sealed

    def create_late(path: Path, text: str) -> None:
        claim(tmp_path, "learner")
        create(path, text)

    monkeypatch.setattr(update_lease, "create_sealed", create_late)
    with pytest.raises(SupersededError):
        asyncio.run(number_of(frozen, "publish"))


def test_a_record_that_does_not_change_is_not_waited_for(tmp_path: Path) -> None:
    number = begin_and_vanish(updates_of(tmp_path, "learner", stale_s=0.2), "publish")
    assert asyncio.run(number_of(updates_of(tmp_path, "collector"), "resync", 20.0)) > number


def test_one_that_lives_is_waited_for_however_long_it_takes(tmp_path: Path) -> None:
    async def both() -> None:
        async with updates_of(tmp_path, "learner", stale_s=1.2).take("publish", 1.0) as update:
            waiting = asyncio.create_task(number_of(updates_of(tmp_path, "collector"), "resync", 20.0))
            ends = time.monotonic() + 2.5
            while time.monotonic() < ends:
                await asyncio.sleep(0.05)
                assert not waiting.done()
        assert await waiting > update.number

    asyncio.run(both())


def test_a_heartbeat_that_cannot_be_written_neither_ends_nor_hides_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = updates_of(tmp_path, stale_s=0.2)
    failed = 0

    def fails_once_begun(path: Path, value: dict[str, Any]) -> None:
        nonlocal failed
        if path.suffix == ".json":
            failed += 1
            raise OSError(116, "Stale file handle")
        write_sealed_json(path, value)

    async def publish() -> None:
        async with updates.take("publish", 1.0) as update:
            monkeypatch.setattr(update_lease, "write_sealed_json", fails_once_begun)
            ends = time.monotonic() + 20
            while failed < 2:
                assert time.monotonic() < ends, "no second heartbeat was tried"
                await asyncio.sleep(0.01)
            update.given = 4

    asyncio.run(publish())
    assert (updates.under_way(), updates.given()) == (None, 4)
