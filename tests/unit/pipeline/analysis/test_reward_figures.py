"""Sources and parts of the reward, as the report draws them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.analysis.figures.reward import reward_figures
from pipeline.analysis.html_report import write_report
from pipeline.analysis.run_log import RunLog
from pipeline.data.event_log import EventLog

WriteRun = Callable[..., Path]


def drawn(run: Path) -> dict[str, str]:
    return {title: svg for title, svg in reward_figures(RunLog.read(run)) if svg is not None}


def test_each_source_is_a_line_and_each_part_a_figure(write_run: WriteRun) -> None:
    run = write_run(0)
    log = EventLog(run, "learner-000009")
    for step in range(3):
        told = dict(math=dict(share=0.75, reward_mean=0.1 * step, solve_rate=0.5), chat=dict(share=0.25))
        if step:
            told["chat"] |= dict(reward_mean=2.0, solve_rate=0.0)
        log.metrics(step, sources=told, reward_parts={"format/a": 1.0, "brief": 0.25})
    log.event("evaluated", version=0, sources=dict(math=dict(prompts=3, pass_at_1=0.5)))
    found = drawn(run)
    assert list(found) == [
        "Held-out pass@1, by source",
        "Reward, by source",
        "Solved, by source",
        "Share of samples, by source",
        "Reward part: format/a",
        "Reward part: brief",
    ]
    assert all(name in found["Reward, by source"] for name in (">math<", ">chat<"))
    assert "Reward part: format/a" in write_report(run).read_text()


def test_a_run_of_one_source_without_parts_has_none_of_them(write_run: WriteRun) -> None:
    assert drawn(write_run(3)) == {}
