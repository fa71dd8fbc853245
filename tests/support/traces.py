"""What must hold of every trace, by the Trace Event Format and by what ours promises."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

Rows = dict[tuple[str, str], list[dict[str, Any]]]
"""Part and row → its complete events, by start."""


def rows_of(trace: Mapping[str, Any]) -> Rows:
    """The complete events of a trace by the names of their process and thread."""
    parts = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    rows: Rows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows[parts[event["pid"]], lanes[event["pid"], event["tid"]]].append(event)
    return {key: sorted(events, key=lambda e: (e["ts"], -e["dur"])) for key, events in rows.items()}


def check_trace(trace: Mapping[str, Any]) -> None:
    """Raises AssertionError unless it is one that viewers show, and every phase lies in its step."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMi", event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert isinstance(event["args"], dict), event
        if event["ph"] == "M":
            assert event["name"].removeprefix("process_").removeprefix("thread_") in ("name", "sort_index"), event
        else:
            assert isinstance(event["ts"], int), event
        if event["ph"] == "X":
            assert isinstance(event["dur"], int), event
            assert event["dur"] >= 0, event
    for (part, lane), events in rows_of(trace).items():
        _check_nesting(events)
        if part.startswith("learner") and lane == "step":
            _check_steps(events)


def _check_nesting(events: list[dict[str, Any]]) -> None:
    ends: list[int] = []
    for event in events:
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1], f"{event} crosses another span of its row"
        ends.append(end)


def _check_steps(events: list[dict[str, Any]]) -> None:
    steps = {event["name"]: event for event in events if event["name"].startswith("step ")}
    spent = dict.fromkeys(steps, 0)
    for event in events:
        if event["name"] not in steps:
            name = f"step {event['args'].get('step', event['args'].get('number'))}"
            step = steps[name]
            assert step["ts"] <= event["ts"], f"{event} begins before {name}"
            assert event["ts"] + event["dur"] <= step["ts"] + step["dur"], f"{event} ends after {name}"
            spent[name] += event["dur"]
    for name, step in steps.items():
        assert spent[name] <= step["dur"], f"the phases of {name} are longer than it"
