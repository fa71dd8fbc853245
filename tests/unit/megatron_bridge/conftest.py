"""Imports Megatron-Core once, quietly. It calls much of itself and of torch deprecated."""

from pathlib import Path

import pytest

from tests.support import quiet_megatron  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))
