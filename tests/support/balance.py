"""The order in which files of tests are given to the processes of pytest: the longest first.

A file goes to one process as a whole, for its fixtures' sake. A process that has two tests left gets the next file;
with the longest first, both are busy to the end. Files that start the same engines go to one process, one after
another, since engines are started once a process (tests.support.engines).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

ENGINES = "tests/integration/test_engine.py"
SHARE_ENGINES = (
    ENGINES,
    "tests/integration/test_weight_check.py",
)
"""The file that may end an engine stays last."""

SECONDS = {
    "tests/chaos/kills/test_kills.py": 370,
    "tests/integration/test_run_processes.py": 700,
    "tests/integration/test_feature_runs.py": 450,
    "tests/integration/test_loop.py": 260,
    "tests/chaos/endurance/test_endurance.py": 230,
    "tests/integration/test_own_run_page.py": 207,
    "tests/integration/test_mismatch.py": 205,
    "tests/integration/test_delta.py": 90,
    "tests/integration/test_convert.py": 154,
    "tests/integration/test_broadcast.py": 135,
    "tests/integration/test_quant_map.py": 129,
    "tests/integration/test_plan_memory.py": 50,
    "tests/integration/test_images.py": 106,
    "tests/integration/test_kept_kv.py": 104,
    "tests/integration/test_objectives.py": 101,
    "tests/unit/megatron_bridge/step/test_fp8_emulation.py": 97,
    "tests/integration/test_agents.py": 140,
    "tests/integration/test_shares.py": 95,
    "tests/integration/test_ipc.py": 93,
    "tests/integration/test_kept_sets.py": 91,
    ENGINES: 81,
    "tests/unit/megatron_bridge/checkpoint/test_checkpoint_layers.py": 81,
    "tests/integration/test_notebook.py": 77,
    "tests/integration/test_parity.py": 75,
}
"""As measured, in `make test` or `make test-slow`, whichever takes longer. What is not listed counts its tests; nothing
but the order depends on it."""


class LongestFirst(LoadFileScheduling):
    """pytest-xdist's `--dist loadfile`, with files in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # xdist would begin with the files that have most tests

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def sort_by_length(items: list[pytest.Item]) -> None:
    """Sort the items of a session in place: files by their seconds, the tests of a file as they were."""
    counts = Counter(unit_of(item.nodeid) for item in items)

    def place(item: pytest.Item) -> tuple[float, str, bool]:
        unit = unit_of(item.nodeid)
        return -SECONDS.get(unit, counts[unit] / 10), unit, item.nodeid.startswith(f"{ENGINES}::")

    items.sort(key=place)


def unit_of(nodeid: str) -> str:
    """The file of a test, or the file that stands for those that share its engines."""
    file = nodeid.partition("::")[0]
    return ENGINES if file in SHARE_ENGINES else file
