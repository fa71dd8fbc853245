"""A whole run with top_p .8: two engines behind a router, FP8 rollouts one version behind, real learner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.data.event_log import read_metrics
from pipeline.data.store import BatchStore
from tests.support.engine_forks import forked_engines
from tests.support.rank_programs import forked_programs
from tests.support.runs import evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept-sets")
    recipe = make_recipe(
        folder,
        make_model(folder / "model"),
        "cut",
        rollout=dict(
            prompts_per_batch=8,
            group_size=8,
            max_new_tokens=24,
            context_tokens=64,
            engines=2,
            precision="fp8_block",
            top_p=0.8,
            temperature=1.2,
        ),
        schedule=dict(kind="async", lag=1),
        learner=dict(data_parallel=2, micro_batch_tokens=512, optimizer=dict(lr=1e-3, warmup_steps=0)),
    )
    with forked_engines(), forked_programs():
        evenkeel_json("train", recipe)
    return folder / "runs" / "cut"


def test_every_batch_holds_what_its_engines_kept(run: Path) -> None:
    store, engines = BatchStore(run / "batches"), set()
    assert store.committed() == [0, 1, 2, 3]
    for index in store.committed():
        batch = store.read(index, None)
        assert batch.contract.kept_set
        assert batch.kept is not None
        assert 1 < batch.kept.counts.mean() < 256
        engines |= set(batch.engine.tolist())
    assert engines <= {0, 1}  # requests went straight to them: the router does not say who answered


def test_learner_and_engine_agree_on_what_was_cut(run: Path) -> None:
    """Before the first step, both have the same weights but for FP8."""
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    print([{name: round(line[name], 5) for name in ("ess", "ratio_mean", "entropy", "k3_kl")} for line in lines])
    assert lines[0]["ess"] > 0.98
    assert lines[0]["ratio_mean"] == pytest.approx(1.0, abs=0.01)
    assert all(np.isfinite(line["loss"]) and line["ess"] > 0.8 for line in lines)
    # Of the distribution that was sampled from: log-probabilities are its samples.
    for index, line in enumerate(lines[:1]):
        batch = BatchStore(run / "batches").read(index, None)
        assert line["entropy"] == pytest.approx(-batch.rollout_logprobs.mean(), rel=0.05)
