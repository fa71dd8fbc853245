"""What Megatron-Core and mbridge import wherever they are installed, though a learner never uses it.

Megatron-Core can draw its own timers by W&B and TensorBoard. Ours are drawn from the run directory (launch.export), by
another program. To import W&B takes a rank a second and a half at its start, and two folders in its temporary
directory, which stay when it is killed.

mbridge imports every model that it knows, pictures and all. A rank needs the names of one.

Megatron-Core has its fused operations compiled by torch. On a CPU none is in use. The compiler and mbridge's models
together were four tenths of the processor time that a rank takes to import a learner.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

WRITERS = ("wandb", "torch.utils.tensorboard")
EVERY_MODEL = ("mbridge", "mbridge.models")
"""Packages that import all of their modules. Here they are namespaces: what is in them is imported by its own name."""
COMPILED = "megatron.core.jit"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in WRITERS and _importer().startswith("megatron."):
            raise ModuleNotFoundError(f"{fullname} is kept from Megatron-Core", name=fullname)
        if fullname in EVERY_MODEL and (spec := PathFinder.find_spec(fullname, path, target)) is not None:
            spec.loader = None  # so a package is a namespace
            return spec
        if fullname == COMPILED and (spec := PathFinder.find_spec(fullname, path, target)) is not None and spec.origin:
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


def import_less() -> None:
    """In this process, from here on. Call it before either is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
