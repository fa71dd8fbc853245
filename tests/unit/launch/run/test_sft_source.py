"""What a supervised run is trained on stays the same when it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.run.sft import Source
from pipeline.analysis.run_log import SFT_FILE
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RunConflictError, StoreError
from tests.support.written_runs import write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(write_run(tmp_path, 0))


def rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text('{"prompt": "1=", "response": "1"}\n')
    return path


def test_another_source_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    Source.of(8, None, None).freeze(run)
    Source.of(8, None, None).freeze(run)
    with pytest.raises(RunConflictError, match="was begun with batch_size 8, got 16"):
        Source.of(16, None, None).freeze(run)
    with pytest.raises(RunConflictError, match=r"was begun with data None, got .*rows\.jsonl"):
        Source.of(8, rows(tmp_path), None).freeze(run)


def test_a_new_run_takes_any(run: RunDirectory, tmp_path: Path) -> None:
    Source.of(8, rows(tmp_path), None).freeze(run)
    assert Source.read(run).sha256 is not None


@pytest.mark.parametrize("text", ["", "{", '{"batch_size": 8, "of_tomorrow": 1}', '{"batch_size": "many"}'])
def test_a_damaged_file_is_one_line(run: RunDirectory, text: str) -> None:
    (run.path / SFT_FILE).write_text(text)
    with pytest.raises(StoreError, match=r"sft\.json does not say what the run is trained on; put back a copy"):
        Source.of(8, None, None).freeze(run)
