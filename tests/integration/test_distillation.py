"""A whole run whose teacher is the student's own beginning: what a server scores is what the engine sampled by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.advantages.compute import mean_reverse_kl
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.store import BatchStore
from tests.support.engine_forks import forked_engines
from tests.support.rank_programs import forked_programs
from tests.support.runs import evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_student_leaves_a_teacher_that_it_was_and_a_replay_needs_none(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    recipe = make_recipe(
        tmp_path,
        model,
        "taught",
        run=dict(name="taught", steps=2),
        distillation=dict(path=str(model), reward_coefficient=1.0),
        objective=dict(name="cispo"),
    )
    with forked_engines():
        evenkeel_json("train", recipe)
    run = tmp_path / "runs" / "taught"
    first, second = (BatchStore(run / "batches").read(index, None) for index in (0, 1))
    assert first.teacher_logprobs is not None
    np.testing.assert_allclose(first.teacher_logprobs, first.rollout_logprobs, atol=2e-5)
    distances = [line["reverse_kl"] for line in read_metrics(run)]
    assert abs(distances[0]) < 1e-5
    assert second.teacher_logprobs is not None
    assert not np.allclose(second.teacher_logprobs, second.rollout_logprobs, atol=1e-3)
    # Log-ratios have both signs, so their mean may be small although each is not.
    assert distances[1] == pytest.approx(mean_reverse_kl(second), abs=1e-9)
    held_out = [event["reverse_kl"] for event in read_events(run, "evaluated")]
    assert abs(held_out[0]) < min(1e-5, abs(held_out[-1]))
    with forked_programs():
        replayed = evenkeel_json("train", "--replay", run)
    assert replayed["bit_identical"], "the batches hold what the teacher said"
