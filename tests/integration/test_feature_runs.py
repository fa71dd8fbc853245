"""Whole runs, each of a feature that decides what is trained on: formats, teachers, cuts, experts, caches, ScaleRL.

The real engines and the real learner; what every schedule and channel has in common is in test_loop.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch.convert.new_model import new_model
from pipeline.advantages.compute import mean_reverse_kl
from pipeline.data.batch import Batch
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.store import BatchStore
from tests.support.engine_forks import forked_engines
from tests.support.rank_programs import forked_programs
from tests.support.runs import ROOT, evenkeel_json, make_model, make_prompts, trained

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(600)]

REPLAYED = dict(prompts_per_batch=4, group_size=4, precision="bf16", replay_experts=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("features") / "model")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    new_model(folder, experts=8, experts_per_token=2, expert_ffn=64)
    return folder


def batches(run: Path) -> list[Batch]:
    store = BatchStore(run / "batches")
    return [store.read(index, None) for index in store.committed()]


def test_fp4_rollouts_are_known_as_the_cause_of_their_mismatch(model: Path, tmp_path: Path) -> None:
    """The engine emulates FP4."""
    run = trained(tmp_path, model, "fp4", run=dict(steps=3, seed=1), rollout=dict(precision="emulated_fp4"))
    for step in read_metrics(run):
        assert step["log_ratio_abs_mean"] > 1e-2, "FP4 without a gap is not FP4"
        assert step["probe_quantization_nats"] > 1e-2
        assert step["probe_kernels_nats"] < 1e-2 * step["probe_quantization_nats"]
        assert step["grad_norm"] > 0


def test_with_fp8_on_both_sides_what_is_left_of_the_mismatch_is_kernels(model: Path, tmp_path: Path) -> None:
    plain, unified = (
        read_metrics(
            trained(
                tmp_path,
                model,
                name,
                run=dict(steps=3, seed=1),
                rollout=dict(precision="fp8_block"),
                learner=dict(tensor_parallel=2, fp8_emulation=name == "unified"),
            )
        )
        for name in ("plain", "unified")
    )
    for before, after in zip(plain, unified, strict=True):
        assert before["log_ratio_abs_mean"] > 1e-3, "without a gap there is nothing to close"
        assert after["log_ratio_abs_mean"] < 0.1 * before["log_ratio_abs_mean"]
        assert after["k3_kl"] < 0.05 * before["k3_kl"]
        assert after["probe_gap_nats"] < 0.1 * before["probe_gap_nats"]
        assert after["grad_norm"] > 0


def test_the_student_leaves_a_teacher_that_it_was_and_a_replay_needs_none(model: Path, tmp_path: Path) -> None:
    """What a server scores is what the engine sampled by."""
    run = trained(
        tmp_path,
        model,
        "taught",
        run=dict(steps=2),
        distillation=dict(path=str(model), reward_coefficient=1.0),
        objective=dict(name="cispo"),
    )
    first, second = batches(run)
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
        assert evenkeel_json("train", "--replay", run)["bit_identical"], "the batches hold what the teacher said"


def test_learner_and_engines_agree_on_what_top_p_has_cut(model: Path, tmp_path: Path) -> None:
    """Two engines behind a router, FP8 rollouts one version behind. Before the first step both sides have the same
    weights but for FP8."""
    run = trained(
        tmp_path,
        model,
        "cut",
        rollout=dict(
            prompts_per_batch=8,
            group_size=8,
            max_new_tokens=24,
            engines=2,
            precision="fp8_block",
            top_p=0.8,
            temperature=1.2,
        ),
        schedule=dict(kind="async", lag=1),
        learner=dict(data_parallel=2, micro_batch_tokens=512),
    )
    found = batches(run)
    for batch in found:
        assert batch.contract.kept_set
        assert batch.kept is not None
        assert 1 < batch.kept.counts.mean() < 256
        assert set(batch.engine.tolist()) <= {0, 1}  # requests went straight to them
    lines = read_metrics(run)
    assert lines[0]["ess"] > 0.98
    assert lines[0]["ratio_mean"] == pytest.approx(1.0, abs=0.01)
    assert all(np.isfinite(line["loss"]) and line["ess"] > 0.8 for line in lines)
    # Of the distribution that was sampled from: log-probabilities are its samples.
    assert lines[0]["entropy"] == pytest.approx(-found[0].rollout_logprobs.mean(), rel=0.05)


def test_a_sync_run_of_a_mixture_knows_every_route_and_replays_it(mixture: Path, tmp_path: Path) -> None:
    """bf16 engine, float32 learner: routers disagree here and there, and replay takes that away."""
    run = trained(
        tmp_path,
        mixture,
        "sync",
        run=dict(steps=3),
        rollout=REPLAYED,
        learner=dict(micro_batch_tokens=256, recompute="selective"),
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
    assert any(line["expert_rows_differ_share"] > 0 for line in lines), "the routers agree on every route"
    with forked_programs():
        assert evenkeel_json("train", "--replay", run)["bit_identical"]


def test_routes_of_an_async_run_are_unknown_before_the_last_version(mixture: Path, tmp_path: Path) -> None:
    """Answers of a hundred tokens and more, retracted for each new version; experts over two ranks."""
    run = trained(
        tmp_path,
        mixture,
        "async",
        run=dict(steps=6),
        schedule=dict(kind="async", lag=2),
        rollout=REPLAYED | dict(max_new_tokens=160, context_tokens=256),
        learner=dict(data_parallel=2, expert_parallel=2, micro_batch_tokens=1024),
    )
    mixed = 0
    for batch in batches(run):
        assert batch.experts is not None
        for sample in range(batch.num_samples):
            known = batch.experts.known[slice(*batch.sample_offsets[sample : sample + 2])]
            versions = batch.policy_version[slice(*batch.response_offsets[sample : sample + 2])]
            changes = np.flatnonzero(np.diff(versions))
            first = batch.prompt_lengths[sample] + changes[-1] if len(changes) else 0
            mixed += len(changes) > 0
            assert not known[:first].any()
            # A publish that comes before a request's second token retracts it too, and no version tells.
            assert not known.any() or known[first:-1].all()
    assert mixed > 0, "no answer met a new version on its way"
    shares = [line["experts_known_share"] for line in read_metrics(run)]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert min(shares) < 1.0 < sum(shares)


@pytest.mark.parametrize("channel", ["disk", pytest.param("broadcast", marks=pytest.mark.repeated)])
def test_answers_keep_their_cache_over_an_update(model: Path, tmp_path: Path, channel: str) -> None:
    run = trained(
        tmp_path,
        model,
        "kept",
        run=dict(steps=6),
        rollout=dict(max_new_tokens=190, context_tokens=256, concurrent_prompts=12),
        schedule=dict(kind="async", lag=2),
        weights=dict(channel=channel, kv_cache="keep"),
    )
    versions = [one for batch in batches(run) for one in np.split(batch.policy_version, batch.response_offsets)]
    assert max(len(np.unique(one)) for one in versions) > 1, "no answer went on over an update"
    (log,) = (run / "logs").glob("engine-0-*.log")
    assert "Cache flushed" not in log.read_text(errors="replace")


def test_scalerl_runs(model: Path, tmp_path: Path) -> None:
    """Everything of the paper at once: CISPO, FP32 head, FP8 rollouts, lag 8, interruptions, groups left out."""
    sets = {
        "run.root": tmp_path / "runs",
        "run.steps": 4,
        "model.path": model,
        "rollout.prompts_per_batch": 4,
        "task.name": "data",  # with a reward that a random model earns now and then
        "task.path": make_prompts(tmp_path / "prompts.jsonl"),
        "task.reward": "tests.support.rewards:digit_share",
        "evaluation.prompts": 2,
        "evaluation.samples": 2,
    }
    overrides = (part for key, value in sets.items() for part in ("--set", f"{key}={value}"))
    with forked_engines():
        numbers = evenkeel_json("train", ROOT / "pipeline/recipes/scalerl.yaml", *overrides)
    assert (numbers["state"], numbers["objective"]) == ("finished", "cispo")
    assert numbers["interrupted"] > 0, "a random model never ends by itself"
    run = tmp_path / "runs" / "scalerl"
    metrics = read_metrics(run)
    assert len(metrics) == 4
    assert max(line["lag_max"] for line in metrics) <= 8
    assert [event["version"] for event in read_events(run, "published")] == [1, 2, 3, 4]
    assert evenkeel_json("verify", "history", run)["ok"]
