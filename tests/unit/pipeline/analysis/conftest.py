"""A synthetic run, for what reads one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pipeline.analysis.report import write_report
from tests.support import written_runs

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """write_run(steps_done, steps=…, name=…, seconds=…, overrides={…}) → run directory."""
    return partial(written_runs.write_run, tmp_path)


@pytest.fixture(scope="session")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a finished run of 24 steps."""
    return write_report(written_runs.write_run(tmp_path_factory.mktemp("full"), 24)).read_text()
