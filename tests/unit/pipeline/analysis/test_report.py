from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.analysis import report
from pipeline.analysis.drawing import percent_label
from pipeline.analysis.report import environment_rows, write_last_report, write_report
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.summary import count, decimal, duration, percent
from pipeline.data.event_log import EventLog
from tests.support.written_runs import START

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


def test_headline_numbers_verdict_and_recipe(full_page: str) -> None:
    for expected in (
        "12.5 % →</small> 50.0 %",
        "95 % interval 43.8 % to 56.2 %",
        "37.5 % → 75.0 %",
        "one process, bf16",
        "48\u2009000",
        "6\u2009144 samples",
        "0.976",
        "rollouts: the learner waits 55 % of each step; add engines or allow lag",
        "wait for rollouts 55.0 %",
        "wait for commits 5.0 %",
        "prompts_per_batch: 32",
        "No restart, drop or retry.",
    ):
        assert expected in full_page


def test_page_is_one_well_formed_file_without_external_resources(full_page: str) -> None:
    parser = Balanced()
    parser.feed(full_page)
    assert parser.open == []
    assert not {"script", "link", "img", "iframe"} & set(parser.tags)
    assert "://" not in full_page
    assert not re.search(r"(src|href)=\"(?!#)", full_page)
    assert "@import" not in full_page


def test_the_browser_may_run_nothing_and_fetch_nothing(full_page: str) -> None:
    """Styles stand in the page, as attributes too. The policy comes before all that it holds for."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = full_page.partition("<title>")[0]
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in head


def test_colours_are_left_to_the_theme(full_page: str) -> None:
    svg = "".join(re.findall(r"<svg.*?</svg>", full_page, re.DOTALL))
    assert not re.search(r"#fe00\w\w", full_page)
    for variable in set(re.findall(r"var\(--(\w+)\)", full_page)):
        assert full_page.count(f"--{variable}: #") == 2, f"{variable} needs a light and a dark value"
    assert set(re.findall(r"(?:fill|stroke): (#\w+)", svg)) == set()


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


def test_numbers_in_words() -> None:
    assert (percent(1.0), percent(0.00004), percent_label(1.0), percent_label(1e-4)) == (
        "100.0 %",
        "0.0 %",
        "100 %",
        "0.01 %",
    )
    assert (percent(0.1234), percent(None)) == ("12.3 %", "–")
    assert (decimal(0.00012345), decimal(1.0), decimal(None)) == ("0.0001234", "1", "–")
    assert (count(1234567), count(None)) == ("1\u2009234\u2009567", "–")
    assert (duration(41.6), duration(200), duration(7500)) == ("42 s", "3 min 20 s", "2 h 05 min")


def test_report_needs_no_torch() -> None:
    code = (
        "import sys, pipeline.analysis.report, launch.show.runs, launch.run.live_view, launch.doctor.machine; "
        "import launch.convert.new_model; "
        + ("sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'sglang', 'transformers')))")
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_the_environment_names_hosts_packages_and_commits_once(write_run: WriteRun) -> None:
    run = write_run(2)
    assert environment_rows(RunLog.read(run)) == []
    assert "Not recorded" in page_of(run)
    told: dict[str, Any] = dict(cores=16, python="3.11.9")
    gpus = ["NVIDIA H100 80GB HBM3"] * 2
    for number, commit in enumerate(("0123456789ab", "fedcba987654+")):
        learner = dict(host="node-a", gpus=gpus, packages=dict(torch="2.13.0"), commit=commit)
        EventLog(run, "learner-000009").event("environment", role="learner", time=START + number, **told, **learner)
    engine = dict(host="node-b", gpus=[], packages=dict(torch="2.13.0", sglang="0.5.23"))
    EventLog(run, "engine-000009").event("environment", role="engine-0", time=START, **told, **engine)
    assert environment_rows(RunLog.read(run)) == [
        ("Commit", "0123456789ab, then fedcba987654+"),
        ("Host of engine 0", "node-b (no GPU, 16 CPU cores)"),
        ("Host of the learner", "node-a (2 × NVIDIA H100 80GB HBM3, 16 CPU cores)"),
        ("Python", "3.11.9"),
        ("torch", "2.13.0"),
        ("sglang", "0.5.23"),
    ]
    assert "<dt>Host of engine 0</dt><dd>node-b (no GPU, 16 CPU cores)</dd>" in page_of(run)


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
