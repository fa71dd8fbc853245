"""A micro-batch on a GPU lets the host run ahead: counted on a device that records what would make it wait."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.runs import ROOT, environment


def test_no_micro_batch_waits_for_the_device() -> None:
    """In a process of its own; see tests.support.counted_device."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.bench.host_waits"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counted = json.loads(done.stdout)
    for name in ("score", "train"):
        assert counted[name]["kernels"] > 100, "a micro-batch was counted"
        assert counted[name]["waits_of"] == {}
        # The micro-batch, and where its rows stand in the grids of Megatron's own attention.
        assert counted[name]["copies_of"] == {"pinned": 2}
