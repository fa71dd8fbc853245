"""Interruptions, dynamic sampling, solved problems: real engines, a real learner, and a collector that dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipeline.data.batch import Batch
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.store import BatchStore
from tests.support.processes import with_words
from tests.support.runs import ROOT, environment, evenkeel_json, make_model, make_prompts, make_recipe

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, PROMPTS, GROUP = 6, 4, 4
PHRASE = "=="


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of lag 1 whose collector was killed with SIGKILL after two batches."""
    folder = tmp_path_factory.mktemp("curriculum")
    make_model(folder / "model")
    recipe = make_recipe(
        folder,
        folder / "model",
        "curriculum",
        run=dict(steps=STEPS),
        rollout=dict(
            prompts_per_batch=PROMPTS,
            group_size=GROUP,
            max_new_tokens=16,
            interruption=dict(from_tokens=4, to_tokens=7, phrase=PHRASE, answer_tokens=6),
        ),
        prompts=dict(refill=True, max_refills=3, solved_pass_rate=0.9),
        schedule=dict(kind="async", lag=1),
        evaluation=dict(prompts=1),
        task=dict(
            name="data",
            path=str(make_prompts(folder / "few.jsonl", count=26)),
            reward="tests.support.rewards:low_prompts_are_easy",
        ),
    )
    command = [sys.executable, "-m", "launch.cli", "train", str(recipe), "--json"]
    run = folder / "runs" / "curriculum"
    with (folder / "output").open("w") as output:
        supervisor = psutil.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            kill_the_collector(supervisor, run)
            supervisor.wait(timeout=200)
        finally:
            if supervisor.is_running():
                supervisor.terminate()
                supervisor.wait(timeout=60)
    assert supervisor.returncode == 0, (folder / "output").read_text()
    return run


def kill_the_collector(supervisor: psutil.Popen, run: Path) -> None:
    give_up = time.monotonic() + 150
    while not (run / "batches" / "000001.zarr.zip").exists():
        assert supervisor.poll() is None, "it ended before two batches were committed"
        assert time.monotonic() < give_up, "two batches were not committed"
        time.sleep(0.02)
    with_words(supervisor.children(recursive=True), " role collector ")[0].kill()


@pytest.fixture(scope="module")
def batches(run: Path) -> list[Batch]:
    store = BatchStore(run / "batches")
    return [store.read(index, None) for index in range(STEPS)]


def test_the_history_is_sound(run: Path) -> None:
    audit = evenkeel_json("verify", "history", run)
    assert audit["ok"], audit
    assert audit["batches"] == STEPS
    assert audit["zero_variance"] > 0
    assert audit["solved"] > 0
    assert [event["process"] for event in read_events(run, "restarted")] == ["collector"]


def test_batches_are_full_of_what_tells_samples_apart(batches: list[Batch]) -> None:
    """Unless all that may be asked was asked: 4 × (1 + 3) groups."""
    owners = Counter(g for b in batches for g in {*b.group.tolist(), *(drop.group for drop in b.dropped)})
    assert set(owners.values()) == {1}
    for batch in batches:
        assert batch.num_samples == PROMPTS * GROUP
        informative = sum(np.ptp(batch.reward[batch.group == group]) > 0 for group in np.unique(batch.group))
        asked = PROMPTS + sum(drop.kind == "zero_variance" for drop in batch.dropped)
        assert informative == PROMPTS or asked == PROMPTS * (1 + 3)
    assert any(drop.kind == "zero_variance" for batch in batches for drop in batch.dropped)


def test_interrupted_responses(run: Path, batches: list[Batch]) -> None:
    """A random policy hardly ever ends by itself within 7 tokens."""
    said = len(PHRASE)
    for batch in batches:
        assert batch.interrupted.mean() > 0.5
        assert int((~batch.loss_mask).sum()) == said * int(batch.interrupted.sum())
        offsets = batch.response_offsets
        for sample in np.flatnonzero(batch.interrupted):
            forced = np.flatnonzero(~batch.loss_mask[offsets[sample] : offsets[sample + 1]])
            assert forced.tolist() == list(range(forced[0], forced[0] + said))
            assert 4 <= forced[0] <= 7
            assert 1 <= batch.response_lengths[sample] - forced[-1] - 1 <= 6
        assert np.all(batch.rollout_logprobs[batch.loss_mask] < 0.0)
    assert len({event["interrupted"] for event in read_events(run, "committed")} - {0}) > 0


def test_the_learner_agrees_with_the_engine_on_what_was_sampled(run: Path, batches: list[Batch]) -> None:
    """At the weights that sampled it, also after the phrase: the engine read what is stored."""
    for batch in batches[:1]:
        learner = np.load(run / "logprobs" / f"{batch.index:06d}.npy")
        sampled = batch.loss_mask
        assert np.abs(learner - batch.rollout_logprobs)[sampled].max() < 1e-3
    assert [line["num_tokens"] for line in read_metrics(run)] == [batch.num_sampled_tokens for batch in batches]
