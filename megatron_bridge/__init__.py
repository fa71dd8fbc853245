"""The learner on Megatron-Core, and the sending side of the weight channel.

A process that imports it imports less of Megatron-Core than Megatron-Core asks for, whether Megatron is imported before
or after other packages. Its writers to W&B and TensorBoard take a rank a second and a half, and two folders that stay
when it is killed; ours draw from the run directory (launch.export). Its fused operations are compiled by torch, whose
compiler takes as long; on a CPU none is in use.
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
    """The name of the module whose import statement is under way."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


sys.meta_path.insert(0, _Finder())

# Megatron-Core says so on every import; `model.choose_layers` decides what is built.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")

# Read by Transformer Engine when it is imported: scales of 128×128 blocks as engines have them, amax / 448, instead of
# the next power of two, so that learner.precision fp8_block multiplies by the weights that rollouts multiply by, where
# its blocks are theirs.
os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
