from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from launch.run.live_view import LiveView, render, sample_line
from pipeline.data.event_log import EventLog

WriteRun = Callable[..., Path]
SECONDS = {"wait": 3.0, "update": 1.0}


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=100), out


def log_step(event_log: EventLog, step: int, time: float) -> None:
    event_log.metrics(
        step,
        time=time,
        reward_mean=0.25,
        ess=0.9876,
        lag_mean=0.5,
        lag_max=1.0,
        entropy=0.75,
        grad_norm=0.3,
        num_tokens=1000,
        seconds=SECONDS,
    )


def test_plain_lines_every_n_steps_and_on_events(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path, "learner-000001")
    console, out = plain_console()
    with LiveView(tmp_path, 20, console=console, every_steps=4) as view:
        for step in range(9):
            log_step(event_log, step, 100.0 + 2.0 * step)
            view.refresh()
        event_log.event(
            "evaluated",
            version=9,
            pass_at_1=0.412,
            pass_at_1_low=0.35,
            pass_at_1_high=0.47,
            pass_at_k={"1": 0.4, "8": 0.8},
        )
        event_log.event("restarted", process="collector", reason="exit code -9")
        view.refresh()
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "step 1/20",
        "step 4/20",
        "step 8/20",
        "version 9: pass@1 41.2 % (35.0 % to 47.0 %)",
        "restarted collector: exit code -9",
    ]
    assert lines[3].endswith("pass@8 80.0 %")
    assert lines[2] == (
        "step 8/20, reward 0.25, pass@1 –, ESS 0.9876, lag 0.5, entropy 0.75, 500 tokens/s, mostly wait (75.0 %)"
    )


def test_lines_of_a_former_session_are_not_repeated(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path, "learner-000001")
    for step in range(4):
        log_step(event_log, step, float(step))
    event_log.event("evaluated", version=4, pass_at_1=0.3)
    console, out = plain_console()
    with LiveView(tmp_path, 20, console=console, every_steps=1) as view:
        assert out.getvalue() == ""
        assert view.progress.num_steps == 4
        log_step(event_log, 4, 4.0)
    assert out.getvalue().startswith("step 5/20")
    assert "pass@1 30.0 % (v4)" in out.getvalue()


def test_terminal_block_shows_numbers_phases_and_verdict(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path, "learner-000001")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=110, color_system=None)
    with LiveView(tmp_path, 20, console=console) as view:
        for step in range(6):
            log_step(event_log, step, 100.0 + 4.0 * step)
        event_log.event("evaluated", version=5, pass_at_1=0.6)
        view.refresh()
        with console.capture() as capture:
            console.print(render(view.progress))
    text = capture.get()
    for expected in (
        "step 6 of 20",
        "56 s left",
        "pass@1 60.0 % (v5)",
        "ESS 0.9876",
        "tokens/s 250",
        "lag 0.5, at most 1",
        "wait 3.00 s",
        "update 1.00 s",
        "rollouts: the learner waits 75 % of each step",
    ):
        assert expected in text


def test_a_run_without_files_renders(tmp_path: Path) -> None:
    console, out = plain_console()
    with LiveView(tmp_path, 3, console=console) as view:
        view.refresh()
        console.print(render(view.progress))
    assert "starting" in out.getvalue()


@pytest.mark.parametrize(("steps", "stage", "held"), [(1, 1, 1), (500, 1, 21), (500, 32, 33)])
def test_memory_is_bounded(tmp_path: Path, steps: int, stage: int, held: int) -> None:
    event_log = EventLog(tmp_path, "learner-000001")
    for step in range(steps):
        log_step(event_log, step, float(step))
    view = LiveView(tmp_path, 500, stage=stage, console=plain_console()[0])
    view.refresh()
    assert view.progress.num_steps == steps
    assert len(view.progress.recent) == held


