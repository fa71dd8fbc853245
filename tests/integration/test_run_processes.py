"""`evenkeel train` as a process that is watched: frozen engines, a dying learner and collector, Ctrl-C, later roles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline.control.files import ControlFiles
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.quant_maps import digest_of, read_quant_map
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.data.store import BatchStore
from rollout_sglang.server.start import free_ports
from tests.support.processes import Training, training, with_words
from tests.support.runs import environment, evenkeel, evenkeel_json, make_model, make_prompts, make_recipe, trained

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]

CONTROL_CALL_S = 30.0
"""Longest wait for one call of a publish (rollout_sglang.client): what a frozen engine used to cost, several times."""
STEPS, PROMPTS, GROUP, PHRASE = 6, 4, 4, "=="
"""Of the run whose collector dies."""


@contextmanager
def run_of(folder: Path, name: str, layers: int = 2, **sections: dict[str, Any]) -> Iterator[Training]:
    recipe = make_recipe(folder, make_model(folder / "model", layers=layers), name, **sections)
    with training(recipe, folder / "runs" / name) as found:
        yield found


@contextmanager
def with_engines(folder: Path, channel: str, count: int) -> Iterator[Training]:
    with run_of(
        folder,
        "hung",
        run=dict(steps=400),
        rollout=dict(engines=count),
        weights=dict(channel=channel),
        checkpoint=dict(every=1),
    ) as run:
        for engine in range(count):
            run.until(lambda engine=engine: run.events("admitted", engine), f"engine {engine}")
        yield run


def freeze(run: Training, index: int, part: str) -> tuple[psutil.Process, float]:
    """The HTTP process of an engine or its scheduler, stopped now."""
    role = with_words(run.process.children(), f" role engine {run.run} {index} ")[0]
    server = role.children()[0]
    victim = server if part == "http" else with_words(server.children(recursive=True), "scheduler")[0]
    victim.send_signal(signal.SIGSTOP)
    return victim, time.time()


@pytest.mark.repeated
@pytest.mark.parametrize(("part", "channel"), [("http", "ipc"), ("scheduler", "broadcast")])
def test_a_run_does_not_notice_that_one_of_two_engines_is_frozen(tmp_path: Path, part: str, channel: str) -> None:
    with with_engines(tmp_path, channel, 2) as run:
        run.until(lambda: run.steps() >= 3, "three steps")
        _, at = freeze(run, 1, part)
        left_out = run.until(lambda: run.events("quarantined", 1, at), "quarantine")[0]
        assert "stopped" in left_out["reason"] or "answered nothing" in left_out["reason"]
        seen = run.steps()
        run.until(lambda: run.steps() >= seen + 2, "two steps beside it")
        again = run.until(lambda: run.restarts("engine-1", at), "a restart of the engine")[0]
        assert "hangs" in again["reason"]
        run.until(lambda: run.events("admitted", 1, again["time"]), "the engine's second start to be admitted")
        slowest = max(event["seconds"] for event in read_events(run.run, "published") if event["time"] > at)
        assert slowest < CONTROL_CALL_S
    assert {event["process"] for event in read_events(run.run, "restarted")} == {"engine-1"}, "nothing else died"


def test_a_thawed_engine_is_verified_and_admitted(tmp_path: Path) -> None:
    with with_engines(tmp_path, "disk", 2) as run:
        victim, at = freeze(run, 0, "scheduler")
        left_out = run.until(lambda: run.events("quarantined", 0, at), "quarantine")[0]
        seen = run.steps()
        run.until(lambda: run.steps() >= seen + 1, "a publish that it misses")
        assert victim.is_running(), "it is ended only after STOPPED_GRACE_S, and a step takes a second"
        victim.send_signal(signal.SIGCONT)
        run.until(lambda: run.events("admitted", 0, left_out["time"]), "the engine to be admitted again")
        assert victim.is_running(), "the same process serves"
    assert read_events(run.run, "restarted") == []
    audit = json.loads(evenkeel("verify", "history", run.run, "--json").stdout.splitlines()[-1])  # of a run cut short
    assert (audit["lost"], audit["duplicated"], audit["version_violations"]) == (0, 0, 0)


def test_the_only_engine_may_freeze(tmp_path: Path) -> None:
    """The run waits for it, and goes on with its next start."""
    with with_engines(tmp_path, "disk", 1) as run:
        run.until(lambda: run.steps() >= 2, "two steps")
        _, at = freeze(run, 0, "scheduler")
        run.until(lambda: run.restarts("engine-0", at), "a restart of the engine")
        seen = run.steps()
        run.until(lambda: run.steps() >= seen + 2, "two steps after it")
    assert {event["process"] for event in read_events(run.run, "restarted")} == {"engine-0"}


def test_ctrl_c_says_what_is_saved_and_how_to_go_on(tmp_path: Path) -> None:
    """As a terminal sends it: to every process of the command."""
    run = RunDirectory(tmp_path / "runs/run")
    rare = dict(checkpoint=dict(every=1000), evaluation=dict(every=1000, prompts=1, samples=1))
    with run_of(tmp_path, "run", layers=1, run=dict(steps=400), **rare) as train:
        train.until(train.steps, "a step", 120)
        os.killpg(train.process.pid, signal.SIGINT)
        said = train.finish(60)
    assert "asked to end: the learner saves at its next step" in said
    (step,) = run.saved_steps()
    batches = BatchStore(run.batches).next_index
    assert 0 < step <= batches < 400
    found = f"{batches} batch{'' if batches == 1 else 'es'} and the checkpoint of step {step} of 400"
    assert f"stopped; {run.path} holds {found}; the same command goes on from there" in said


def test_a_controller_killed_between_decision_and_action_acts_once(tmp_path: Path) -> None:
    """FP8 rollouts under a floor that they miss by little, so that groups are promoted after a few steps: an engine
    changes its quant map."""
    steps, run = 9, RunDirectory(tmp_path / "runs" / "c")
    files = ControlFiles(run.control, unfenced)
    with run_of(
        tmp_path,
        "c",
        run=dict(steps=steps),
        rollout=dict(precision="fp8_block"),
        controller=dict(ess_floor=0.9999, cooldown_steps=5, evidence_tokens=200),
    ) as train:
        record = train.until(
            lambda: (new := files.newest()) and new.decision and new if run.control.exists() else None, "a decision"
        )
        ranks = train.with_words("learn_rank")
        for rank in ranks:
            rank.kill()
        assert ranks
        # Mostly before the version that the decision is for is published; killed later, it acts once as well.
        assert run.published_version() >= record.step
        train.finish(600)
    (decided,) = files.decisions()
    assert decided == record
    assert decided.decision is not None
    assert decided.decision.cause == "quantization"
    assert len(read_events(run.path, "restarted")) >= 1
    assert [path.name for path in sorted(run.quant_maps.glob("*.yaml"))] == ["000000.yaml", "000001.yaml"]
    later = [folder for folder in run.policies.glob("[0-9]*") if int(folder.name) > record.step]
    assert len({digest_of(read_quant_map(folder)) for folder in later}) == 1
    metrics = read_metrics(run.path)
    assert [line["step"] for line in metrics] == list(range(steps))
    assert metrics[-1]["ess"] > metrics[record.step]["ess"]
    replayed = evenkeel_json("train", "--replay", run.path)
    assert replayed["bit_identical"], replayed
    assert ControlFiles(RunDirectory(Path(replayed["replay"])).control, unfenced).decisions() == [decided]


@pytest.fixture(scope="module")
def curriculum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of lag 1 with interruptions, dynamic sampling and solved problems, whose collector was killed with
    SIGKILL after two batches."""
    folder = tmp_path_factory.mktemp("curriculum")
    interruption = dict(from_tokens=4, to_tokens=7, phrase=PHRASE, answer_tokens=6)
    few = str(make_prompts(folder / "few.jsonl", count=26))
    with run_of(
        folder,
        "curriculum",
        run=dict(steps=STEPS),
        rollout=dict(prompts_per_batch=PROMPTS, group_size=GROUP, max_new_tokens=16, interruption=interruption),
        prompts=dict(refill=True, max_refills=3, solved_pass_rate=0.9),
        schedule=dict(kind="async", lag=1),
        evaluation=dict(prompts=1),
        task=dict(name="data", path=few, reward="tests.support.rewards:low_prompts_are_easy"),
    ) as train:
        train.until((train.run / "batches" / "000001.zarr.zip").exists, "two batches", 150)
        train.with_words(" role collector ")[0].kill()
        train.finish(200)
    return train.run


