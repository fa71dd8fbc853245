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
    "tests/integration/test_sampling_contract.py",
    "tests/integration/test_weight_check.py",
    "tests/integration/test_engine_metrics.py",
)
"""The file that may end an engine stays last."""

SECONDS = {
    "tests/integration/test_hung_engines.py": 600,
    "tests/integration/test_loop.py": 120,
    "tests/chaos/kills/test_kills.py": 115,
    "tests/integration/test_own_run_page.py": 80,
    "tests/integration/test_broadcast.py": 90,
    ENGINES: 60,
    "tests/integration/test_convert.py": 35,
    "tests/integration/test_curriculum.py": 35,
    "tests/integration/test_mini_batches.py": 35,
    "tests/integration/test_parity.py": 30,
    "tests/integration/test_recipes.py": 30,
    "tests/integration/test_bad_input.py": 30,
    "tests/integration/test_objectives.py": 28,
    "tests/unit/megatron_bridge/checkpoint/test_checkpoint_layers.py": 24,
    "tests/unit/megatron_bridge/weights/test_name_map.py": 20,
    "tests/unit/rollout_sglang/test_fleet.py": 20,
    "tests/integration/test_layouts.py": 20,
    "tests/integration/test_ipc.py": 20,
    "tests/integration/test_learner.py": 17,
    "tests/unit/gpu/test_gpu_harness.py": 12,
    "tests/unit/pipeline/rewards/test_pool.py": 12,
    "tests/integration/test_weights.py": 12,
    "tests/unit/support/test_ranks.py": 10,
    "tests/integration/test_engine_experts.py": 10,
}
"""On two cores. What is not listed counts its tests; nothing but the order depends on it."""


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
        return -SECONDS.get(unit, counts[unit] / 100), unit, item.nodeid.startswith(f"{ENGINES}::")

    items.sort(key=place)


def unit_of(nodeid: str) -> str:
    """The file of a test, or the file that stands for those that share its engines."""
    file = nodeid.partition("::")[0]
    return ENGINES if file in SHARE_ENGINES else file
