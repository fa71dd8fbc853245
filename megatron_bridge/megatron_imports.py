"""What Megatron-Core imports wherever it is installed, though a learner never uses it.

It can draw its own timers by W&B and TensorBoard. Ours are drawn from the run directory (launch.export), by another
program. To import W&B takes a rank a second and a half at its start, and two folders in its temporary directory, which
stay when it is killed.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

WRITERS = ("wandb", "torch.utils.tensorboard")


class _WithoutWriters(MetaPathFinder):
    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname in WRITERS and _importer().startswith("megatron."):
            raise ModuleNotFoundError(f"{fullname} is kept from Megatron-Core", name=fullname)


def _importer() -> str:
    """The name of the module whose import statement is under way."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def hide_writers() -> None:
    """From Megatron-Core, in this process; everybody else may import them. Before it is imported."""
    if not any(isinstance(finder, _WithoutWriters) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WithoutWriters())