def test_batches_are_full_of_what_tells_samples_apart(curriculum: Path) -> None:
    """Unless all that may be asked was asked: 4 × (1 + 3) groups."""
    audit = evenkeel_json("verify", "history", curriculum)
    assert (audit["ok"], audit["batches"]) == (True, STEPS), audit
    assert audit["zero_variance"] > 0
    assert audit["solved"] > 0
    assert {event["process"] for event in read_events(curriculum, "restarted")} == {"collector"}
    batches = [BatchStore(curriculum / "batches").read(index, None) for index in range(STEPS)]
    owners = Counter(g for b in batches for g in {*b.group.tolist(), *(drop.group for drop in b.dropped)})
    assert set(owners.values()) == {1}
    for batch in batches:
        assert batch.num_samples == PROMPTS * GROUP
        informative = sum(np.ptp(batch.reward[batch.group == group]) > 0 for group in np.unique(batch.group))
        asked = PROMPTS + sum(drop.kind == "zero_variance" for drop in batch.dropped)
        assert informative == PROMPTS or asked == PROMPTS * (1 + 3)


def test_interrupted_responses_hold_the_phrase_and_are_scored_as_they_were_read(curriculum: Path) -> None:
    """A random policy hardly ever ends by itself within 7 tokens."""
    batches = [BatchStore(curriculum / "batches").read(index, None) for index in range(STEPS)]
    for batch in batches:
        assert batch.interrupted.mean() > 0.5
        assert int((~batch.loss_mask).sum()) == len(PHRASE) * int(batch.interrupted.sum())
        offsets = batch.response_offsets
        for sample in np.flatnonzero(batch.interrupted):
            forced = np.flatnonzero(~batch.loss_mask[offsets[sample] : offsets[sample + 1]])
            assert forced.tolist() == list(range(forced[0], forced[0] + len(PHRASE)))
            assert 4 <= forced[0] <= 7
            assert 1 <= batch.response_lengths[sample] - forced[-1] - 1 <= 6
        assert np.all(batch.rollout_logprobs[batch.loss_mask] < 0.0)
    learner = np.load(curriculum / "logprobs" / "000000.npy")  # at the weights that sampled it
    assert np.abs(learner - batches[0].rollout_logprobs)[batches[0].loss_mask].max() < 1e-3
    assert [line["num_tokens"] for line in read_metrics(curriculum)] == [one.num_sampled_tokens for one in batches]


