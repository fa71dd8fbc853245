"""Reading a distributed checkpoint by hand: what its index may contain, and where HF tensors lie in it."""

from __future__ import annotations

import enum
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from megatron_bridge.checkpoint.dcp import CheckpointIndex, StoredTensor, find_sources, stream_hf_tensors
from megatron_bridge.hf.model_config import ModelConfig
from pipeline.errors import CorruptCheckpointError

MODEL_CONFIG = ModelConfig.from_hf(
    dict(
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=2,
        hidden_size=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,
        intermediate_size=3,
        vocab_size=5,
        max_position_embeddings=8,
        tie_word_embeddings=True,
    )
)


def megatron_state() -> dict[str, Tensor]:
    """Whole tensors, as Megatron-Core names and stacks them; every value is another one."""
    sizes = {
        "embedding.word_embeddings.weight": (5, 4),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 4),
        "decoder.layers.self_attention.linear_qkv.weight": (2, 16, 4),
        "decoder.layers.self_attention.q_layernorm.weight": (2, 2),
        "decoder.layers.self_attention.k_layernorm.weight": (2, 2),
        "decoder.layers.self_attention.linear_proj.weight": (2, 4, 8),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 4),
        "decoder.layers.mlp.linear_fc1.weight": (2, 6, 4),
        "decoder.layers.mlp.linear_fc2.weight": (2, 4, 3),
        "decoder.final_layernorm.weight": (4,),
    }
    numbers = iter(range(10_000))
    return {
        name: torch.tensor([float(next(numbers)) for _ in range(torch.Size(size).numel())]).reshape(size)
        for name, size in sizes.items()
    }


def write(folder: Path, state: dict[str, Tensor]) -> Path:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", megatron_state())


def test_an_index_of_another_python_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2 pickles a member of an enumeration as getattr(class, name), 3.11.7 as class(value)."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    folder = write(tmp_path / "checkpoint", megatron_state())
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert CheckpointIndex(folder).tensors.keys() == megatron_state().keys()


@pytest.mark.parametrize("wanted", [(torch.Size, "numel"), (_MEM_FORMAT_ENCODING, "__class__")])
def test_an_index_fetches_no_attribute(checkpoint: Path, wanted: tuple[object, str]) -> None:
    class Fetched:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, wanted

    (checkpoint / ".metadata").write_bytes(pickle.dumps(Fetched()))
    with pytest.raises(CorruptCheckpointError, match=r"getattr.* does not belong into the index"):
        CheckpointIndex(checkpoint)


def test_hf_tensors_by_hand(checkpoint: Path) -> None:
    state = megatron_state()
    found = dict(stream_hf_tensors(CheckpointIndex(checkpoint), MODEL_CONFIG))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == MODEL_CONFIG.tensors()
    # Two groups of (query, query, key, value) heads of two rows each.
    qkv = state["decoder.layers.self_attention.linear_qkv.weight"][1]
    prefix = "model.layers.1.self_attn"
    assert torch.equal(found[f"{prefix}.q_proj.weight"], qkv[[0, 1, 2, 3, 8, 9, 10, 11]])
    assert torch.equal(found[f"{prefix}.k_proj.weight"], qkv[[4, 5, 12, 13]])
    assert torch.equal(found[f"{prefix}.v_proj.weight"], qkv[[6, 7, 14, 15]])
    fc1 = state["decoder.layers.mlp.linear_fc1.weight"][0]
    assert torch.equal(found["model.layers.0.mlp.gate_proj.weight"], fc1[:3])
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], fc1[3:])
    assert torch.equal(found["model.norm.weight"], state["decoder.final_layernorm.weight"])


def drop(tensors: dict[str, StoredTensor]) -> None:
    del tensors["decoder.layers.mlp.linear_fc2.weight"]


def widen(tensors: dict[str, StoredTensor]) -> None:
    name = "decoder.layers.mlp.linear_fc1.weight"
    tensors[name] = replace(tensors[name], shape=(2, 8, 4))


