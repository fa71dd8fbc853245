"""`python -m tests.chaos`: run the parts, or those that are named, and say what came of them. Resumable.

A call takes an hour and what the last case needs. Each part has its share of it, and what one leaves the next ones get.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.chaos.ledger import Case, Entry, Ledger

HERE = Path(__file__).parent
ORDER = ("malformed", "flips", "simulation", "endurance", "kills")
"""The long ones last."""
SHARES = {"kills": 5.0}
"""Of the time, beside 1 of every other part."""
AN_HOUR = 60.0
CONSOLE = Console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when any verdict is not "ok"."""
    options = _parse(arguments)
    tried: dict[str, tuple[list[Entry], int]] = {}
    ends = None if options.minutes == 0 else time.monotonic() + 60 * options.minutes
    coming = options.parts or parts()
    try:
        for place, part in enumerate(coming):
            ledger = Ledger(options.out / f"{part}.jsonl")
            cases = _chosen(part, options.cases, options.only)
            _run(
                part, ledger, cases, None if ends is None else _end_of_share(coming[place:], ends), again=options.again
            )
            known = [ledger.entries[case.id] for case in cases if case.id in ledger.entries]
            tried[part] = known, len(cases) - len(known)
    except KeyboardInterrupt:
        CONSOLE.print("stopped; the same command goes on from here")
        return 130
    wrong = _report(tried, options.out)
    return int(wrong > 0)


def _end_of_share(coming: Sequence[str], ends: float) -> float:
    """When (time.monotonic) the first of the parts that are coming leaves off, so that the last one does at `ends`."""
    shares = [SHARES.get(part, 1.0) for part in coming]
    return time.monotonic() + (ends - time.monotonic()) * shares[0] / sum(shares)


def parts() -> list[str]:
    """The packages of this folder."""
    found = {path.parent.name for path in HERE.glob("*/__init__.py")}
    return sorted(found, key=lambda part: (ORDER.index(part) if part in ORDER else len(ORDER), part))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts())}; all by default")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help=f"about how long; the next call goes on; 0: all (default: {AN_HOUR:g}; 0 with --cases or --only)",
    )
    parser.add_argument("--cases", type=int, metavar="N", help="the first N of each part")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose id has this in it")
    parser.add_argument("--again", action="store_true", help="also those whose verdict was not ok")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="where the ledgers lie (runs/chaos)")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(parts()):
        parser.error(f"there is no part {sorted(unknown)[0]!r}; expected {', '.join(parts())}")
    if options.minutes is None:
        options.minutes = 0.0 if options.only or options.cases is not None else AN_HOUR
    return options


def _chosen(part: str, limit: int | None, only: str) -> list[Case]:
    cases: Sequence[Case] = importlib.import_module(f"tests.chaos.{part}").cases()
    return [case for case in cases if only in case.id][:limit]


def _run(part: str, ledger: Ledger, cases: Sequence[Case], ends: float | None, *, again: bool) -> None:
    """Until `ends` (time.monotonic) has come, or all have a verdict."""
    waiting = ledger.waiting(cases, again=again)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=CONSOLE) as progress:
        bar = progress.add_task(part, total=len(cases), completed=len(cases) - len(waiting), last="")
        for entry in ledger.run(waiting, again=True):
            progress.update(bar, advance=1, last=escape(entry.id))
            if not entry.is_ok:
                progress.console.print(f"[red]{escape(part)} {escape(entry.id)}[/]: {escape(entry.verdict)}")
            if ends is not None and time.monotonic() >= ends:
                return


def _report(tried: dict[str, tuple[list[Entry], int]], out: Path) -> int:
    """One line a part on stdout; returns how many verdicts are not ok."""
    table = Table("part", "tried", "ok", "not ok", "waiting", "minutes", title=f"chaos: {out}")
    wrong = 0
    for part, (entries, waiting) in tried.items():
        bad = [entry for entry in entries if not entry.is_ok]
        wrong += len(bad)
        minutes = sum(entry.seconds for entry in entries) / 60
        numbers = (len(entries), len(entries) - len(bad), len(bad), waiting)
        table.add_row(part, *map(str, numbers), f"{minutes:.1f}")
    console = Console()
    console.print(table)
    if any(waiting for _, waiting in tried.values()):
        console.print("the same command goes on with what waits")
    for part, (entries, _) in tried.items():
        for entry in entries:
            if not entry.is_ok:
                console.print(f"{part} {entry.id}: {entry.verdict}", markup=False, highlight=False)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
