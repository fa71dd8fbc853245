"""Whole runs of a mixture that replays the engine's experts, on the real engine and the real learner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.convert.new_model import new_model
from pipeline.data.batch import Batch
from pipeline.data.event_log import read_metrics
from pipeline.data.store import BatchStore
from tests.support.engine_forks import forked_engines
from tests.support.rank_programs import forked_programs
from tests.support.runs import evenkeel_json, make_recipe

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(600)]

ROLLOUT = dict(prompts_per_batch=4, group_size=4, precision="bf16", replay_experts=True)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replayed")
    new_model(folder / "model", experts=8, experts_per_token=2, expert_ffn=64)
    return folder


def finished(workshop: Path, name: str, steps: int, **sections: dict[str, Any]) -> Path:
    recipe = make_recipe(workshop, workshop / "model", name, run=dict(name=name, steps=steps), **sections)
    with forked_engines():
        result = evenkeel_json("train", recipe)
    assert result["steps"] == steps
    run = workshop / "runs" / name
    assert evenkeel_json("verify", "history", run)["ok"]
    return run


def batches(run: Path) -> Iterator[Batch]:
    store = BatchStore(run / "batches")
    for index in store.committed():
        yield store.read(index, None)


def test_a_sync_run_knows_every_route_and_replays_it(workshop: Path) -> None:
    """bf16 engine, float32 learner: routers disagree here and there, and replay takes that away."""
    run = finished(
        workshop,
        "sync",
        3,
        rollout=dict(max_new_tokens=12, context_tokens=64, **ROLLOUT),
        learner=dict(micro_batch_tokens=256, recompute="selective", optimizer=dict(lr=1e-3, warmup_steps=0)),
    )
    for batch in batches(run):
        assert batch.experts is not None
        last = np.zeros(len(batch.tokens), np.bool_)
        last[batch.sample_offsets[1:] - 1] = True
        np.testing.assert_array_equal(batch.experts.known, ~last)
        assert batch.experts.ids.shape[1:] == (2, 2)
    lines = read_metrics(run)
    assert [line["experts_known_share"] for line in lines] == [1.0] * 3
    assert all(line["ess_with_replay"] > 0.99 for line in lines)
    differ = [line for line in lines if line["expert_rows_differ_share"] > 0]
    assert differ, "a bf16 engine and a float32 learner agree on every route of three batches"
    with forked_programs():
        assert evenkeel_json("train", "--replay", run)["bit_identical"]


def test_an_async_run_with_updates_in_flight_falls_back_before_the_last_version(workshop: Path) -> None:
    """Answers of a hundred tokens and more, retracted for each new version; experts over two ranks."""
    run = finished(
        workshop,
        "async",
        6,
        schedule=dict(kind="async", lag=2),
        rollout=dict(max_new_tokens=160, context_tokens=256, **ROLLOUT),
        learner=dict(
            data_parallel=2, expert_parallel=2, micro_batch_tokens=1024, optimizer=dict(lr=1e-3, warmup_steps=0)
        ),
    )
    mixed = 0
    for batch in batches(run):
        assert batch.experts is not None
        for sample in range(batch.num_samples):
            start, end = batch.sample_offsets[sample], batch.sample_offsets[sample + 1]
            known = batch.experts.known[start:end]
            versions = batch.policy_version[slice(*batch.response_offsets[sample : sample + 2])]
            changes = np.flatnonzero(np.diff(versions))
            if len(changes):
                mixed += 1
                assert not known[: batch.prompt_lengths[sample] + changes[-1]].any()
            # A publish that comes before a request's second token retracts it too, and no version tells.
            assert (
                not known.any() or known[batch.prompt_lengths[sample] + changes[-1] if len(changes) else 0 : -1].all()
            )
    assert mixed > 0, "no answer met a new version on its way"
    shares = [line["experts_known_share"] for line in read_metrics(run)]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert min(shares) < 1.0 < sum(shares)
