"""Our writer of safetensors, and our reader by slices, against the library's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_bridge.hf import tensor_files
from megatron_bridge.hf.headers import DTYPES, weight_files
from megatron_bridge.hf.tensor_files import HEADER_BYTES, TensorFolder, whole_tensors, write_shards
from pipeline.ports.weights import TensorSpec
from tests.support.examples import examples

STATES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(sorted(DTYPES.values()))),
    min_size=1,
    max_size=6,
)


def make(shape: list[int], dtype: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 4).to(getattr(torch, dtype))


def same(left: Tensor, right: Tensor) -> bool:
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    )


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.iterdir()) for name, tensor in load_file(file).items()}


@given(STATES, st.integers(1, 60), st.integers(1, 100))
@settings(max_examples=examples(60))
def test_round_trip(state: dict[str, tuple[list[int], str]], piece_bytes: int, shard_bytes: int) -> None:
    tensors = {name: make(*entry, seed) for seed, (name, entry) in enumerate(state.items())}
    with tempfile.TemporaryDirectory() as scratch:
        library, ours = Path(scratch) / "library", Path(scratch) / "ours"
        library.mkdir()
        ours.mkdir()
        save_file(tensors, library / "model.safetensors")
        folder = TensorFolder(library)
        pieces = ((spec, folder.pieces(name, piece_bytes=piece_bytes)) for name, spec in folder.specs.items())
        told: list[int] = []
        manifest = write_shards(pieces, ours, shard_bytes=shard_bytes, advance=told.append)
        found = read(ours)
        assert found.keys() == tensors.keys() == manifest.keys()
        assert all(same(found[name], tensor) for name, tensor in tensors.items())
        assert all(same(folder.whole(name), tensor) for name, tensor in tensors.items())
        assert sum(told) == sum(tensor.nbytes for tensor in tensors.values())
        assert {name: entry["sha256"] for name, entry in manifest.items()} == {n: folder.digest(n) for n in tensors}
        sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in weight_files(ours)]
        assert max(sizes) <= max(shard_bytes, *(tensor.nbytes for tensor in tensors.values()))


def test_pieces_are_whole_multiples_of_rows(tmp_path: Path) -> None:
    save_file({"a": torch.arange(70.0).reshape(10, 7)}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    assert [len(piece) for piece in folder.pieces("a", multiple=4, piece_bytes=1)] == [4, 4, 2]
    assert [len(piece) for piece in folder.pieces("a", piece_bytes=3 * 28)] == [3, 3, 3, 1]
    assert torch.equal(folder.slice("a", (slice(3, 5), slice(0, 2))), torch.tensor([[21.0, 22.0], [28.0, 29.0]]))


def test_files_are_opened_anew_so_that_their_pages_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def open_counted(path: Path, framework: str) -> Any:
        opened.append(path)
        return safe_open(path, framework)

    save_file({"a": torch.zeros(10, 10)}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    monkeypatch.setattr(tensor_files, "safe_open", open_counted)
    monkeypatch.setattr(tensor_files, "REOPEN_BYTES", 100)
    assert sum(len(piece) for piece in folder.pieces("a", piece_bytes=40)) == 10
    assert len(opened) == 4  # after 3 rows of 40 bytes each


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_pieces_that_are_not_as_announced_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    spec = TensorSpec(name="a", dtype="float32", shape=(2, 2))
    with pytest.raises(ValueError, match=r"8 bytes, its shape needs 16|is torch\.int32, expected float32"):
        write_shards([(spec, [torch.zeros(1, 2, dtype=dtype)])], tmp_path)


def test_every_tensor_starts_at_a_multiple_of_its_width(tmp_path: Path) -> None:
    """The library cannot read others. A tensor that would not gets a file of its own."""
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1).bfloat16(), "c": torch.ones(2).long()}
    manifest = write_shards(whole_tensors(tensors.items()), tmp_path)
    assert [entry["file"] for entry in manifest.values()] == [f"model-{n:05}.safetensors" for n in (1, 2, 3)]
    assert all(same(read(tmp_path)[name], tensor) for name, tensor in tensors.items())


def test_a_file_ends_when_its_header_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "HEADER_BYTES", 1000)
    tensors = {f"tensor number {number}": torch.tensor([float(number)]) for number in range(40)}
    manifest = write_shards(whole_tensors(tensors.items()), tmp_path)
    assert len({entry["file"] for entry in manifest.values()}) > 3
    assert all(same(read(tmp_path)[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_is_written_before_the_next_is_asked_for(tmp_path: Path) -> None:
    """An exporter may reuse the memory."""
    buffer = torch.zeros(4)

    def stream() -> Iterator[tuple[str, Tensor]]:
        for value in (1.0, 2.0):
            buffer.fill_(value)
            yield f"is {value}", buffer

    write_shards(whole_tensors(stream()), tmp_path)
    assert {name: tensor.tolist() for name, tensor in read(tmp_path).items()} == {
        "is 1.0": [1.0] * 4,
        "is 2.0": [2.0] * 4,
    }
    data = (tmp_path / "model-00001.safetensors").read_bytes()
    assert len(data) == HEADER_BYTES + 32


class SomeError(Exception):
    """Raised by a stream of tensors."""


def failing_stream() -> Iterator[tuple[str, Tensor]]:
    yield "a", torch.ones(2)
    raise SomeError


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full, of Linux")
@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([("a", torch.ones(2)), ("b", torch.ones(2))], OSError, "No space left"),
        (failing_stream(), SomeError, "^$"),
    ],
    ids=["full in the middle", "another error before"],
)
def test_the_first_failure_is_the_one_that_is_raised(
    tmp_path: Path, tensors: Iterable[tuple[str, Tensor]], error: type[Exception], message: str
) -> None:
    (tmp_path / "model-00001.safetensors").symlink_to("/dev/full")
    with pytest.raises(error, match=message):
        write_shards(whole_tensors(tensors), tmp_path, shard_bytes=8)
