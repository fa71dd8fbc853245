"""The whole loop with real SGLang and real Megatron-Core, a few steps each: every schedule, TP2, PP2 and DP2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from launch.run.metrics import METRICS
from pipeline.data.event_log import log_files, read_events, read_metrics
from pipeline.data.quant_maps import read_quant_map
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.ports.weights import WeightCheck
from precision.formats.quant_map import QuantMapFile
from tests.chaos.flips.flip import KINDS, complete, try_flip
from tests.support.glossary import unexplained
from tests.support.listening import ListeningWatch
from tests.support.rank_programs import forked_programs
from tests.support.runs import evenkeel, evenkeel_json, make_model, make_recipe, trained
from tests.support.scraper import Scraper, free_run_of_ports
from tests.support.traces import check_trace, rows_of

EXCEPTION = "model.layers.1.mlp.down_proj"
pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    make_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def tp2(workshop: Path) -> Path:
    """A finished sync run: TP2, P3O, 128×128-block FP8 rollouts with an exception."""
    quant_map = workshop / "quant_map.yaml"
    quant_map.write_text(f"base: fp8_block\nexceptions:\n  {EXCEPTION}: full\n")
    rollout = dict(prompts_per_batch=4, group_size=4, max_new_tokens=12, context_tokens=64)
    recipe = make_recipe(
        workshop,
        workshop / "model",
        "tp2",
        rollout=rollout | dict(precision="fp8_block", quant_map=str(quant_map)),
        learner=dict(tensor_parallel=2, micro_batch_tokens=256, optimizer=dict(lr=1e-3, warmup_steps=0)),
        checkpoint=dict(every=1),  # a save is seen to be over at the next one: the last two are too late to be scraped
        reference=dict(coefficient=0.01),
    )
    port = free_run_of_ports(4)
    with Scraper([port, port + 1, port + 2]) as scraper, ListeningWatch() as watch:
        result = evenkeel_json("train", recipe, "--metrics-port", str(port), in_process=False)
    (workshop / "scraped.json").write_text(json.dumps(scraper.seen))
    (workshop / "listening.json").write_text(json.dumps([sorted(watch.seen), sorted(watch.beyond)]))
    assert result["learner_layout"] == "TP2"
    return workshop / "runs" / "tp2"


def test_nothing_of_a_run_on_one_machine_listens_beyond_loopback(tp2: Path) -> None:
    """Neither servers, nor torch's stores, nor the sockets of gloo."""
    seen, beyond = json.loads((tp2.parents[1] / "listening.json").read_text())
    assert len(seen) >= 5, "engine and its store, ranks and theirs"
    assert beyond == []


def policy_lags(run: Path) -> dict[int, set[int]]:
    """batch → lags (batch − version) of its tokens, from the store."""
    store = BatchStore(run / "batches")
    return {i: set((i - store.read(i, None).policy_version).tolist()) for i in store.committed()}


def test_tp2_trains_on_fp8_rollouts(tp2: Path) -> None:
    metrics = read_metrics(tp2)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    for line in metrics:
        assert 0.5 < line["ess"] < 1.0, "FP8 rollouts cannot match exactly"
        assert line["grad_norm"] > 0
        assert unexplained(line) == [], "docs/metrics.md says what each means"
    assert policy_lags(tp2) == {i: {0} for i in range(4)}
    shown = evenkeel_json("runs", "show", tp2)
    assert shown["steps"] == 4
    assert shown["rollout_precision"] == "fp8_block"
    assert {"pass_at_1_first", "pass_at_1_last", "wall_s"} <= shown.keys()


def test_the_policy_leaves_its_reference(tp2: Path) -> None:
    """At the first step it is the reference, which is read into the model and out again before each."""
    near = [line["kl_to_reference"] for line in read_metrics(tp2)]
    assert 0.0 <= near[0] < 1e-9
    assert near[-1] > 1e-7


