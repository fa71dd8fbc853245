"""Everything below tests/cluster is marked `cluster`: `make test-cluster` runs it, `make test` does not.

A machine that cannot make namespaces fails these tests, with what it lacks; it does not skip them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.rig import Hosts, missing_for

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` is looked at."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def able() -> None:
    """Fails where hosts cannot be made."""
    if reason := missing_for():
        pytest.fail(reason, pytrace=False)


@pytest.fixture(scope="module")
def hosts(able: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Four hosts for the tests of a file, with a shared directory `hosts.shared`."""
    shared = tmp_path_factory.mktemp("shared")
    with Hosts(shared, keep=[ROOT]).up(4) as four:
        yield four
