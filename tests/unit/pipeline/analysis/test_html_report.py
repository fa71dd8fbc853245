from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.analysis.figures import drawing, mismatch, timing
from pipeline.analysis.html_report import count, decimal, duration, percent, write_report
from pipeline.analysis.run_log import RunLog
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
        "held-out pass@1 by version",
        "Training reward",
        "Entropy, nats a token",
        "Gradient norm",
        "Learning rate",
        "Response length, tokens",
        "Truncated responses",
        "Padding in micro-batches",
        "effective sample size",
        "k3 KL",
        "lag",
        "sequence ESS",
        "ESS by sign",
        "log-ratio quantiles",
        "mean log-ratio",
        "tails",
        "Pearson",
        "gap by bucket",
        "ESS by bucket",
        "log-ratio histogram",
        "weight_curves",
        "timeline",
        "seconds of each phase",
        "Response tokens a second",
        "Samples without a reward",
    }


def test_histogram_names_first_middle_and_last_step_with_their_ess(write_run: WriteRun) -> None:
    svg = mismatch.log_ratio_histogram(RunLog.read(write_run(24)))
    assert svg is not None
    for label in ("step 0, ESS 0.9990", "step 11, ESS 0.9880", "step 23, ESS 0.9760"):
        assert label in svg


@pytest.mark.parametrize(
    ("objective", "shaded"),
    [
        (dict(name="p3o"), True),
        (dict(name="p3o", ess_unit="sequence"), False),
        (dict(name="p3o", ess_scope="micro_batch"), False),
        (dict(name="clipped"), False),
    ],
)
def test_kl_weight_is_shaded_only_where_it_is_one_minus_the_drawn_ess(
    write_run: WriteRun, objective: dict[str, str], shaded: bool
) -> None:
    run_log = RunLog.read(write_run(3, overrides=dict(objective=objective)))
    drawn = dict(mismatch.mismatch_figures(run_log))
    assert ("KL weight" in str(drawn["Effective sample size"])) == shaded


def test_timeline_shows_the_last_steps_and_lanes(write_run: WriteRun) -> None:
    svg = timing.timeline_of_last(RunLog.read(write_run(24)))
    assert svg is not None
    numbers = {int(found) for found in re.findall(r">(\d+)</text>", svg)}
    assert {12, 23} <= numbers  # steps 12 to 23, and their batches
    assert 11 not in numbers
    for lane in ("learner", "batches", "generate", "publish"):
        assert f">{lane}</text>" in svg
    assert ">logprobs</text>" in svg


def test_a_run_without_any_step_says_so(write_run: WriteRun) -> None:
    page = page_of(write_run(0))
    assert "No step has finished yet." in page
    assert "not evaluated yet" in page
    assert "<svg" not in page


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_run_that_goes_on(write_run: WriteRun, steps: int) -> None:
    page = page_of(write_run(steps, evaluations=False))
    assert f"unfinished: {steps} of 24 steps" in page
    assert 'aria-label="held-out pass@1"' not in page
    assert 'aria-label="effective sample size"' in page


def test_a_step_without_the_optional_metrics(write_run: WriteRun) -> None:
    run = write_run(0)
    EventLog(run, "learner-000001").metrics(0, reward_mean=0.5)
    page = page_of(run)
    assert 'aria-label="Training reward"' in page
    assert 'aria-label="timeline"' not in page


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


def test_long_runs_are_smoothed_and_stay_small(write_run: WriteRun) -> None:
    page = page_of(write_run(300, steps=300))
    assert len(page) < 1_500_000
    assert "300 <small>of 300" in page


def test_running_mean_by_hand() -> None:
    assert drawing.running_mean([2.0, 4.0, 6.0, 8.0], 2) == pytest.approx([2.0, 3.0, 5.0, 7.0])


def test_numbers_in_words() -> None:
    assert (percent(0.1234), percent(None)) == ("12.3 %", "–")
    assert (decimal(0.00012345), decimal(1.0), decimal(None)) == ("0.0001234", "1", "–")
    assert (count(1234567), count(None)) == ("1\u2009234\u2009567", "–")
    assert (duration(41.6), duration(200), duration(7500)) == ("42 s", "3 min 20 s", "2 h 05 min")


def test_report_needs_no_torch() -> None:
    code = (
        "import sys, pipeline.analysis.html_report, launch.show.runs, launch.run.live_view, launch.doctor.machine; "
        "import launch.convert.new_model; "
        + ("sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'sglang', 'transformers')))")
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_the_main_chart_has_a_form_that_a_phone_shows_whole(full_page: str) -> None:
    """Wide figures are as wide on a phone and are scrolled; the first one is drawn again, as small ones are."""
    assert full_page.count('<div class="narrow"><svg') == full_page.count('<div class="broad"><svg') == 1
    phone = next(rule for rule in full_page.splitlines() if rule.startswith("@media") and ".narrow" in rule)
    assert ".narrow { display: block; } .broad { display: none; }" in phone