def rename(tensors: dict[str, StoredTensor]) -> None:
    tensors["decoder.final_norm.weight"] = tensors.pop("decoder.final_layernorm.weight")


def deepen(tensors: dict[str, StoredTensor]) -> None:
    for name, entry in tensors.items():
        if name.startswith("decoder.layers."):
            tensors[name] = replace(entry, shape=(3, *entry.shape[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "linear_fc2.weight is missing .model.layers.0.mlp.down_proj.weight"),
        (widen, r"linear_fc1.weight has shape \[8, 4\], expected \[6, 4\]"),
        (rename, "final_layernorm.weight is missing.*decoder.final_norm.weight is not part of it"),
        (deepen, "stacks 3 layers, expected 2"),
    ],
)
def test_a_difference_from_the_model_is_named(checkpoint: Path, change: Any, message: str) -> None:
    tensors = dict(CheckpointIndex(checkpoint).tensors)
    change(tensors)
    with pytest.raises(CorruptCheckpointError, match=message):
        find_sources(checkpoint, tensors, MODEL_CONFIG)


class _Shell:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


class _Save:
    def __reduce__(self) -> Any:
        return torch.save, ({}, "pwned")


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(_Shell()),
        pickle.dumps(_Save()),
        b"",
        b"\x80\x04.",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
        pickle.dumps({"a": 1}),
    ],
)
def test_an_index_that_is_something_else_is_refused(
    checkpoint: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="not the index of a distributed checkpoint"):
        CheckpointIndex(checkpoint)
    assert not (checkpoint / "pwned").exists()


def lie(checkpoint: Path, change: Callable[[Any, Any], object]) -> None:
    """Change the index's account of one tensor: (entry, place of its first box)."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())  # noqa: S301 - our own
    name = "decoder.final_layernorm.weight"
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
    change(metadata.state_dict_metadata[name], place)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "change",
    [
        lambda entry, place: setattr(entry, "size", torch.Size([2**40])),
        lambda entry, place: setattr(entry, "size", (-1,)),
        lambda entry, place: setattr(entry, "properties", None),
        lambda entry, place: setattr(entry.chunks[0], "sizes", torch.Size([2**40])),
        lambda entry, place: setattr(entry.chunks[0], "sizes", ()),
        lambda entry, place: setattr(entry.chunks[0], "offsets", (-1,)),
        lambda entry, place: setattr(place, "offset", "x"),
        lambda entry, place: setattr(place, "length", 10**25),
        lambda entry, place: setattr(place, "relative_path", ".."),
        lambda entry, place: setattr(place, "relative_path", "a" * 5000),
        lambda entry, place: setattr(place, "relative_path", None),
    ],
)
def test_an_index_that_lies_about_a_tensor_is_refused_before_there_is_memory_for_it(
    checkpoint: Path, change: Callable[[Any, Any], object]
) -> None:
    lie(checkpoint, change)
    with pytest.raises(CorruptCheckpointError) as refused:
        CheckpointIndex(checkpoint).read("decoder.final_layernorm.weight")
    assert len(str(refused.value)) < 500


def test_a_shortened_file_is_named(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=file.name):
        CheckpointIndex(checkpoint)


def test_damaged_values_are_an_error_that_names_the_file(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(b"\0" * file.stat().st_size)
    index = CheckpointIndex(checkpoint)
    with pytest.raises(CorruptCheckpointError, match=file.name):
        index.read("decoder.final_layernorm.weight")


def test_a_tensor_with_a_missing_box_is_refused(checkpoint: Path) -> None:
    """Its values would be whatever the memory held."""
    index, name = CheckpointIndex(checkpoint), "decoder.layers.mlp.linear_fc2.weight"
    index.tensors[name] = replace(index.tensors[name], boxes=())
    with pytest.raises(CorruptCheckpointError, match=f"the boxes of {name} hold 0 of its 24 values"):
        index.read(name)
