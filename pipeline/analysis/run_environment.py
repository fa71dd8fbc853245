"""What a run was made with: hosts, devices, packages and commits, as its roles noted them at each start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.analysis.run_log import RunLog


def environment_rows(run_log: RunLog) -> list[tuple[str, str]]:
    """What and which, as text; what several starts agree on is said once. Empty for runs that noted nothing."""
    noted = run_log.of_kind("environment")
    if not noted:
        return []
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for event in noted:
        by_role.setdefault(str(event["role"]), []).append(event)
    rows = [("Commit", _all(str(event["commit"]) for event in noted if event.get("commit")))]
    rows += [(f"Host of {_titled(role)}", _all(map(_machine, events))) for role, events in sorted(by_role.items())]
    rows.append(("Python", _all(str(event["python"]) for event in noted)))
    names = dict.fromkeys(name for event in noted for name in event["packages"])
    rows += [
        (name, _all(str(event["packages"][name]) for event in noted if name in event["packages"])) for name in names
    ]
    return [(name, text) for name, text in rows if text]


def _machine(event: Mapping[str, Any]) -> str:
    gpus = ", ".join(f"{count} × {name}" for name, count in Counter(event.get("gpus") or ()).items())
    return f"{event['host']} ({gpus or 'no GPU'}, {event['cores']} CPU cores)"


def _titled(role: str) -> str:
    name, dash, index = role.partition("-")
    return f"{name} {index}" if dash else f"the {name}"


def _all(texts: Iterable[str]) -> str:
    """Each once, in the order in which they came up."""
    return ", then ".join(dict.fromkeys(texts))
