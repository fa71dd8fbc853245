"""Train the policy on Megatron-Core and send its weights to the engines.

Importing this package keeps parts of Megatron-Core from loading, in any order of imports. Its writers to W&B and
TensorBoard take each rank 1.5 s and leave two folders when the rank is killed; our exports read the run directory
(launch.export). torch compiles its fused operations, which takes as long and is useless on a CPU.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

WRITERS = ("wandb", "torch.utils.tensorboard")
_COMPILED = "megatron.core.jit"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in WRITERS and _importer().startswith("megatron."):
            raise ModuleNotFoundError(f"{fullname} is kept from Megatron-Core", name=fullname)
        if fullname == _COMPILED and (spec := PathFinder.find_spec(fullname, path, target)) is not None and spec.origin:
            spec.loader = _WithoutCompiler(fullname, spec.origin)
            return spec
        return None


class _WithoutCompiler(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if not module.torch.cuda.is_available():
            module.disable_jit_fuser()


def _importer() -> str:
    """Return the name of the module whose import statement is running."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


sys.meta_path.insert(0, _Finder())

# Megatron-Core warns on every import; `model.build.choose_layers` decides which layers are built.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")

# Transformer Engine reads this when it is imported: scales of 128×128 blocks are amax / 448, as in engines, instead of
# the next power of two. So learner.precision fp8_block multiplies by the same weights as rollouts in the same blocks.
os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