def test_alarms_are_said_when_they_begin_and_end(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path, "learner-000001")
    console, out = plain_console()
    with LiveView(tmp_path, 20, console=console, every_steps=100) as view:
        for step, ess in enumerate([0.9, 0.2, 0.25, 0.9]):
            event_log.metrics(step, ess=ess, reward_mean=0.5)
            view.refresh()
            shown = io.StringIO()
            Console(file=shown, width=200).print(render(view.progress))
            assert ("alarm the effective sample size" in shown.getvalue()) == (ess < 0.3)
    said = [line for line in out.getvalue().splitlines() if "alarm" in line or "no longer" in line]
    assert len(said) == 2
    assert said[0].startswith("alarm at step 1: the effective sample size is 0.2, below 0.3; ")
    assert said[1] == "no longer at step 3: the effective sample size is 0.25, below 0.3"


def test_bounds_are_those_of_the_rollouts_format(tmp_path: Path) -> None:
    EventLog(tmp_path, "learner-000001").metrics(0, mismatch={"age": {"0": {"k3_kl": 5e-3}}})
    for quantized in (False, True):
        with LiveView(tmp_path, 20, quantized=quantized, console=plain_console()[0]) as view:
            assert bool(view.progress.alarms) != quantized


def test_the_pause_between_two_starts_is_no_time_of_a_step(tmp_path: Path) -> None:
    for start, steps in ((1, range(3)), (2, range(3, 6))):
        for step in steps:
            log_step(EventLog(tmp_path, f"learner-{start:06}"), step, 1000.0 * start + 0.5 * step)
    with LiveView(tmp_path, 20, console=plain_console()[0]) as view:
        assert view.progress.num_steps == 6
        assert view.progress.step_s == 0.5
        assert view.progress.tokens_per_s == 2000.0


SAMPLE = dict(group=7, prompt="2+2=", reward_parts={"right": 0.0, "brief": 0.5}, finish="length", response_tokens=9)


def test_a_sample_is_shown_now_and_then_and_commands_no_terminal(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path, "collector-000001")
    console, out = plain_console()
    with LiveView(tmp_path, 20, console=console, every_steps=2) as view:
        for step in range(4):
            event_log.event("sampled", batch=step, response="[red]\x1b[2J\n4", reward=0.25, **SAMPLE)
            log_step(event_log, step, 100.0 + step)
            view.refresh()
        shown = io.StringIO()
        Console(file=shown, width=200).print(render(view.progress))
    said = [line for line in out.getvalue().splitlines() if line.startswith("a sample")]
    wanted = "a sample of batch {}, reward 0.25 (right 0, brief 0.5): 2+2= ▸ [red]\\x1b[2J 4 [length]"
    assert said == [wanted.format(batch) for batch in (0, 1, 3)]
    assert wanted.format(3) in shown.getvalue()
    assert "\x1b" not in shown.getvalue() + out.getvalue()


def test_a_sample_without_a_reward_says_so(tmp_path: Path) -> None:
    event = dict(kind="sampled", batch=3, **SAMPLE | dict(reward=None, reward_parts={}, response="4", finish="stop"))
    assert sample_line(event) == "a sample of batch 3, no reward: 2+2= ▸ 4"


def test_a_teacher_that_fails_has_words_of_its_own(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path, "learner-000001")
    console, out = plain_console()
    with LiveView(tmp_path, 20, console=console, every_steps=1) as view:
        event_log.metrics(0, teacher_failures=8.0, verifier_failures=0.0, time=1.0)
        event_log.event("teacher_failed", reason="no answer", detail="refused")
        view.refresh()
        said = "the teacher did not score a group (no answer): refused"
        assert said in out.getvalue()
    wide = Console(file=io.StringIO(), width=200, height=60, record=True)
    wide.print(render(view.progress))
    shown = wide.export_text()
    assert f"8 samples of 1 steps without the teacher's scores; {said}" in shown
    assert "without a reward" not in shown


def test_a_file_system_that_does_not_answer_hides_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the block raised is what is told, and the terminal is given back."""

    def fails() -> None:
        raise OSError(errno.EIO, "Input/output error")

    view = LiveView(tmp_path, 20, console=Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setattr(view, "refresh", fails)
    with pytest.raises(ZeroDivisionError), view:
        raise ZeroDivisionError
    assert view._live is not None
    assert not view._live.is_started
