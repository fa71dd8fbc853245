"""What is said about a folder whose tensors are not those of its config.json."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_bridge.hf.headers import check_weights
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.hf.tensor_files import TensorFolder
from pipeline.errors import ModelError

MODEL_CONFIG = ModelConfig.from_hf(
    dict(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=16,
        max_position_embeddings=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=4,
    )
)
UP, DOWN = (f"model.layers.0.mlp.experts.1.{part}_proj.weight" for part in ("up", "down"))
Tensors = dict[str, Tensor]


def write(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = {name: torch.zeros(size) for name, size in MODEL_CONFIG.tensors().items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        check_weights(folder, MODEL_CONFIG)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_whole_folder_passes(tmp_path: Path) -> None:
    check_weights(write(tmp_path, lambda tensors: None), MODEL_CONFIG)


def test_missing_and_misshapen_are_named_together(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[UP]
        tensors[DOWN] = tensors[DOWN].T.contiguous()

    message = refusal(write(tmp_path, change))
    assert f"{UP} is missing" in message
    assert f"{DOWN} has shape [4, 8], expected [8, 4]" in message


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({UP: torch.zeros(4, 8)}, write(tmp_path, lambda tensors: None) / "other.safetensors")
    assert f"holds {UP} twice, in model.safetensors and other.safetensors; remove the file" in refusal(tmp_path)


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path, lambda tensors: None) / "model.safetensors"
    shutil.copyfile(whole, tmp_path / "model-00001.safetensors")
    index = dict(weight_map=dict.fromkeys(MODEL_CONFIG.tensors(), "model-00001.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert "holds model.safetensors, which transformers reads, and model.safetensors.index.json" in refusal(tmp_path)
    whole.unlink()
    check_weights(tmp_path, MODEL_CONFIG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named_by_whatever_reads_it(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
        tensors[UP][3, 7] = value

    folder = TensorFolder(write(tmp_path, spoil))
    assert folder.whole(DOWN).dtype == dtype
    assert not folder.slice(UP, (slice(0, 3),)).any()
    for read in (folder.whole, lambda name: folder.slice(name, (slice(2, 4),)), folder.digest):
        with pytest.raises(ModelError, match=rf"model\.safetensors: {re.escape(UP)} holds values that are not finite"):
            read(UP)
