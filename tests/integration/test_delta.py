"""weights.channel: delta, in a real run: what it writes, and that engines hold what a full publish would give them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.deltas import is_whole, read_link
from pipeline.data.event_log import read_metrics
from pipeline.data.run_directory import RunDirectory, numbered_folders
from pipeline.errors import StoreError
from rollout_sglang.weights.replica import Replica, tensor_places
from tests.support.runs import evenkeel, evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, WHOLE_EVERY = 20, 8
WHOLE = [version for version in range(1, STEPS + 1) if version % WHOLE_EVERY == 1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """20 updates at a learning rate of 1e-6, a BF16 learner of two ranks, block FP8 rollouts; every folder is kept."""
    folder = tmp_path_factory.mktemp("delta")
    recipe = make_recipe(
        folder,
        make_model(folder / "model"),
        "delta",
        run=dict(steps=STEPS),
        rollout=dict(prompts_per_batch=2, group_size=4, max_new_tokens=8, precision="fp8_block"),
        learner=dict(
            precision="bf16", tensor_parallel=2, micro_batch_tokens=256, optimizer=dict(lr=1e-6, warmup_steps=0)
        ),
        weights=dict(channel="delta", whole_every=WHOLE_EVERY, keep=STEPS),
        checkpoint=dict(every=STEPS),
    )
    evenkeel_json("train", recipe, in_process=False, timeout=800)
    return RunDirectory(folder / "runs" / "delta")


def published(run: RunDirectory) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run.path) if "publish_seconds" in line]


def test_engines_hold_what_a_full_publish_gives_after_each_version(finished: RunDirectory) -> None:
    """Their checksums were compared with those of all published tensors, which the learner has without any delta."""
    lines = published(finished)
    assert len(lines) == STEPS
    assert {line["engines_checked"] for line in lines} == {1.0}
    assert finished.published_version() == STEPS
    audit = evenkeel_json("verify", "history", finished.path)
    assert (audit["lost"], audit["duplicated"], audit["version_violations"]) == (0, 0, 0)


def test_what_travels_is_what_changed(finished: RunDirectory) -> None:
    lines = published(finished)
    assert [index + 1 for index, line in enumerate(lines) if line["published_whole"]] == WHOLE
    for version, line in enumerate(lines, start=1):
        assert line["publish_seconds"].keys() >= {"prepare_s", "pause_s", "load_s", "export_s", "write_s"}
        if version == 1:
            assert line["published_bytes"] == line["whole_bytes"]
            continue
        link = read_link(finished.policies, version)
        assert link.delta is not None
        assert line["published_bytes"] == sum(one.num_bytes for runs in link.delta.payloads.values() for one in runs)
        assert 0 < line["delta_density"] < 0.02
        assert line["published_bytes"] < 0.05 * line["whole_bytes"]


def test_the_folders_hold_deltas_and_now_and_then_the_weights(finished: RunDirectory) -> None:
    versions = numbered_folders(finished.policies)
    assert [version for version in versions if is_whole(finished.policy_directory(version))] == [0, *WHOLE]


def test_deltas_lead_from_one_whole_version_to_the_next_bit_for_bit(finished: RunDirectory, tmp_path: Path) -> None:
    replica = Replica(finished.policies, tmp_path)
    replica.make(WHOLE[0])
    for version in range(WHOLE[0] + 1, STEPS + 1):
        folder = replica.make(version)
        if version in WHOLE:
            made, written = tensor_places(folder), tensor_places(finished.policy_directory(version))
            assert made.keys() == written.keys()
            for name, place in written.items():
                np.testing.assert_array_equal(made[name].map(), place.map(), err_msg=name)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["corrupted", "missing", "doubled"])
def test_a_damaged_delta_is_found(finished: RunDirectory, tmp_path: Path, kind: str) -> None:
    """By whoever makes a replica, and by `evenkeel repair`. The next deltas may overwrite a damaged number
    and give the right weights all the same: so the damaged version itself is asked for."""
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(finished.path, run.path)
    victim, asked = run.policy_directory(12), 12 if kind == "corrupted" else 14
    if kind == "corrupted":
        flip(next(victim.glob("delta-*.bin")))
    elif kind == "missing":
        shutil.rmtree(victim)
    else:
        shutil.rmtree(victim)
        shutil.copytree(run.policy_directory(11), victim)
    replica = Replica(run.policies, tmp_path / "replica")
    replica.folder.mkdir()
    replica.make(10)
    with pytest.raises(StoreError):
        replica.make(asked)
    assert [folder.name[:6] for folder in replica.folders] == ["000010"]
    replica.make(18)
    said = evenkeel("repair", run.path)
    assert said.returncode != 0
    assert "000012" in said.stdout + said.stderr
