from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_bridge.hf.folders import write_policy
from megatron_bridge.hf.headers import check_weights
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.hf.tensor_files import TensorFolder
from megatron_bridge.weight_sync.disk import prune
from pipeline.errors import ModelError
from precision.formats.formats import dequantize_block
from precision.formats.quant_map import QuantMap

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 32, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MODEL_CONFIG = ModelConfig.from_hf(CONFIG)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"tokens": 1}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "training_args.bin").write_text("not for engines")
    save_file(weights(), folder / "model.safetensors")
    return folder


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) for name, size in MODEL_CONFIG.tensors().items()}


def test_a_policy_holds_weights_config_tokenizer_and_manifest(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "policies" / "000000"
    write_policy(TensorFolder(source).tensors(), source, target, None, shard_bytes=200_000)
    shards = sorted(target.glob("model-*.safetensors"))
    assert len(shards) > 1
    written = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert all(torch.equal(written[name], tensor) for name, tensor in weights().items())
    manifest = json.loads((target / "manifest.json").read_text())["tensors"]
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert manifest.keys() == index.keys() == weights().keys()
    for name, entry in manifest.items():
        assert entry["sha256"] == hashlib.sha256(weights()[name].numpy().tobytes()).hexdigest()
        assert entry["file"] == index[name]
        assert name in load_file(target / entry["file"])
        assert entry["shape"] == list(weights()[name].shape)
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "torch_dtype" not in config
    assert (target / "tokenizer.json").read_text() == '{"tokens": 1}'
    assert (target / "tokenizer_config.json").exists()
    assert not (target / "training_args.bin").exists()
    assert [path.name for path in target.parent.iterdir()] == ["000000"]
    check_weights(target, MODEL_CONFIG)


def test_what_is_written_beside_stands_in_place_of_the_sources_file(source: Path, tmp_path: Path) -> None:
    for name, text in (("generation_config.json", "{}"), ("vocab.json", "[]")):
        (source / name).write_text(text)

    def beside(folder: Path) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')

    write_policy(TensorFolder(source).tensors(), source, tmp_path / "p", None, beside=beside)
    assert (tmp_path / "p/generation_config.json").read_text() == '{"eos_token_id": [1, 2]}'
    assert (tmp_path / "p/vocab.json").read_text() == "[]"


def test_block_quantized_policies_say_so(source: Path, tmp_path: Path) -> None:
    write_policy(TensorFolder(source).tensors(), source, tmp_path / "p", QuantMap.for_decoder(1, "fp8_block"))
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    written = load_file(tmp_path / "p" / "model-00001.safetensors")
    name = "model.layers.0.mlp.up_proj"
    assert written[f"{name}.weight"].dtype == torch.float8_e4m3fn
    restored = dequantize_block(written[f"{name}.weight"], written[f"{name}.weight_scale_inv"])
    # e4m3 keeps 3 bits after the point: at most 1/16 off, or half of the finest step near zero
    torch.testing.assert_close(restored, weights()[f"{name}.weight"], rtol=1 / 16, atol=0.02)
    assert written["lm_head.weight"].dtype == torch.float32


def test_writing_again_replaces_the_policy(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "p"
    write_policy(TensorFolder(source).tensors(), source, target, None)
    write_policy(((name, tensor + 1) for name, tensor in TensorFolder(source).tensors()), source, target, None)
    written = load_file(target / "model-00001.safetensors")
    assert torch.equal(written["model.norm.weight"], weights()["model.norm.weight"] + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "source"]


def test_a_failed_export_leaves_the_old_policy(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "p"
    write_policy(TensorFolder(source).tensors(), source, target, None)

    def broken() -> Any:
        yield "model.norm.weight", torch.ones(3)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_policy(broken(), source, target, None)
    check_weights(target, MODEL_CONFIG)


def test_truncated_files_and_bad_indexes_are_named(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        check_weights(source, MODEL_CONFIG)
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-9.safetensors"}}')
    with pytest.raises(ModelError, match=r"lacks model-9\.safetensors"):
        check_weights(source, MODEL_CONFIG)


def test_pruning_keeps_the_published_the_newest_and_the_future(tmp_path: Path) -> None:
    for version in (1, 3, 4, 6, 9):
        (tmp_path / f"{version:06}").mkdir()
    prune(tmp_path, 6, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000004", "000006", "000009"]