def test_a_real_run_shows_every_number_of_the_table(tp2: Path, workshop: Path) -> None:
    """What dashboard and alerts read is compared with the same table."""
    seen = {name for page in json.loads((workshop / "scraped.json").read_text()) for name in page}
    rare = {"evenkeel_fatal", "evenkeel_bad_answers_total"}
    assert {metric.name for metric in METRICS} - seen <= rare, "which only a run shows where something went wrong"


def test_the_quant_map_is_frozen_and_served(tp2: Path) -> None:
    """The map's file is no longer needed, and engines, verified at each publish, got the layer as it is."""
    frozen = RunDirectory(tp2).recipe().rollout.quant_map
    assert frozen == QuantMapFile(base="fp8_block", exceptions={EXCEPTION: "full"})
    for version in (3, 4):
        folder = tp2 / "policy" / f"{version:06d}"
        assert read_quant_map(folder) == frozen
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert config["ignored_layers"] == [EXCEPTION]
        tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
        scaled = {name.removesuffix(".weight_scale_inv") for name in tensors if name.endswith("weight_scale_inv")}
        assert len(scaled) == 13
        assert EXCEPTION not in scaled
        check = WeightCheck.load(folder, version)
        assert check is not None
        assert check.formats is not None
        assert {name for name, kept in check.formats.items() if kept == "float32"} == {EXCEPTION}


def test_history_of_tp2(tp2: Path) -> None:
    audit = evenkeel_json("verify", "history", tp2)
    assert (audit["lost"], audit["duplicated"], audit["version_violations"]) == (0, 0, 0)
    assert audit["groups"] == 16


def test_policy_really_changed_and_was_served(tp2: Path, workshop: Path) -> None:
    """The engine's logprobs follow the learner's: at each step the gap is small against how far the policy moved."""
    final = json.loads((tp2 / "model" / "manifest.json").read_text())["tensors"]
    seed = json.loads((tp2 / "policy" / "000004" / "manifest.json").read_text())["tensors"]
    assert final.keys() == {name for name in seed if not name.endswith("weight_scale_inv")}
    for line in read_metrics(tp2):
        assert line["log_ratio_abs_mean"] < 0.1


def test_report_trajectories_and_text(tp2: Path) -> None:
    page = (tp2 / "report.html").read_text()
    assert "<svg" in page
    hosts = ("http://www.w3.org", "http://purl.org", "http://creativecommons.org")
    assert page.count("http://") == sum(page.count(host) for host in hosts), "it asks the network for nothing"
    assert {event["role"] for event in read_events(tp2, "environment")} >= {"learner", "collector", "engine-0"}
    assert "<dt>sglang</dt><dd>0.5" in page
    shown = evenkeel("trajectories", "show", tp2, "2", "--limit", "2")
    assert shown.returncode == 0, shown.stderr
    assert "reward" in shown.stdout
    assert "gap" in shown.stdout
    stored = BatchStore(tp2 / "batches").read(2, None).rollout_logprobs
    assert np.load(tp2 / "logprobs" / "000002.npy").shape == stored.shape


def test_trace_of_a_real_run(tp2: Path) -> None:
    """Every process that worked is in it, and a rank's phases fill its steps."""
    said = evenkeel_json("trace", tp2, "--steps", "1:3")
    trace = json.loads(Path(said["file"]).read_text(encoding="utf-8"))
    check_trace(trace)
    rows = rows_of(trace)
    assert {part for part, _ in rows} == {"learner rank 0", "learner rank 1", "collector", "engine 0", "verifiers"}
    names = {(part, lane.rstrip(" 0123456789")): {e["name"] for e in events} for (part, lane), events in rows.items()}
    phases = {"step 1", "step 2", "wait", "logprobs", "update", "publish", "record"}
    for rank in (0, 1):
        steps = rows[f"learner rank {rank}", "step"]
        assert phases <= {event["name"] for event in steps}
        whole = sum(event["dur"] for event in steps if event["name"].startswith("step "))
        assert sum(event["dur"] for event in steps) - whole > 0.9 * whole, "what is no phase is next to nothing"
    assert names["engine 0", "requests"] == {"request"}
    assert {"pause", "load", "checksum", "probe"} <= names["engine 0", "weights"]
    assert names["verifiers", "worker"] == {"score"}
    assert said["bottleneck"] == trace["otherData"]["bottleneck"]
    assert evenkeel("trace", tp2, "--steps", "3-4").stderr.startswith("error: --steps is '3-4', expected A:B")