def test_roles_wait_for_the_recipe_that_the_learner_is_given(tmp_path: Path) -> None:
    """Roles that all start at once, as on a cluster, in a finished run that gets more steps. Without `--recipe` an
    engine would find the run finished and end, and nobody would start it again."""
    model, ahead_s = make_model(tmp_path / "model"), 5.0
    settings: dict[str, Any] = dict(
        learner=dict(optimizer=dict(decay_steps=4)), evaluation=dict(prompts=1, samples=1), checkpoint=dict(every=1)
    )
    run = RunDirectory(trained(tmp_path, model, "run", run=dict(steps=1), **settings))
    assert run.is_finished()
    longer = make_recipe(tmp_path, model, "run", run=dict(steps=2), **settings)

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "launch.cli", "role", words[0], str(run.path), *words[1:]]
        with (tmp_path / f"{words[0]}.log").open("wb") as log:
            return subprocess.Popen(
                [*command, "--recipe", str(longer)], env=environment(), stdout=log, stderr=subprocess.STDOUT
            )

    roles = {"engine": start("engine", "0", "--port", str(*free_ports(1))), "collector": start("collector")}
    try:
        time.sleep(ahead_s)
        assert {name: role.poll() for name, role in roles.items()} == dict.fromkeys(roles)
        roles["learner"] = start("learner")
        for name, role in roles.items():
            assert role.wait(300) == 0, (tmp_path / f"{name}.log").read_text()
    finally:
        for role in roles.values():
            role.kill()
    assert [line["step"] for line in read_metrics(run.path)] == [0, 1]
    assert run.recipe().run.steps == 2
    assert evenkeel_json("verify", "history", run.path)["ok"]
