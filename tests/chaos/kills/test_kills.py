"""A part of the kill matrix for everyday: every process of one run is killed once, at a point that matters to it.

`make chaos PARTS=kills` runs the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from pipeline.data.batch import Batch, TokenKind
from pipeline.data.store import BatchStore
from tests.chaos.kills.episodes import faults
from tests.chaos.kills.plan import (
    CHANNELS,
    POINTS,
    PROCESSES,
    SCHEDULES,
    deltas,
    episodes,
    in_short,
    make_model_of,
    matrix,
    shares,
)
from tests.chaos.kills.zygote import ask
from tests.support.runs import make_model


@pytest.mark.slow
@pytest.mark.loop
@pytest.mark.timeout(900)
def test_every_process_may_die(tmp_path: Path) -> None:
    plan = in_short()
    assert {victim for fault in plan.faults for victim in fault.victims} == set(PROCESSES)
    found = ask(plan, tmp_path / "case", make_model(tmp_path / "model"))
    assert found["verdict"] == "ok", "\n".join([found["verdict"], *found["details"].get("log", [])])
    assert found["details"]["kills"] == len(PROCESSES)


@pytest.mark.slow
@pytest.mark.loop
@pytest.mark.timeout(1200)
def test_a_delta_may_be_cut_short_anywhere(tmp_path: Path) -> None:
    """Ten kills around deltas and replicas; the verdict replays the run, bit for bit."""
    found = ask(deltas(), tmp_path / "case", make_model(tmp_path / "model"))
    assert found["verdict"] == "ok", "\n".join([found["verdict"], *found["details"].get("log", [])])
    assert found["details"]["kills"] == 10


@pytest.mark.slow
@pytest.mark.loop
@pytest.mark.timeout(600)
def test_ranks_that_hold_shares_may_die(tmp_path: Path) -> None:
    """Two data-parallel ranks, by broadcast to engines that serve meanwhile; the verdict replays the run."""
    plan = shares()
    found = ask(plan, tmp_path / "case", make_model(tmp_path / "model"))
    assert found["verdict"] == "ok", "\n".join([found["verdict"], *found["details"].get("log", [])])
    assert found["details"]["kills"] == len(plan.faults)


@pytest.mark.slow
@pytest.mark.loop
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [19, 40])
def test_episodes_are_whole_whatever_dies(tmp_path: Path, number: int) -> None:
    """A collector with the gateway of agents by command, and the host of environments."""
    plan = next(plan for plan in episodes() if plan.id.startswith(f"episodes-{number}-"))
    model = make_model_of(plan, tmp_path)
    found = ask(plan, tmp_path / "case", model)
    assert found["verdict"] == "ok", "\n".join([found["verdict"], *found["details"].get("log", [])])
    assert found["details"]["kills"] == len(plan.faults)
    assert found["details"]["turns"] == 3 * found["details"]["episodes"]
    run, read = tmp_path / "case" / "runs" / "run", BatchStore.read

    def faults_if(change: Callable[[Batch], Batch], read_as: Callable[[int], int]) -> list[str]:
        with patch.object(BatchStore, "read", lambda store, index, _: change(read(store, read_as(index), None))):
            return [*faults(run, model, plan.overrides["episode"], {})]

    assert not faults_if(lambda batch: batch, lambda index: index)
    assert any("trained twice" in one for one in faults_if(lambda batch: batch, lambda _: 0))
    assert any("turn 1 said" in one for one in faults_if(_with_another_answer, lambda index: index))


def _with_another_answer(batch: Batch) -> Batch:
    """The batch, as if the environment had counted its first turn otherwise."""
    assert batch.token_kind is not None
    first = int(np.flatnonzero(batch.token_kind == TokenKind.USER)[0])
    tokens = batch.tokens.copy()
    tokens[batch.prompt_lengths[0] + first] += 1
    return replace(batch, tokens=tokens)


def test_the_matrix_is_covered() -> None:
    """Every process dies at every point, and every point is met under every schedule, and with every channel."""
    seen: Counter[tuple[str, str]] = Counter()
    for plan in matrix():
        for fault in plan.faults:
            point = fault.point.removeprefix("before:").removeprefix("after:")
            seen[fault.victims[0], point] += 1
            seen[point, plan.schedule] += 1
            seen[point, plan.channel] += 1
    wanted = {(process, point) for process in PROCESSES for point in POINTS}
    wanted |= {(point, way) for point in POINTS for way in (*SCHEDULES, *CHANNELS)}
    assert wanted <= seen.keys()
    assert all(seen[process, point] == 1 for process in PROCESSES for point in POINTS)
