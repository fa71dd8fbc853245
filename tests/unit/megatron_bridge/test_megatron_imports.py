"""Megatron-Core finds no W&B and no TensorBoard; everybody else does."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import megatron_bridge
from megatron_bridge.megatron_imports import WRITERS

assert megatron_bridge, "it hides them"


@pytest.mark.parametrize("writer", WRITERS)
def test_only_megatron_does_not_find_a_writer(writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, writer, raising=False)
    with pytest.raises(ModuleNotFoundError, match="kept from Megatron-Core"):
        exec(f"import {writer}", {"__name__": "megatron.core.timers"})
    assert importlib.util.find_spec(writer) is not None
