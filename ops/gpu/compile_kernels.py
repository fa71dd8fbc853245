"""Compile every kernel for an H100 (sm_90); needs Triton, but no GPU: `python -m ops.gpu.compile_kernels [--json]`.

For each: registers a thread, bytes spilled, and the widest load and store, in bytes. Ends with 1 when a kernel spills,
or reads or writes its large tensor in less than 16 bytes at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_bridge.model import logprobs_triton
from precision.formats import quantize_triton
from precision.formats.formats import BLOCK

TARGET = GPUTarget("cuda", 90, 32)
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
VOCABULARY = 151_936
WIDE = 16
"""Bytes of the widest access that a thread can make."""


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of a kernel."""

    kernel: str
    dtype: str
    registers: int
    spilled_bytes: int
    load_bytes: int
    store_bytes: int

    @property
    def is_fast(self) -> bool:
        """Nothing in local memory, and full width wherever the large tensors are touched."""
        reads_only = self.kernel == "_statistics_kernel"
        return not self.spilled_bytes and self.load_bytes == WIDE and (reads_only or self.store_bytes == WIDE)


def compile_kernel(kernel: Any, dtype: str, types: Mapping[str, str], tile: Mapping[str, int]) -> Compiled:
    """`types` of the arguments, "*rows" being a pointer to `dtype`; pointers and integers are multiples of 16."""
    options = {name: tile[name] for name in ("num_warps", "maxnreg") if name in tile}
    constants = {name: value for name, value in tile.items() if name not in options}
    names: Sequence[str] = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types[name].replace("*rows", f"*{dtype}") for name in names
    }
    aligned = [(place,) for place, name in enumerate(names) if signature[name][0] in "*i"]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {place: [["tt.divisibility", 16]] for place in aligned},
    )
    ptx = triton.compile(source, target=TARGET, options=options).asm["ptx"]
    said = _assemble(ptx)
    return Compiled(
        kernel=kernel.__name__,
        dtype=dtype,
        registers=int(re.findall(r"Used (\d+) registers", said)[0]),
        spilled_bytes=sum(int(found) for found in re.findall(r"(\d+) bytes spill", said)),
        load_bytes=_widest(ptx, "ld"),
        store_bytes=_widest(ptx, "st"),
    )


def _assemble(ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx, encoding="utf-8")
        command = [PTXAS, "-v", "-arch=sm_90a", file, "-o", file.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=60)
    return done.stdout + done.stderr


def _widest(ptx: str, access: str) -> int:
    found = re.findall(rf"\b{access}\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    return max((int(count or 1) * int(bits) // 8 for count, bits in found), default=0)


def compile_all() -> list[Compiled]:
    """Every kernel in the dtypes that it meets."""
    rows = {name: "*rows" for name in ("rows", "target", "weight")}
    numbers = dict.fromkeys(("peaks", "sums", "normalizers", "scales"), "*fp32")
    integers = dict.fromkeys(("row_stride", "target_stride", "height", "width"), "i32")
    types = {
        **rows,
        **numbers,
        **integers,
        "wanted": "*i64",
        "quantized": "*fp8e4nv",
        "base2": "fp32",
    }
    block = quantize_triton.tile(BLOCK)
    return [
        compile_kernel(kernel, dtype, types, tile)
        for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4))
        for kernel, tile in (
            (logprobs_triton._statistics_kernel, logprobs_triton.tile(VOCABULARY, size)),
            (logprobs_triton._gradient_kernel, logprobs_triton.tile(VOCABULARY, size)),
            (quantize_triton._block_kernel, block),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    compiled = compile_all()
    if arguments.json:
        print(json.dumps([asdict(one) | {"is_fast": one.is_fast} for one in compiled]))
    else:
        for one in compiled:
            print(
                f"{one.kernel:20} {one.dtype}  {one.registers:3} registers  {one.spilled_bytes} bytes spilled  "
                f"loads of {one.load_bytes}, stores of {one.store_bytes} bytes{'' if one.is_fast else '  <- slow'}"
            )
    sys.exit(not all(one.is_fast for one in compiled))


if __name__ == "__main__":
    main()
