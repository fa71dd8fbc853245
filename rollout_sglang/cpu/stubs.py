"""Provide importable stand-ins for GPU packages that SGLang imports but never calls on a CPU.

SGLang imports triton, torchvision, soundfile and sgl_kernel unconditionally, and decorates kernels with `triton.jit` at
import. A stub survives import, attribute access, subclassing and decoration; a call raises NotImplementedError.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

STUBBED_PACKAGES = ("triton", "torchvision", "soundfile", "sgl_kernel")

_DECORATORS = frozenset({"triton.jit", "triton.autotune", "triton.heuristics"})


class Stub(types.ModuleType):
    """A missing module, function or class. Capitalized names in it are classes, others are stubs again."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        value: Any
        if full_name in _IMPLEMENTED:
            value = _IMPLEMENTED[full_name]
        elif name[0].isupper():
            value = type(name, (_StubObject,), {"__module__": self.__name__})
        else:
            value = sys.modules.setdefault(full_name, Stub(full_name))
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.__name__ in _DECORATORS and not (len(args) == 1 and callable(args[0])):
            return lambda function: function
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        raise NotImplementedError(f"{self.__name__} is a stub of a GPU package that this machine lacks, but was called")


class _StubObject:
    """Base of a stub's classes: takes any arguments, and can be indexed like a generic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


# The names whose values modules use at import.
_IMPLEMENTED: dict[str, Any] = {
    "triton.cdiv": lambda numerator, denominator: -(-numerator // denominator),
    "triton.next_power_of_2": lambda number: 1 << max(0, number - 1).bit_length(),
    "triton.language.constexpr": lambda value: value,
    "torchvision.transforms.InterpolationMode": enum.Enum(
        "InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
    ),
}


class StubFinder(MetaPathFinder, Loader):
    """A finder of the given packages, after every real finder has failed."""

    def __init__(self, packages: Iterable[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] not in self.packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install_stubs() -> None:
    """Stub the packages that are not installed. A second call changes nothing."""
    missing = tuple(name for name in STUBBED_PACKAGES if importlib.util.find_spec(name) is None)
    if "torchvision" in missing:
        # transformers caches its first check: let it see that torchvision is missing, before the stub exists.
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()
        import_utils.is_torchvision_v2_available()
    if missing:
        sys.meta_path.append(StubFinder(missing))
