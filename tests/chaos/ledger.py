"""What was tried and what came of it: a file of verdicts, one durable line a case, from which a second call goes on.

case ──run()──▶ verdict: "ok", or one line that says what is wrong ──▶ OUT/PART.jsonl
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

OK = "ok"


class Case(Protocol):
    """Something that is tried once."""

    @property
    def id(self) -> str:
        """Stable from one call to the next: the ledger knows a case by it."""

    def run(self) -> str:
        """ "ok", or one line that says what is wrong. What it raises is a verdict too.

        A case may have an attribute `details`, a dict of JSON's types, which is read after the run.
        """


@dataclass
class Check:
    """The plainest case: a function, and a dict that it may fill."""

    id: str
    body: Callable[[dict[str, Any]], str]
    """Gets `details`."""
    details: dict[str, Any] = field(default_factory=dict)

    def run(self) -> str:
        return self.body(self.details)


@dataclass(frozen=True)
class Entry:
    """A line of the ledger."""

    id: str
    verdict: str
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return self.verdict == OK


class Ledger:
    """The verdicts of one part. A case that was run twice has the later one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {entry.id: entry for entry in _read(path)}
        self._torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")

    def add(self, entry: Entry) -> None:
        """Durable when it returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(b"\n" * self._torn + json.dumps(asdict(entry), default=str).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
        self.entries[entry.id] = entry

    def waiting(self, cases: Sequence[Case], *, again: bool = False) -> list[Case]:
        """Those without a verdict; `again` adds those whose verdict was not "ok". Raises ValueError when two share an
        id."""
        ids = [case.id for case in cases]
        if len(set(ids)) != len(ids):
            raise ValueError(f"two cases are called {max(ids, key=ids.count)!r}; ids must be unique")
        return [case for case in cases if (known := self.entries.get(case.id)) is None or (again and not known.is_ok)]

    def run(self, cases: Sequence[Case], *, again: bool = False) -> Iterator[Entry]:
        """Run what waits, and yield each verdict once it is durable."""
        for case in self.waiting(cases, again=again):
            entry = judge(case)
            self.add(entry)
            yield entry


def judge(case: Case) -> Entry:
    """Run one case. What it raises becomes its verdict, with the traceback in the details."""
    started, trace = time.monotonic(), {}
    try:
        verdict = case.run()
    except Exception as error:  # noqa: BLE001 - whatever a case meets is what it found
        verdict = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        trace = dict(traceback=traceback.format_exc())
    details = {**getattr(case, "details", {}), **trace}
    return Entry(case.id, verdict, round(time.monotonic() - started, 3), details)


def _read(path: Path) -> Iterator[Entry]:
    """A killed call may leave a torn last line: that case is run again."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            yield Entry(**json.loads(line))
        except (ValueError, TypeError):
            continue
