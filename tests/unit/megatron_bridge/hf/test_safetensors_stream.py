"""Our reader and writer of safetensors against the library's."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_bridge.hf.headers import weight_files
from megatron_bridge.hf.safetensors_stream import DTYPES, ShardWriter, TensorFolder, TensorSpec, plan_shards
from megatron_bridge.hf.streaming_writer import write_weights

STATES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(sorted(DTYPES))),
    min_size=1,
    max_size=6,
)


def make(shape: list[int], dtype: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 4).to(DTYPES[dtype])


def same(left: Tensor, right: Tensor) -> bool:
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    )


@given(STATES, st.integers(1, 60), st.integers(1, 100))
@settings(max_examples=60)
def test_round_trip(state: dict[str, tuple[list[int], str]], piece_bytes: int, shard_bytes: int) -> None:
    tensors = {name: make(*entry, seed) for seed, (name, entry) in enumerate(state.items())}
    with tempfile.TemporaryDirectory() as scratch:
        library, ours = Path(scratch) / "library", Path(scratch) / "ours"
        library.mkdir()
        ours.mkdir()
        save_file(tensors, library / "model.safetensors")
        folder = TensorFolder(library)
        groups = [[spec] for spec in folder.specs.values()]
        pieces = ((name, piece) for name in folder.specs for piece in folder.pieces(name, piece_bytes=piece_bytes))
        manifest = write_weights(ours, groups, pieces, advance=lambda _: None, shard_bytes=shard_bytes)
        read = {name: tensor for file in weight_files(ours) for name, tensor in load_file(file).items()}
        assert read.keys() == tensors.keys() == manifest.keys()
        assert all(same(read[name], tensor) for name, tensor in tensors.items())
        assert all(same(folder.whole(name), tensor) for name, tensor in tensors.items())
        sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in weight_files(ours)]
        largest = max(tensor.nbytes for tensor in tensors.values())
        assert max(sizes) <= max(shard_bytes, largest)


def test_pieces_are_whole_multiples_of_rows(tmp_path: Path) -> None:
    save_file({"a": torch.arange(70.0).reshape(10, 7)}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    assert [len(piece) for piece in folder.pieces("a", multiple=4, piece_bytes=1)] == [4, 4, 2]
    assert torch.equal(folder.rows("a", 3, 2), torch.arange(21.0, 35.0).reshape(2, 7))


def test_a_file_that_is_not_complete_cannot_be_closed(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.safetensors", [TensorSpec("a", (2, 2), torch.float32)])
    writer.write("a", torch.zeros(1, 2))
    with pytest.raises(ValueError, match="lacks values of a"):
        writer.close()
    with pytest.raises(ValueError, match="too many"):
        writer.write("a", torch.zeros(2, 2))
    writer.abandon()


def test_every_tensor_starts_at_a_multiple_of_its_width(tmp_path: Path) -> None:
    specs = [
        TensorSpec("a", (3,), torch.uint8),
        TensorSpec("b", (1,), torch.bfloat16),
        TensorSpec("c", (1,), torch.int64),
    ]
    ShardWriter(tmp_path / "a.safetensors", specs).abandon()
    data = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert [header[name]["data_offsets"] for name in "cba"] == [[0, 8], [8, 10], [10, 13]]


def test_groups_stay_together() -> None:
    def spec(name: str, size: int) -> TensorSpec:
        return TensorSpec(name, (size,), torch.uint8)

    shards = plan_shards([[spec("a", 6)], [spec("b", 3), spec("c", 2)], [spec("d", 9)]], 10)
    assert [[entry.name for entry in shard] for shard in shards] == [["a"], ["b", "c"], ["d"]]
