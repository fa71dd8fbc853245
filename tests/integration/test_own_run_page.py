"""docs/own-run.md: from an empty folder, by the commands of the page alone, to a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.event_log import read_events, read_metrics
from tests.support.page_shell import run_page
from tests.support.pages import ROOT, blocks

PAGE = ROOT / "docs" / "own-run.md"

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every command of the page was run, in one shell."""
    folder, programs = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("bin")
    run_page("\n".join(blocks(PAGE, "sh")), folder, programs, deadline_s=560, without="JUDGE_")
    return folder


def test_the_run_of_the_page_is_finished_and_each_source_was_rewarded(folder: Path) -> None:
    metrics = read_metrics(folder / "runs/first")
    assert [line["step"] for line in metrics] == [0, 1]
    for line in metrics:
        assert {name: found["share"] for name, found in line["sources"].items()} == {"sums": 0.75, "words": 0.25}
        assert set(line["reward_parts"]) == {"right", "digits", "level", "tokens"}
        assert line["verifier_failures"] == 0.0, "the judge was busy now and then, and was asked again"
    (first, *_) = read_events(folder / "runs/first", "evaluated")
    assert {name: found["prompts"] for name, found in first["sources"].items()} == {"sums": 3, "words": 1}
    assert (folder / "runs/first/report.html").is_file()


def test_system_prompts_are_those_of_the_sources(folder: Path) -> None:
    shown = (folder / "said.txt").read_text()
    assert "system: be brief; user:" in shown
    assert "system: be kind; user:" in shown


def test_the_key_of_the_judge_is_in_no_file_of_the_run(folder: Path) -> None:
    files = [path for path in (folder / "runs").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if b"a-key-of-the-judge" in path.read_bytes()]
    assert "a-key-of-the-judge" not in (folder / "said.txt").read_text()
