"""`quantize_triton_worker FILE`: tests.support.weight_cases by Triton's interpreter, results as safetensors.

Run with TRITON_INTERPRET=1 and Triton on the path. The file's metadata has the errors, by case.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from precision.formats import quantize_triton, streams
from precision.formats.quantize_triton import quantize_block
from tests.support.weight_cases import NON_FINITE, OTHER_BLOCKS, WEIGHTS, gaussian, small


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (FloatingPointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(path: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)  # the interpreter's, at NaN
    results = {}
    for name, make in WEIGHTS.items():
        results[f"{name} block"] = quantize_block(make())
    results |= {f"small {block}": quantize_block(small(), block) for block in OTHER_BLOCKS}
    with mock.patch.object(quantize_triton, "quantize_block", wraps=quantize_block) as kernel:
        results["chosen"] = streams.quantize_block(gaussian(130, 5).as_subclass(OnGpu))
    assert kernel.call_count == 1
    errors = {f"block {name}": message(lambda make=make: quantize_block(make())) for name, make in NON_FINITE.items()}
    errors |= {"empty": message(lambda: quantize_block(torch.ones(0, 4)))}
    errors |= {"vector": message(lambda: quantize_block(torch.ones(4)))}
    tensors = {
        f"{case} {part}": value for case, pair in results.items() for part, value in zip("qs", pair, strict=True)
    }
    save_file(tensors, path, metadata=errors)


if __name__ == "__main__":
    main(sys.argv[1])
