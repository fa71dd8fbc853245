"""A run to collect for, and one verifier process for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.task_sections import SortDigitsTask
from pipeline.data.run_directory import RunDirectory
from pipeline.rewards.pool import Verifiers
from pipeline.tasks import build_task
from tests.support.collecting import new_run


@pytest.fixture(scope="session")
def verifiers() -> Iterator[Verifiers]:
    with Verifiers(build_task(SortDigitsTask(), seed=0).reward, workers=1, deadline_s=30.0, sandbox=None) as pool:
        yield pool


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path)
