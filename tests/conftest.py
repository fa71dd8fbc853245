"""For all tests: profiles of property tests, and the order in which two processes share the files."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.examples import register_profiles

register_profiles()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` begins with the longest files."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.balance import LongestFirst

    return LongestFirst(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorted the same in every process, which pytest-xdist asks for."""
    from tests.support.balance import sort_by_length

    sort_by_length(items)