def test_no_flipped_bit_passes(tp2: Path, tmp_path: Path) -> None:
    """One in each kind of file; `make chaos PARTS=flips` tries a thousand."""
    run = tmp_path / "tp2"
    shutil.copytree(tp2, run)
    complete(run)
    details: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    verdicts = {kind: try_flip(run, kind, seed, details[kind]) for seed, kind in enumerate(KINDS)}
    assert {kind: (verdict, details[kind]) for kind, verdict in verdicts.items() if verdict != "ok"} == {}


def test_replay_is_bit_identical(tp2: Path) -> None:
    result = evenkeel_json("train", "--replay", tp2)
    assert result["bit_identical"], result["differing_tensors"][:5]


def test_a_resumed_replay_equals_one_that_was_not_interrupted(tp2: Path) -> None:
    """The replay above left checkpoints at steps 3 and 4: without the later one it goes on from step 3."""
    replay = tp2.with_name("tp2-replay")
    before = read_metrics(replay)
    (replay / "checkpoints" / "000004" / "COMMIT").unlink()
    with forked_programs():
        result = evenkeel_json("train", "--replay", tp2)
    assert result["bit_identical"], result["differing_tensors"][:5]
    started = [
        [json.loads(line)["step"] for line in path.read_text().splitlines()] for path in log_files(replay, "metrics")
    ]
    assert started == [[0, 1, 2, 3], [3]], "resumed at step 3"
    assert [line["loss"] for line in read_metrics(replay)] == [line["loss"] for line in before]


def test_resume_with_another_recipe_names_the_key(tp2: Path, workshop: Path) -> None:
    done = evenkeel("train", workshop / "tp2.yaml", "--set", "learner.optimizer.eps=0.5")
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "learner.optimizer.eps: 1e-08 → 0.5" in done.stderr
    assert "evenkeel fork" in done.stderr
    assert "Traceback" not in done.stderr


def log_of(run: Path, process: str) -> str:
    """What all starts of a process have written."""
    logs = sorted((run / "logs").glob(f"{process}-*.log"))
    assert logs
    return "".join(log.read_text() for log in logs)


