"""The vocabulary kernels' arithmetic, by Triton's interpreter, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_bridge.model.logprobs import rebase
from tests.support.triton_folder import run_with_triton
from tests.support.vocab_cases import CASES, NUM_SLICES, U, assert_gradient, assert_values, slices

WORKER = "tests.support.logprobs_triton_worker"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """`case.name` → tensor."""
    folder = tmp_path_factory.mktemp("kernels")
    run_with_triton(WORKER, folder / "results.safetensors", interpret=True, cache=folder)
    return load_file(folder / "results.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_values(results: dict[str, Tensor], name: str) -> None:
    assert_values(CASES[name](), results[f"{name}.logprobs"], results[f"{name}.entropy"])


@pytest.mark.parametrize("name", CASES)
def test_gradient(results: dict[str, Tensor], name: str) -> None:
    assert_gradient(CASES[name](), results[f"{name}.gradient"])


def test_slices_of_the_vocabulary_add_up(results: dict[str, Tensor]) -> None:
    logits, tokens = slices()
    width = logits.shape[1] // NUM_SLICES
    peaks, sums = results["sliced.peaks"], results["sliced.sums"]
    wanted_peaks = torch.stack([part.amax(-1) for part in logits.chunk(NUM_SLICES, -1)]).double() / 0.8
    finite = wanted_peaks.isfinite()
    torch.testing.assert_close(peaks[finite].double(), wanted_peaks[finite], rtol=4 * U, atol=0)
    top = peaks.amax(0)
    here = torch.stack([tokens // width == rank for rank in range(NUM_SLICES)])
    assert bool((sums[:, 1][~here] == 0).all())
    total = sum(rebase(peaks[rank], sums[rank], top, here[rank]) for rank in range(NUM_SLICES))
    assert isinstance(total, Tensor)
    logprobs = torch.log_softmax(logits.double() / 0.8, -1)
    entropy = -torch.where(logprobs > -math.inf, logprobs.exp() * logprobs, 0).sum(-1)
    picked = logprobs.gather(-1, tokens[:, None])[:, 0]
    log_sum = total[0].log()
    bound = 4 * U * float(logits[logits.isfinite()].abs().max()) / 0.8
    torch.testing.assert_close((total[1] - log_sum).double(), picked, rtol=0, atol=bound)
    torch.testing.assert_close((log_sum - total[2] / total[0]).double(), entropy, rtol=0, atol=bound)


def test_rows_beyond_2_to_the_31_elements(results: dict[str, Tensor]) -> None:
    rows = (torch.arange(3 * 64).view(3, 64) % 7).double()
    torch.testing.assert_close(results["far_apart.peak"], torch.full((3,), 6.0), rtol=4 * U, atol=0)
    wanted = -torch.softmax(rows, -1)
    wanted[range(3), (3, 4, 5)] += 1
    torch.testing.assert_close(results["far_apart.gradient"].double(), wanted, rtol=2.0**-7, atol=0)


def test_logits_on_a_gpu_come_to_the_kernels(results: dict[str, Tensor]) -> None:
    chosen = {name: bool(value) for name, value in results.items() if name.startswith("chosen.")}
    assert chosen == {
        "chosen.torch.bfloat16": True,
        "chosen.torch.float16": True,
        "chosen.torch.float32": True,
        "chosen.torch.float64": False,
    }
