"""Conversions in one process: FP8 folders against quantization of whole matrices, and what is refused first."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch.convert.folders import compare_with_source, fp8_map, hf_to_fp8, hf_to_megatron
from launch.convert.modelopt import calibration_rows
from launch.convert.new_model import new_model
from megatron_bridge.hf import folders
from megatron_bridge.hf.folders import new_folder
from megatron_bridge.hf.fp8 import dequantized_tensors, write_fp8_folder
from megatron_bridge.hf.headers import weight_files
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.hf.modelopt import check_scales
from megatron_bridge.hf.tensor_files import check_written
from pipeline.errors import EvenKeelError, LayoutError, ModelError
from precision.formats.formats import scale_of
from precision.formats.streams import fake_quantize_state, quantize_state

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two layers; the feed-forward size makes blocks of several rows of blocks."""
    new_model(tmp_path / "source", dtype="bfloat16")
    return tmp_path / "source"


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def test_blocks_are_those_of_the_whole_matrices_though_read_in_pieces(source: Path, tmp_path: Path) -> None:
    config = read_hf_config(source)
    quant = fp8_map(config, ModelConfig.from_hf(config), "block128")
    folder = tmp_path / "out"
    folder.mkdir()
    written: list[int] = []
    # 128 rows at a time, and shards of less than a layer.
    manifest = write_fp8_folder(source, folder, quant, advance=written.append, shard_bytes=100_000, piece_bytes=1)
    check_written(folder, manifest, lambda _: None)
    assert len(weight_files(folder)) > 3
    assert_same(stored(folder), dict(quantize_state(load_file(source / WEIGHTS).items(), quant)))
    assert sum(written) == sum(tensor.nbytes for tensor in stored(folder).values())
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["weight_block_size"] == [128, 128]


