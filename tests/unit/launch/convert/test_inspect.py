"""`convert inspect`: what it says about each kind of folder, and its one line about a damaged one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launch.convert.folders import hf_to_fp8
from launch.convert.inspect import inspect_folder
from launch.convert.new_model import new_model
from pipeline.errors import CorruptCheckpointError, ModelError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    new_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def blocks(model: Path, tmp_path: Path) -> Path:
    hf_to_fp8(model, tmp_path / "fp8", "block128", verify_logprobs=False)
    return tmp_path / "fp8"


def test_an_hf_folder(model: Path) -> None:
    found = inspect_folder(model)
    assert (found["kind"], found["architecture"], found["files"]) == ("HF", "Qwen3ForCausalLM", 1)
    assert found["bytes"] == 4 * found["parameters"] == found["bytes_by_dtype"]["F32"]
    assert found["quantized_share"] == 0
    row = next(row for row in found["shapes"] if row["name"] == "model.layers.*.mlp.up_proj.weight")
    assert row == dict(name="model.layers.*.mlp.up_proj.weight", shape=[384, 128], dtype="F32", count=2)


def test_fp8_folders(model: Path, blocks: Path, tmp_path: Path) -> None:
    whole, found = inspect_folder(model), inspect_folder(blocks)
    assert found["kind"] == "HF, FP8 in 128×128 blocks, with the manifest of a policy"
    assert found["parameters"] == whole["parameters"]
    # Per layer: q 256×128, k and v 128×128, o 128×256, three of 384×128.
    quantized = 2 * (2 * 256 * 128 + 2 * 128 * 128 + 3 * 384 * 128)
    assert found["bytes_by_dtype"]["F8_E4M3"] == quantized
    assert found["quantized_share"] == round(quantized / whole["parameters"], 4)
    hf_to_fp8(model, tmp_path / "tensor", "tensor", verify_logprobs=False)
    assert inspect_folder(tmp_path / "tensor")["kind"].startswith("HF, FP8 with a scale for each tensor")


def truncate(folder: Path) -> None:
    file = folder / "model-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def lose_the_file(folder: Path) -> None:
    (folder / "model-00001.safetensors").unlink()
    save_file({"a": torch.zeros(1)}, folder / "other.safetensors")


def lose_a_scale(folder: Path) -> None:
    for name in ("manifest.json", "model.safetensors.index.json"):
        (folder / name).unlink()
    file = folder / "model-00001.safetensors"
    from safetensors.torch import load_file

    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, file)


def point_outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map={"model.norm.weight": "../../model.safetensors"})))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "not a readable safetensors file"),
        (lose_the_file, "lacks model-00001.safetensors"),
        (lose_a_scale, "layers.0.mlp.up_proj.weight has no scale"),
        (point_outside, r"the file of 'model\.norm\.weight' is '\.\./\.\./model\.safetensors', expected"),
    ],
)
def test_damage_is_one_line(blocks: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(blocks)
    with pytest.raises(ModelError, match=message) as error:
        inspect_folder(blocks)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        inspect_folder(tmp_path / "nothing")
    with pytest.raises(ModelError, match="neither config"):
        inspect_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no tensors"):
        inspect_folder(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"x")
    with pytest.raises(CorruptCheckpointError, match="not the index of a distributed checkpoint"):
        inspect_folder(tmp_path)
