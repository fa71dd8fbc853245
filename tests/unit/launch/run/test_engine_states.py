"""The live view says of each engine in which state it is, why, and since when."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from launch.run.live_view import Progress, Shown, event_line, render


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


def test_one_that_is_started_again_is_shown_until_it_is_back() -> None:
    hung = (dict(kind="admitted", engine=1), dict(kind="quarantined", engine=1, reason="stopped"))
    again = dict(kind="restarted", process="engine-1", reason="server hangs")
    left, joined = dict(kind="left", engine=1, reason="it has left"), dict(kind="joined", engine=1, reason="new")
    assert after(*hung, again, left).engines[1] == Shown("starting again", "server hangs", 1002.0)
    assert after(*hung, again, left, joined).engines[1].state == "joined"
    assert after(*hung, left).engines == {}
    assert after(*hung, dict(kind="started", process="collector")).engines == {}
    assert after(dict(kind="restarted", process="learner", reason="")).engines == {}


def test_engines_that_are_not_admitted_are_drawn() -> None:
    progress, out = Progress(steps=3), io.StringIO()
    console = Console(file=out, width=120)
    progress.take_event(dict(kind="admitted", engine=0, time=1.0))
    console.print(render(progress))
    assert "engine 0" not in out.getvalue()
    event = dict(kind="quarantined", engine=3, reason="its process 7 is stopped", time=1.0)
    progress.take_event(event)
    console.print(render(progress))
    assert "engine 3  quarantined  since" in out.getvalue()
    assert "its process 7 is stopped" in out.getvalue()
    assert event_line(event) == "engine 3 quarantined: its process 7 is stopped"
    assert event_line(dict(kind="admitted", engine=0)) == "engine 0 admitted"
