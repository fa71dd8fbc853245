"""Stubs of GPU packages survive what SGLang does with them while its modules load."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from rollout_sglang.cpu.stubs import Stub, StubFinder


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "evenkeel_missing_package"
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, StubFinder([name])])
    yield name
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


def test_submodules_classes_and_functions_can_be_imported(stubbed: str) -> None:
    module = importlib.import_module(f"{stubbed}.deep.module")
    assert isinstance(module.Kernel, type)

    class Mine(module.Kernel[int]):  # type: ignore[misc, name-defined]
        """Subclassing a subscripted stub class."""

    assert isinstance(Mine(1, key=2), module.Kernel)
    with pytest.raises(NotImplementedError, match=r"deep\.module\.launch"):
        module.launch(1, 2)


def test_packages_that_are_not_named_stay_missing(stubbed: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("evenkeel_other_missing_package")


def test_decorators_leave_functions_as_they_are() -> None:
    def kernel() -> int:
        return 3

    jit, autotune = Stub("triton.jit"), Stub("triton.autotune")
    assert jit(kernel) is kernel
    assert jit(do_not_specialize=["n"])(kernel) is kernel
    assert autotune([1, 2], key=["n"])(kernel) is kernel
