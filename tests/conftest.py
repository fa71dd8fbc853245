"""For all tests: profiles of property tests, the order in which two processes share the files, temporary files."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import pytest

from tests.support.examples import register_profiles

register_profiles()

SCRATCH = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """What is killed leaves its temporary files behind: they lie in one folder, which goes when the session ends.

    The folders of tmp_path are not among them; pytest keeps those of tests that failed.
    """
    if hasattr(config, "workerinput"):
        return
    tempfile.gettempdir()  # asked before the environment changes: it stays that of pytest
    config.stash[SCRATCH] = tempfile.mkdtemp(prefix="evenkeel-tests-")
    os.environ["TMPDIR"] = config.stash[SCRATCH]


def pytest_unconfigure(config: pytest.Config) -> None:
    """The end of the session."""
    if SCRATCH in config.stash:
        shutil.rmtree(config.stash[SCRATCH], ignore_errors=True)


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
