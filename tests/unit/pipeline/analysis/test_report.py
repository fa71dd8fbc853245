from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.analysis import report
from pipeline.analysis.report import write_last_report, write_report
from pipeline.data.event_log import EventLog

WriteRun = Callable[..., Path]
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Balanced(HTMLParser):
    """Collects open tags, and fails on one that is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(run: Path) -> str:
    page = write_report(run)
    assert page == run / "report.html"
    return page.read_text()


def test_page_is_one_well_formed_file_without_external_resources(full_page: str) -> None:
    parser = Balanced()
    parser.feed(full_page)
    assert parser.open == []
    assert not {"script", "link", "img", "iframe"} & set(parser.tags)
    assert "://" not in full_page
    assert not re.search(r"(src|href)=\"(?!#)", full_page)
    assert "@import" not in full_page
    assert "<code>evenkeel verify parity</code>" in full_page
    assert "`" not in full_page, "commands are set as code"


def test_the_browser_may_run_nothing_and_fetch_nothing(full_page: str) -> None:
    """Styles stand in the page, as attributes too. The policy comes before all that it holds for."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = full_page.partition("<title>")[0]
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in head


def test_every_figure_is_there_for_a_full_run(full_page: str) -> None:
    names = set(re.findall(r'<svg role="img" aria-label="([^"]*)"', full_page))
    assert names == {
        "held-out pass@1",
        "Training reward",
        "Entropy, nats a token",
        "Gradient norm",
        "Effective sample size",
        "KL from engine to learner, nats a token",
        "Staleness, versions",
        "ESS by bucket",
        "log-ratio histogram",
        "weight by solve rate",
        "seconds of each phase",
        "Response tokens a second",
    }
    for label in ("step 0, ESS 0.9990", "step 11, ESS 0.9880", "step 23, ESS 0.9760"):
        assert label in full_page, "the histogram is of the first, the middle and the last step"


def test_a_run_without_any_step_says_so(write_run: WriteRun) -> None:
    page = page_of(write_run(0))
    assert "No step has finished yet." in page
    assert "not evaluated yet" in page
    assert "<svg" not in page


def test_a_step_without_the_optional_metrics(write_run: WriteRun) -> None:
    run = write_run(0)
    EventLog(run, "learner-000001").metrics(0, reward_mean=0.5)
    page = page_of(run)
    assert 'aria-label="Training reward"' in page
    assert 'aria-label="seconds of each phase"' not in page


def test_events_are_listed_escaped_and_repeats_collapse(write_run: WriteRun) -> None:
    run = write_run(3)
    event_log = EventLog(run, "learner-000001")
    event_log.event("restarted", process="learner", reason="<script>alert(1)</script>", time=1_700_000_125.0)
    for group in range(9):
        event_log.event("retried", group=group, reason="engine 0 is gone")
    event_log.event("dropped", batch=2, group=77, reason="prompt has 600 tokens, at most 490 fit")
    page = page_of(run)
    assert "<td>2 min 05 s</td><td>restarted</td>" in page
    assert "process learner: &lt;script&gt;" in page
    assert "<script" not in page
    assert page.count("engine 0 is gone") == 1
    assert "9 times: engine 0 is gone" in page
    assert "batch 2, group 77: prompt has 600 tokens" in page


def test_report_needs_no_torch() -> None:
    code = (
        "import sys, pipeline.analysis.report, launch.show.runs, launch.run.live_view, launch.doctor.machine; "
        "import launch.convert.new_model; "
        + ("sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'sglang', 'transformers')))")
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_a_report_that_cannot_be_written_is_said_and_fails_no_run(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(*_: object) -> None:
        raise ZeroDivisionError("nothing to draw")

    run = write_run(2)
    assert write_last_report(run) == run / "report.html"
    monkeypatch.setattr(report, "sections", draw)
    assert write_last_report(run) is None
    assert "no report was written (ZeroDivisionError: nothing to draw)" in capsys.readouterr().err
