"""Sources and parts of the reward, as the report draws them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from launch.run.live_view import event_line
from launch.show.runs import render
from pipeline.analysis.figures.reward import held_out_figures, reward_figures
from pipeline.analysis.html_report import write_report
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.summary import summary
from pipeline.data.event_log import EventLog
from pipeline.data.store import BatchStore
from tests.support.batches import batch_of_rewards

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
    log.event("evaluated", version=0, sources=dict(math=dict(prompts=3, pass_at_1=0.5, reward_mean=0.75)))
    found = drawn(run)
    assert list(found) == [
        "Held-out pass@1, by source",
        "Held-out reward, by source",
        "Reward, by source",
        "Solved, by source",
        "Share of samples, by source",
        "Reward part: format/a",
        "Reward part: brief",
    ]
    assert all(name in found["Reward, by source"] for name in (">math<", ">chat<"))
    assert "Reward part: format/a" in write_report(run).read_text()


def test_a_name_of_the_metrics_is_no_part_of_the_page(write_run: WriteRun) -> None:
    """The run may be somebody else's."""
    name = "\"'><img src=x onerror=a()>|&lt;"
    run = write_run(0)
    log = EventLog(run, "learner-000009")
    for step in range(3):
        told = {name: dict(share=0.75, reward_mean=0.1 * step, solve_rate=0.5), "chat": dict(share=0.25)}
        log.metrics(step, sources=told, reward_parts={name: 1.0})
    log.event("evaluated", version=0, sources={name: dict(prompts=3, pass_at_1=0.5, reward_mean=0.75)})
    page = write_report(run).read_text()
    assert "<img" not in page
    assert 'aria-label="reward part &quot;&#x27;&gt;&lt;img src=x onerror=a()&gt;|&amp;lt;"' in page


def test_a_run_of_one_source_without_parts_has_none_of_them(write_run: WriteRun) -> None:
    assert list(drawn(write_run(3))) == ["Samples without a reward"]


def with_batches(run: Path, *rewards: list[list[float]]) -> str:
    """The histogram of a run that has these batches."""
    store = BatchStore(run / "batches")
    for index, each in enumerate(rewards):
        store.commit(batch_of_rewards(each, index=index))
    return drawn(run)["Rewards of the samples"]


def test_rewards_of_the_first_middle_and_newest_trained_batch_are_counted(write_run: WriteRun) -> None:
    batches = [[[0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0]], [[0.5, 1.0]], [[0.0, 0.0]]]
    svg = with_batches(write_run(3), *batches)  # batch 3 is not trained yet
    titles = re.findall(r"<title>([^<]*)</title>", svg)
    assert "batch 0, reward 0: 0.75" in titles
    assert "batch 0, reward 1: 0.25" in titles
    assert "batch 2, reward 0.5: 0.5" in titles
    assert "batch 0, mean 0.25" in svg
    assert not any("batch 3" in title for title in titles)


def test_many_rewards_are_binned_and_a_damaged_batch_is_passed_over(write_run: WriteRun) -> None:
    run = write_run(2)
    many = [[number / 40 for number in range(40)]]
    with_batches(run, many, many)
    damaged = run / "batches" / "000000.zarr.zip"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    svg = drawn(run)["Rewards of the samples"]
    titles = re.findall(r"<title>([^<]*)</title>", svg)
    assert 20 <= len(titles) <= 25
    assert all(title.startswith("batch 1, ") for title in titles)


def test_failures_penalties_and_the_distance_from_a_teacher_have_figures(write_run: WriteRun) -> None:
    run = write_run(0)
    log = EventLog(run, "learner-000009")
    for step in range(2):
        log.metrics(
            step, verifier_failures=3.0 - step, overlong_penalty=-0.5, reverse_kl=0.25, teacher_failures=8.0 * step
        )
    log.event("evaluated", version=2, reverse_kl=0.125, pass_at_1=0.5)
    found = drawn(run)
    assert "<title>samples, 0: 3</title>" in found["Samples without a reward"]
    assert "<title>samples, 1: 8</title>" in found["Samples that the teacher did not score"]
    assert "<title>samples, 1: -0.5</title>" in found["Penalty for overlong responses"]
    assert "<title>trained on, 1: 0.25</title>" in found["Reverse KL to the teacher, nats a token"]
    assert "held out, by version 0.125" in found["Reverse KL to the teacher, nats a token"]


def test_held_out_rewards_are_drawn_and_told(write_run: WriteRun) -> None:
    run = write_run(0)
    log = EventLog(run, "collector-000001")
    for version, reward in ((0, 0.25), (8, 0.5)):
        parts = {"format/a": reward / 2, "<b>": 1.0}
        log.event("evaluated", version=version, pass_at_1=0.5, reward_mean=reward, reward_parts=parts)
    found = {title: svg for title, svg in held_out_figures(RunLog.read(run)) if svg is not None}
    assert list(found) == ["Held-out reward", "Parts of the held-out reward"]
    assert "reward, 8: 0.5" in found["Held-out reward"]
    assert ">format/a<" in found["Parts of the held-out reward"]
    numbers = summary(run)
    assert (numbers["held_out_reward_first"], numbers["held_out_reward_last"]) == (0.25, 0.5)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(numbers))
    told = console.export_text()
    assert "0.25 → 0.5" in told
    assert "format/a 0.125 → 0.25, <b> 1 → 1" in told
    page = write_report(run).read_text()
    assert "Parts of the held-out reward" in page
    assert "<b>" not in page


def test_held_out_samples_without_a_reward_are_told_everywhere(write_run: WriteRun) -> None:
    run = write_run(0)
    log = EventLog(run, "collector-000001")
    for version, failures in ((0, 0), (8, 5)):
        log.event("evaluated", version=version, pass_at_1=0.5, verifier_failures=failures)
    log.event("evaluated", version=9, verifier_failures=64)  # all of them
    found = {title: svg for title, svg in held_out_figures(RunLog.read(run)) if svg is not None}
    assert list(found) == ["Held-out samples without a reward"]
    numbers = summary(run)
    assert (numbers["pass_at_1_last"], numbers["held_out_failures_first"], numbers["held_out_failures_last"]) == (
        None,
        0,
        64,
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(numbers))
    assert "0 → 64 samples without a reward" in console.export_text()
    assert "64 samples without a reward are left out" in " ".join(write_report(run).read_text().split())
    assert event_line(RunLog.read(run).evaluations[1]).endswith(", 5 samples without a reward")
    assert not event_line(RunLog.read(run).evaluations[0]).endswith("without a reward")


def test_a_run_without_held_out_rewards_has_none_of_them(write_run: WriteRun) -> None:
    assert not any(svg for _, svg in held_out_figures(RunLog.read(write_run(24))))
