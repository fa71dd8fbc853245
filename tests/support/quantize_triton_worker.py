"""`quantize_triton_worker FILE`: tests.support.weight_cases by Triton's interpreter, results as safetensors.

Run with TRITON_INTERPRET=1 and Triton on the path. The file's metadata has the errors, by case. The interpreter rounds
the product of a multiply-add, and ties of e4m3 away from zero; a GPU does neither, nor do we here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from safetensors.torch import save_file
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

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


def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
    """x·y + z of float32 in one rounding: float64 holds the product, and the sum but for bits that decide nothing."""
    exact = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(exact.astype(np.float32), z.dtype.scalar)


def converted(builder: Any, source: Any, target: Any, rounding: Any) -> Any:
    """To e4m3 by torch, which rounds ties to even."""
    if target.scalar != tl.float8e4nv:
        return convert(builder, source, target, rounding)
    rounded = torch.from_numpy(np.array(source.data)).to(torch.float8_e4m3fn)
    return TensorHandle(rounded.view(torch.uint8).numpy(), target.scalar)


convert = InterpreterBuilder.create_fp_to_fp
InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.create_fma = converted, fused


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
