from __future__ import annotations

import errno
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launch.run.live_view import LiveView, Progress, Shown, render
from pipeline.data.event_log import EventKind, EventLog

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


def test_plain_lines_every_ten_seconds_and_on_events(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path, "learner-000001")
    console, out = plain_console()
    with LiveView(tmp_path, 20, console=console) as view:
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
        "step 6/20",
        "version 9: pass@1 41.2 % (35.0 % to 47.0 %)",
        "restarted collector: exit code -9",
    ]
    assert lines[2].endswith("pass@8 80.0 %")
    assert lines[1] == (
        "step 6/20, reward 0.25, pass@1 –, ESS 0.9876, lag 0.5, entropy 0.75, 500 tokens/s, mostly wait (75.0 %)"
    )


def test_what_goes_on_is_said_where_nothing_else_was_for_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal the same stands at the top, from the first moment on."""
    clock = [1000.0]
    for module in ("launch.run.live_view", "launch.terminal"):
        time = SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0])
        monkeypatch.setattr(f"{module}.time", time)
    monkeypatch.setattr("launch.terminal.line_at", clock[0])
    supervisor, collector = EventLog(tmp_path, "supervisor-000001"), EventLog(tmp_path, "collector-000001")
    learner = EventLog(tmp_path, "learner-000001")
    console, out = plain_console()
    supervisor.event("started", process="learner", time=1.0)  # of an earlier session
    with LiveView(tmp_path, 2, console=console) as view:

        def after(seconds: float, log: EventLog | None = None, kind: EventKind = "started", **fields: Any) -> str:
            """The last line, after something happened and some seconds have passed."""
            if log is not None:
                log.event(kind, time=clock[0], **fields)
            clock[0] += seconds
            view.refresh()
            return (out.getvalue().splitlines() or [""])[-1]

        assert after(9.9) == ""
        for process in ("engine-0", "router", "learner", "collector"):
            after(0.0, supervisor, process=process)
        assert after(10.0) == "starting collector, engine-0, learner (10 s)"
        noted: dict[str, Any] = dict(host="a", cores=1, python="3", packages={})
        after(0.0, learner, "environment", role="learner", **noted)
        after(0.0, collector, "environment", role="collector", **noted)
        assert after(10.0) == "starting engine-0 (20 s)"
        after(0.0, collector, "joined", engine=0)
        assert after(10.0) == "step 1 of 2"
        assert after(10.0, collector, "issued", batch=0) == "step 1 of 2: engines answer batch 0"
        assert after(10.0, collector, "committed", batch=0, samples=1) == "step 1 of 2: the learner trains on batch 0"
        log_step(learner, 0, clock[0])
        assert after(1.0).startswith("step 1/2, ")
        assert after(10.0) == "step 2 of 2 (11 s)"
        after(0.0, supervisor, process="learner")
        assert after(10.0) == "starting learner (10 s)"
        noted: dict[str, Any] = dict(host="a", cores=1, python="3", packages={})
        after(0.0, learner, "environment", role="learner", **noted)
        log_step(learner, 1, clock[0])
        after(0.0)
        assert after(10.0).startswith("all steps are trained")


@pytest.mark.parametrize(("steps", "stage", "held"), [(1, 1, 1), (500, 1, 21), (500, 32, 33)])
def test_memory_is_bounded(tmp_path: Path, steps: int, stage: int, held: int) -> None:
    event_log = EventLog(tmp_path, "learner-000001")
    for step in range(steps):
        log_step(event_log, step, float(step))
    view = LiveView(tmp_path, 500, stage=stage, console=plain_console()[0])
    view.refresh()
    assert view.progress.num_steps == steps
    assert len(view.progress.recent) == held


SAMPLE = dict(group=7, prompt="2+2=", reward_parts={"right": 0.0, "brief": 0.5}, finish="length", response_tokens=9)


def test_a_sample_is_shown_now_and_then_and_commands_no_terminal(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path, "collector-000001")
    console, out = plain_console()
    with LiveView(tmp_path, 12, console=console) as view:
        for step in range(12):
            event_log.event("sampled", batch=step, response="[red]\x1b[2J\n4", reward=0.25, **SAMPLE)
            log_step(event_log, step, 100.0 + 5 * step)
            view.refresh()
        shown = io.StringIO()
        Console(file=shown, width=200).print(render(view.progress))
    said = [line for line in out.getvalue().splitlines() if line.startswith("a sample")]
    wanted = "a sample of batch {}, reward 0.25 (right 0, brief 0.5): 2+2= ▸ [red]\\x1b[2J 4 [length]"
    assert said == [wanted.format(batch) for batch in (0, 10, 11)]
    assert wanted.format(11) in shown.getvalue()
    assert "\x1b" not in shown.getvalue() + out.getvalue()


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


def after(*events: dict[str, Any]) -> Progress:
    states = Progress(steps=3)
    for place, event in enumerate(events):
        states.take_event(event | dict(time=1000.0 + place))
    return states


def test_a_state_has_a_reason_and_a_beginning() -> None:
    states = after(
        dict(kind="joined", engine=0, reason="not verified yet"),
        dict(kind="admitted", engine=0),
        dict(kind="joined", engine=1, reason="not verified yet"),
        dict(kind="admitted", engine=1),
        dict(kind="quarantined", engine=1, reason="its process 7 is stopped"),
        dict(kind="quarantined", engine=1, reason="it does not answer"),
    )
    assert states.engines == {
        0: Shown("admitted", "", 1001.0),
        1: Shown("quarantined", "it does not answer", 1004.0),
    }
