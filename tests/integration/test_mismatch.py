"""`evenkeel mismatch` on real engines with planted causes; all of them: python -m tests.evidence.planted_causes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engine_forks import forked_engines
from tests.support.planted_causes import PLANTS, Models, Plant, is_named, measured_plant
from tests.support.rank_programs import forked_programs
from tests.support.runs import evenkeel, evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.slow, pytest.mark.loop, pytest.mark.timeout(500)]

SOME = ("one module's weights", "cached values")


LUCK = 5e-4
"""Nats between two ways to compute one FP8 model: an activation may round the other way in a batch of another shape,
or on a processor that sums in another order."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A random model, and the same a little further on."""
    folder = tmp_path_factory.mktemp("models")
    served, other = make_model(folder / "served"), make_model(folder / "other")
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    return Models(served=served, other=other)


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    with forked_engines(), forked_programs():
        yield


def test_terms_of_real_rollouts(models: Models, tmp_path: Path) -> None:
    """Block FP8 without any fault, and a policy that has moved on: only staleness moves."""
    control, moved = (
        measured_plant(plant, models, tmp_path / str(number), num_prompts=4, sets=["learner.tensor_parallel=1"])
        for number, plant in ((0, PLANTS[0]), (2, PLANTS[2]))
    )
    for plant, result in ((PLANTS[0], control), (PLANTS[2], moved)):
        assert is_named(plant, result), result["verdict"]
        assert result["largest_error"] <= 1e-6
        assert result["terms"]["kernels"]["mean_abs"] < LUCK
        assert result["terms"]["decoding"]["mean_abs"] < LUCK
        assert 1e-3 < result["terms"]["quantization"]["mean_abs"] < 0.1
        assert Path(result["page"]).exists()
    assert control["terms"]["staleness"]["max_abs"] == 0.0
    assert moved["terms"]["staleness"]["mean_abs"] > 1e-2


@pytest.mark.parametrize("plant", [one for one in PLANTS if one.name.startswith(SOME)], ids=lambda plant: plant.name)
def test_a_planted_cause_is_named(plant: Plant, models: Models, tmp_path: Path) -> None:
    result = measured_plant(plant, models, tmp_path, num_prompts=4, sets=["learner.tensor_parallel=1"])
    assert is_named(plant, result), result["verdict"]
    assert result["largest_error"] <= 1e-6


def test_a_recorded_batch_of_several_versions(tmp_path: Path) -> None:
    """An asynchronous run: what it kept, its own weights trained again, and an engine with each version in turn."""
    recipe = make_recipe(
        tmp_path,
        make_model(tmp_path / "model"),
        "recorded",
        rollout=dict(precision="fp8_block"),
        schedule=dict(kind="async", lag=1),
    )
    evenkeel_json("train", recipe)
    result = evenkeel_json("mismatch", tmp_path / "runs" / "recorded", "--batch", "3", "--no-locate")
    assert result["largest_error"] <= 1e-6
    assert result["terms"]["quantization"]["mean_abs"] > 1e-4
    # Weights that were not those that sampled would show here, as large as staleness.
    assert result["terms"]["staleness"]["mean_abs"] > 10 * LUCK
    assert result["terms"]["kernels"]["mean_abs"] < LUCK
    assert result["terms"]["decoding"]["mean_abs"] < LUCK
    assert result["audit"]["compared"] > 0
    assert not result["audit"]["differing"]
    refused = evenkeel("mismatch", tmp_path / "runs" / "recorded", "--prompts", "3")
    assert refused.returncode == 1
    assert refused.stderr == "error: --prompts belongs to a recipe; leave it out, or give a recipe\n"
