"""In which state each engine of a run is, why, and since when, as its events say."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

ENGINE_EVENTS = ("joined", "admitted", "quarantined", "left")
_STYLES = {"admitted": "green", "joined": "yellow", "quarantined": "bold red", "starting again": "yellow"}


@dataclass(frozen=True)
class Shown:
    """One engine."""

    state: str
    reason: str
    since: float
    """Seconds since 1970."""


@dataclass
class EngineStates:
    """Kept up to date by `take`."""

    engines: dict[int, Shown] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Something happened, to an engine or not."""
        kind, process = event.get("kind"), str(event.get("process", ""))
        if kind in ENGINE_EVENTS:
            self._take_change(int(event["engine"]), str(kind), str(event.get("reason") or ""), float(event["time"]))
        elif kind == "restarted" and process.removeprefix("engine-").isdecimal():
            reason = str(event.get("reason", ""))
            self.engines[int(process.removeprefix("engine-"))] = Shown("starting again", reason, float(event["time"]))
        elif kind == "started" and process == "collector":
            self.engines.clear()  # who says what engines do begins anew

    def _take_change(self, index: int, kind: str, reason: str, at: float) -> None:
        known = self.engines.get(index)
        if kind == "left":
            if known is None or known.state != "starting again":
                self.engines.pop(index, None)
        elif kind == "quarantined" and known is not None and known.state == "starting again":
            return  # which says more
        else:
            since = known.since if known is not None and known.state == kind else at
            self.engines[index] = Shown(kind, reason, since)

    def table(self) -> Table | None:
        """A row for each engine that is not admitted; None where all are."""
        if all(engine.state == "admitted" for engine in self.engines.values()):
            return None
        table = Table.grid(padding=(0, 2))
        for index, engine in sorted(self.engines.items()):
            if engine.state != "admitted":
                since = time.strftime("%H:%M:%S", time.localtime(engine.since))
                state = Text(engine.state, style=_STYLES[engine.state])
                table.add_row(Text(f"engine {index}"), state, Text(f"since {since}", style="dim"), Text(engine.reason))
        return table


def engine_line(event: dict[str, Any]) -> str:
    """One change as plain text."""
    reason = event.get("reason")
    return f"engine {event['engine']} {event['kind']}{f': {reason}' if reason else ''}"
