"""The quantization kernels, by Triton's interpreter, bit for bit against formats.py; and who chooses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from precision.formats import formats, streams
from tests.support.triton_folder import run_with_triton
from tests.support.weight_cases import NON_FINITE, OTHER_BLOCKS, WEIGHTS, gaussian, grid_and_ties, small

WORKER = "tests.support.quantize_triton_worker"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    run_with_triton(WORKER, folder / "results.safetensors", interpret=True, cache=folder)
    return folder / "results.safetensors"


@pytest.fixture(scope="module")
def errors(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as results:
        return dict(results.metadata())


def assert_same_bits(file: Path, name: str, wanted: tuple[Tensor, Tensor]) -> None:
    with safe_open(file, framework="pt") as results:
        quantized, scale = results.get_tensor(f"{name} q"), results.get_tensor(f"{name} s")
    assert quantized.dtype is formats.E4M3
    assert quantized.shape == wanted[0].shape
    torch.testing.assert_close(scale, wanted[1], rtol=0, atol=0)
    assert torch.equal(quantized.view(torch.uint8), wanted[0].contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", WEIGHTS)
def test_blocks(file: Path, name: str) -> None:
    assert_same_bits(file, f"{name} block", formats.quantize_block(WEIGHTS[name]()))


@pytest.mark.parametrize("block", OTHER_BLOCKS)
def test_other_blocks(file: Path, block: tuple[int, int]) -> None:
    assert_same_bits(file, f"small {block}", formats.quantize_block(small(), block))


def test_ties_go_to_even_by_hand(file: Path) -> None:
    """Between 16 and 18 (mantissas 0 and 1) 17 becomes 16; between 18 and 20 19 becomes 20; 2^-10 becomes 0."""
    weight = grid_and_ties()
    with safe_open(file, framework="pt") as results:
        rounded = results.get_tensor("grid_and_ties block q").float()
    for value, wanted in ((17.0, 16.0), (19.0, 20.0), (-19.0, -20.0), (2.0**-10, 0.0), (3 * 2.0**-10, 2.0**-8)):
        assert (rounded[weight == value] == wanted).all()
        assert (weight == value).any()


@pytest.mark.parametrize("name", NON_FINITE)
def test_a_non_finite_weight_is_refused(errors: dict[str, str], name: str) -> None:
    expected = "nan" if "nan" in name else "inf"
    assert errors[f"block {name}"].startswith(f"FloatingPointError: largest magnitude to quantize is {expected}, ")


def test_weights_on_a_cpu_are_quantized_by_torch() -> None:
    weight = WEIGHTS["ragged"]()
    for found, wanted in zip(streams.quantize_block(weight), formats.quantize_block(weight), strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_weights_on_a_gpu_are_quantized_by_the_kernel(file: Path) -> None:
    assert_same_bits(file, "chosen", formats.quantize_block(gaussian(130, 5)))
