"""Megatron-Core is kept from importing what a learner never uses, and nobody else is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from megatron_bridge import WRITERS
from tests.support.runs import ROOT, environment


@pytest.mark.parametrize("writer", WRITERS)
def test_only_megatron_does_not_find_a_writer(writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, writer, raising=False)
    with pytest.raises(ModuleNotFoundError, match="kept from Megatron-Core"):
        exec(f"import {writer}", {"__name__": "megatron.core.timers"})
    assert importlib.util.find_spec(writer) is not None


def test_a_learner_on_a_cpu_loads_no_compiler() -> None:
    code = "import sys, megatron_bridge.learner; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = set(done.stdout.split())
    assert "megatron.core" in loaded
    assert not loaded & {"torch._dynamo", "torch._inductor"}