def test_async_lag_2_with_pp2(workshop: Path) -> None:
    """Two pipeline stages, each with a process group of its own with the engine, send block FP8 while answers are under
    way; tokens are scored at the version that sampled them."""
    run = trained(
        workshop,
        workshop / "model",
        "pp2",
        run=dict(steps=7),
        schedule=dict(kind="async", lag=2),
        learner=dict(
            pipeline_parallel=2,
            micro_batch_tokens=128,
            updates_per_batch=2,
            optimizer=dict(lr=1e-3, warmup_steps=0, lr_by_lag="sqrt"),
        ),
        evaluation=dict(every=3, prompts=4, samples=2),
        objective=dict(name="split"),
        advantage=dict(name="fade"),
        rollout=dict(precision="fp8_block"),
        weights=dict(channel="broadcast", bucket_mib=1),
    )
    lags = policy_lags(run)
    assert all(lag <= 2 for found in lags.values() for lag in found)
    assert max(lag for found in lags.values() for lag in found) >= 1, "an asynchronous run that is never behind is sync"
    evaluated = read_events(run, "evaluated")
    due = [
        version for event in evaluated for version in (*event.get("skipped", ()), event.get("due", event["version"]))
    ]
    assert due == [0, 3, 6, 7], "each was asked, or skipped since a later one was published"
    assert all(version >= event.get("due", 0) for event in evaluated for version, _ in event.get("answered", ()))
    assert "due" not in evaluated[-1], "no later version answers the last one"
    metrics = read_metrics(run)
    whole = 4 * sum(tensor.numel() for tensor in load_file(workshop / "model" / "model.safetensors").values())
    published = [event["measured"] for event in read_events(run, "published")]
    assert len(published) == 7
    assert all(0 < found["transfer_bytes"] < 0.8 * whole for found in published), "the embeddings stay as they are"
    assert all(found["engines_checked"] == 1 for found in published), "checksums are those of what was sent"
    assert ["transfer_bytes" in line for line in metrics] == [False] + [True] * 6, "a step tells of the version before"
    assert log_of(run, "engine-0").count("init custom process group") == 2, "one for each pipeline stage"
    # FADE: nobody solves anything here, so the smoothed solve rate falls from .5, and H* is half the first entropy.
    rates = [line["advantage_solve_rate"] for line in metrics]
    assert rates == sorted(rates, reverse=True)
    assert metrics[0]["advantage_target_entropy"] == pytest.approx(metrics[0]["entropy"] / 2)
    newest = max((run / "checkpoints").glob("0*"))
    assert json.loads((newest / "loop_state.json").read_text())["advantage_solve_rate"] == rates[-1]
    # Each version is two optimizer steps, and the second step on a batch is one step later than the first.
    batches = [BatchStore(run / "batches").read(index, None) for index in range(7)]
    ages = [2 * (batch.index - batch.policy_version[batch.loss_mask]).mean() + 0.5 for batch in batches]
    assert [line["lr_factor"] for line in metrics] == pytest.approx([(1 + age) ** -0.5 for age in ages])
    assert [line["lr"] for line in metrics] == pytest.approx([1e-3 * line["lr_factor"] for line in metrics])
    assert min(line["lr_factor"] for line in metrics) < 0.8 * metrics[0]["lr_factor"], "some batch was a version old"
    # On two updates a batch the policy moves between them, so that even the first batch is a little stale.
    assert all(0.0 < line["staleness_ess"] < 1.0 for line in metrics)
    assert all(line["kl_loss"] > 0 for line in metrics)


@pytest.mark.slow
def test_staged_mu_8_with_two_engines_and_dp2(workshop: Path) -> None:
    run = trained(
        workshop,
        workshop / "model",
        "staged",
        run=dict(steps=10),
        schedule=dict(kind="staged", updates_per_stage=8),
        rollout=dict(prompts_per_batch=4, group_size=4, max_new_tokens=12, context_tokens=64, engines=2),
        learner=dict(data_parallel=2, micro_batch_tokens=256, optimizer=dict(lr=1e-3, warmup_steps=0)),
        advantage=dict(name="dr_grpo"),
        objective=dict(name="clipped", anchor="old"),
        correction=dict(name="tis"),
        weights=dict(channel="ipc"),
    )
    assert policy_lags(run) == {i: {i % 8} for i in range(10)}
    # pi_old is the learner when the stage began: what it thought of batches 0 and 8 when it met them, and not of 7.
    for step, same in ((0, True), (8, True), (7, False)):
        met, old = (np.load(run / "logprobs" / f"{step:06d}{suffix}.npy") for suffix in ("", "-old"))
        assert np.allclose(met, old, atol=1e-5) == same, step
    assert all(0 < line["correction_factor"] <= 2 for line in read_metrics(run))
    for index in range(2):
        assert "Prefill batch" in log_of(run, f"engine-{index}"), "the router must use both engines"


@pytest.mark.slow
def test_an_engine_that_never_comes_up_shows_the_end_of_its_log(workshop: Path) -> None:
    rollout = dict(extra_args=["--no-such-option"], start_deadline_s=90)
    done = evenkeel("train", make_recipe(workshop, workshop / "model", "engine", rollout=rollout))
    assert done.returncode != 0
    assert "--no-such-option" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
