"""What was measured, in one JSON file that is whole at any moment and is added to by later calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.data.files import write_atomically
from pipeline.errors import RunConflictError
from tests.gpu.goals import Figures

Status = Literal["measured", "not measured", "failed"]


@dataclass(kw_only=True)
class Outcome:
    """How one part of a check ended."""

    status: Status
    reason: str = ""
    """Why it is not measured, or the end of its log."""
    seconds: float = 0.0
    commit: str = ""
    """Of the sources that it ran: a call after a repair adds to the same file."""
    figures: Figures = field(default_factory=dict)
    """Also of a part that failed: what it had by then."""


@dataclass(kw_only=True)
class Results:
    """All checks so far: name → part → outcome."""

    date: str
    rehearsal: bool
    machine: dict[str, Any]
    versions: dict[str, str]
    checks: dict[str, dict[str, Outcome]] = field(default_factory=dict)

    def done(self, check: str, part: str) -> bool:
        """Measured already; anything else is tried again."""
        outcome = self.checks.get(check, {}).get(part)
        return outcome is not None and outcome.status == "measured"

    def failed(self, check: str) -> bool:
        """Whether a part of it was tried last and did not come through."""
        return any(outcome.status == "failed" for outcome in self.checks.get(check, {}).values())

    def blocks(self, name: str, part: str) -> bool:
        """Whether `name` stands in the way of a `part` that builds on it. `check.part` does when that part failed;
        `check` when its part of the same name failed or, if it has none, any part. What was not tried blocks nothing.
        """
        check, _, named = name.partition(".")
        parts = self.checks.get(check, {})
        wanted = named or (part if part in parts else "")
        return self.failed(check) if not wanted else wanted in parts and parts[wanted].status == "failed"

    def figures(self, check: str) -> Figures:
        """Of all parts together."""
        return {name: value for part in self.checks.get(check, {}).values() for name, value in part.figures.items()}

    def save(self, path: Path, verdicts: Mapping[str, Any]) -> None:
        """Write all, durably; `verdicts` by check ride along for readers."""
        content = asdict(self) | {"verdicts": dict(verdicts)}
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def load_or_begin(path: Path, fresh: Results) -> Results:
    """What `path` holds, to be added to, or `fresh`. Raises RunConflictError when it is from another device or of the
    other kind: figures of two machines are no table."""
    if not path.exists():
        return fresh
    data = json.loads(path.read_text(encoding="utf-8"))
    data.pop("verdicts")
    checks = {
        check: {part: Outcome(**outcome) for part, outcome in parts.items()}
        for check, parts in data.pop("checks").items()
    }
    found = Results(**data, checks=checks)
    for what, theirs, ours in (
        ("device", found.machine.get("device"), fresh.machine.get("device")),
        ("rehearsal", found.rehearsal, fresh.rehearsal),
    ):
        if theirs != ours:
            raise RunConflictError(f"{path} holds figures of {what} {theirs}, this is {ours}; choose another --out")
    return found