def test_what_an_engine_stacks_shares_a_scale(source: Path, tmp_path: Path) -> None:
    result = hf_to_fp8(source, tmp_path / "out", "tensor", verify_logprobs=False)
    assert result["quantized_tensors"] == 14
    found, plain = stored(tmp_path / "out"), load_file(source / WEIGHTS)
    parts = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    scales = {float(found[f"{part}.weight_scale"]) for part in parts}
    assert scales == {float(scale_of(torch.cat([plain[f"{part}.weight"] for part in parts]).abs().amax()))}
    config = read_hf_config(source)
    quant = fp8_map(config, ModelConfig.from_hf(config), "tensor")
    values = dict(dequantized_tensors(tmp_path / "out", torch.bfloat16))
    assert_same(values, dict(fake_quantize_state(plain.items(), quant)))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def rename(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.query.weight"] = tensors.pop(Q_PROJ)


def remove(tensors: dict[str, Tensor]) -> None:
    del tensors[Q_PROJ]


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ][:-1].contiguous()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (rename, ["q_proj.weight is missing", "query.weight is not part of"]),
        (remove, ["q_proj.weight is missing"]),
        (reshape, ["q_proj.weight has shape [255, 128], expected [256, 128]"]),
    ],
)
def test_a_tensor_that_does_not_belong_is_named_before_any_work(
    source: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], named: list[str]
) -> None:
    edit(source, change)
    out = tmp_path / "out"
    conversions: list[Callable[[], object]] = [
        lambda: hf_to_fp8(source, out, "block128", verify_logprobs=False),
        lambda: hf_to_megatron(source, out, tensor=1, pipeline=1, expert=1, dtype="keep", verify_logprobs=False),
    ]
    for convert in conversions:
        with pytest.raises(ModelError) as error:
            convert()
        assert all(part in str(error.value) for part in named)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_failure_midway_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    edit(source, lambda tensors: tensors[Q_PROJ].fill_(float("nan")))
    with pytest.raises(ModelError, match=f"{Q_PROJ} holds values that are not finite"):
        hf_to_fp8(source, tmp_path / "out", "block128", verify_logprobs=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_out_must_be_new_or_empty_and_remains_of_the_dead_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    dead, alive, foreign = ".out.h-0123456789ab.tmp", ".out.h-0123456789ac.tmp", ".other.h-0123456789ab.tmp"
    for name in (dead, alive, foreign):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").touch()
    yesterday = time.time() - 25 * 3600
    for path in (tmp_path / dead / "shard", tmp_path / dead, tmp_path / alive, tmp_path / foreign / "shard"):
        os.utime(path, (yesterday, yesterday))
    with new_folder(out) as folder:
        (folder / "file").write_text("x")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", alive, foreign])
    with pytest.raises(ModelError, match="not an empty folder"), new_folder(out):
        raise AssertionError("unreachable")


def test_a_folder_that_appears_while_ours_is_synced_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands may write to one OUT: the first to end has it."""
    out = tmp_path / "out"

    def sync_while_another_ends(_: object) -> None:
        out.mkdir()
        (out / "file").write_text("first")

    monkeypatch.setattr(folders, "sync_files", sync_while_another_ends)
    with pytest.raises(ModelError, match="not an empty folder"), new_folder(out) as folder:
        (folder / "file").write_text("second")
    assert (out / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_lies_on_disk_is_compared_with_what_was_written(source: Path, tmp_path: Path) -> None:
    config = read_hf_config(source)
    folder = tmp_path / "out"
    folder.mkdir()
    quant = fp8_map(config, ModelConfig.from_hf(config), "block128")
    manifest = write_fp8_folder(source, folder, quant, advance=lambda _: None)
    file = folder / "model-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match="differs from what was written"):
        check_written(folder, manifest, lambda _: None)


def test_a_tied_model_may_store_its_head_twice_but_not_another_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    new_model(source, tie=True)
    edit(source, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    result = hf_to_fp8(source, tmp_path / "out", "block128", verify_logprobs=False)
    assert result["left_over"] == ["lm_head.weight"]
    edit(source, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match=r"lm_head\.weight is not model\.embed_tokens"):
        hf_to_fp8(source, tmp_path / "other", "block128", verify_logprobs=False)


def test_layout_dtype_and_widths_are_checked_first(source: Path, tmp_path: Path) -> None:
    def megatron(**sizes: int) -> None:
        arguments = dict(tensor=1, pipeline=1, expert=1) | sizes
        hf_to_megatron(source, tmp_path / "out", **arguments, dtype="keep", verify_logprobs=False)

    with pytest.raises(LayoutError, match="--tensor-parallel is 3"):
        megatron(tensor=3)
    with pytest.raises(LayoutError, match="no experts"):
        megatron(expert=2)
    edit(source, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].float()}))
    with pytest.raises(ModelError, match="BF16, F32, and --dtype keep"):
        megatron()
    new_model(tmp_path / "narrow", ffn=192)
    with pytest.raises(ModelError, match="intermediate_size"):
        hf_to_fp8(tmp_path / "narrow", tmp_path / "out", "block128", verify_logprobs=False)
    assert not (tmp_path / "out").exists()


def test_calibration_prompts(source: Path, tmp_path: Path) -> None:
    config = read_hf_config(source)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "123="}\n\n{"text": "7"}\n')
    assert list(map(len, calibration_rows(source, config, path))) == [4, 1]
    rows = calibration_rows(source, config, None)
    assert rows == calibration_rows(source, config, None)
    assert {token for row in rows for token in row} <= set(range(config["vocab_size"]))
    for text in ("{}", "[1]", "plain", ""):
        path.write_text(text)
        with pytest.raises(ModelError, match="--calibration"):
            calibration_rows(source, config, path)
    assert issubclass(ModelError, EvenKeelError)


@pytest.mark.parametrize(("value", "problem"), [(1.0, r"in \[1, 1\]"), (0.0, r"in \[0, 0\]"), (None, "is missing")])
def test_scales_that_nobody_calibrated_are_refused(
    source: Path, tmp_path: Path, value: float | None, problem: str
) -> None:
    out = tmp_path / "out"
    hf_to_fp8(source, out, "tensor", verify_logprobs=False)
    config = read_hf_config(source)
    quant = fp8_map(config, ModelConfig.from_hf(config), "tensor")
    scales = {f"{module}.input_scale": torch.tensor(0.02) for module in quant.formats}
    save_file(scales, out / "inputs.safetensors")
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    assert check_scales(out, quant)["input_scale"] == dict(min=pytest.approx(0.02), max=pytest.approx(0.02))
    broken = "model.layers.1.mlp.down_proj.input_scale"
    scales |= {broken: torch.tensor(0.02 if value is None else value)}
    if value is None:
        del scales[broken]
    save_file(scales, out / "inputs.safetensors")
    with pytest.raises(ModelError, match=f"layers.1.mlp.down_proj.input_scale {problem}|input_scale lies {problem}"):
        check_scales(out, quant)


def test_a_checkpoint_that_holds_another_value_is_a_bug_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_model(tmp_path / "hf", layers=1)
    config = ModelConfig.from_hf(read_hf_config(tmp_path / "hf"))
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    monkeypatch.setattr("megatron_bridge.checkpoint.dcp.stream_hf_tensors", lambda *_: iter(stored.items()))
    compare_with_source(None, config, tmp_path / "hf", lambda _: None)
    stored["model.norm.weight"][0] += 1e-6
    with pytest.raises(ModelError, match=r"model\.norm\.weight came out with other values"):
        compare_with_source(None, config, tmp_path / "hf", lambda _: None)
