"""`vocab_kernels_worker FILE`: the cases of tests.support.vocab_cases by Triton's interpreter, results as safetensors.

Run with TRITON_INTERPRET=1 and Triton on the path.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from triton.runtime import interpreter

from megatron_bridge.model import logprobs as logprobs_module
from megatron_bridge.model import logprobs_triton
from megatron_bridge.model.logprobs import vocab_parallel_logprobs
from tests.support.vocab_cases import CASES, NUM_SLICES, Case, slices


def outcome(case: Case) -> dict[str, Tensor]:
    """Through autograd, as a learner calls it."""
    leaf = case.logits.detach().requires_grad_()
    logits = leaf.view_as(leaf)  # what autograd lets us overwrite
    before = leaf.detach().clone()
    logprobs, entropy = vocab_parallel_logprobs(
        logits, case.tokens, temperature=case.temperature, group=None, overwrite_logits=case.overwrite
    )
    (gradient,) = torch.autograd.grad(logprobs, logits, case.upstream, retain_graph=True)
    unchanged = torch.equal(before.nan_to_num(), leaf.detach().nan_to_num())
    refused = False
    try:
        logprobs.backward(case.upstream)
    except RuntimeError as error:
        refused = "modified by an inplace operation" in str(error)
    return dict(
        logprobs=logprobs.detach(),
        entropy=entropy,
        gradient=gradient.contiguous(),
        logits_are_kept=torch.tensor(unchanged),
        refuses_a_second_backward=torch.tensor(refused),
    )


def sliced() -> dict[str, Tensor]:
    """Statistics [NUM_SLICES, ...] of each slice of the vocabulary, as ranks would hand them to their all-reduces."""
    logits, tokens = slices()
    width = logits.shape[1] // NUM_SLICES
    parts = [
        logprobs_triton.statistics(logits[:, rank * width : (rank + 1) * width], tokens - rank * width, 0.8)
        for rank in range(NUM_SLICES)
    ]
    return dict(peaks=torch.stack([peak for peak, _ in parts]), sums=torch.stack([sums for _, sums in parts]))


def far_apart() -> dict[str, Tensor]:
    """Rows whose last lies beyond 2^31 elements; only what is touched takes memory."""
    memory = torch.empty((1 << 31) + 64, dtype=torch.bfloat16)
    rows = memory.as_strided((3, 64), (1 << 30, 1))
    rows.copy_(torch.arange(3 * 64).view(3, 64) % 7)
    tokens = torch.tensor([3, 4, 5])
    peak, sums = logprobs_triton.statistics(rows, tokens, 1.0)
    logprobs_triton.write_gradient(rows, tokens, peak + sums[0].log(), torch.ones(3), 1.0, rows)
    return dict(peak=peak, sums=sums.contiguous(), gradient=rows.clone())


def chosen() -> dict[str, Tensor]:
    """Whether logits on a GPU would come to the kernels, by dtype."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    found = {
        dtype: logprobs_module._back_end(cast(Tensor, SimpleNamespace(is_cuda=True, dtype=dtype))) for dtype in dtypes
    }
    return {str(dtype): torch.tensor(module is logprobs_triton) for dtype, module in found.items()}


def main(path: str) -> None:
    torch.set_num_threads(1)
    keep_in_place: Any = lambda *_: None  # noqa: E731
    interpreter.GridExecutor._restore_args_dev = keep_in_place  # copies storages onto themselves, 4 GiB in one case
    found = {"chosen": chosen()}
    logprobs_module._back_end = lambda logits: logprobs_triton
    found |= {name: outcome(make()) for name, make in CASES.items()}
    found |= {"sliced": sliced(), "far_apart": far_apart()}
    save_file({f"{case}.{name}": value for case, values in found.items() for name, value in values.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
