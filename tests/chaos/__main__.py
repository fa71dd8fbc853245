"""`python -m tests.chaos`: run the parts, or those that are named, and say what came of them. Resumable."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.chaos.ledger import Case, Entry, Ledger

HERE = Path(__file__).parent
ORDER = ("malformed", "flips", "checker", "simulation", "endurance", "kills")
"""The long ones last."""
CONSOLE = Console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when any verdict is not "ok"."""
    options = _parse(arguments)
    tried: dict[str, list[Entry]] = {}
    try:
        for part in options.parts or parts():
            ledger = Ledger(options.out / f"{part}.jsonl")
            cases = _chosen(part, options.cases, options.only)
            _run(part, ledger, cases, again=options.again)
            tried[part] = [ledger.entries[case.id] for case in cases]
    except KeyboardInterrupt:
        CONSOLE.print("stopped; the same command goes on from here")
        return 130
    wrong = _report(tried, options.out)
    return int(wrong > 0)


def parts() -> list[str]:
    """The packages of this folder."""
    found = {path.parent.name for path in HERE.glob("*/__init__.py")}
    return sorted(found, key=lambda part: (ORDER.index(part) if part in ORDER else len(ORDER), part))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts())}; all by default")
    parser.add_argument("--cases", type=int, metavar="N", help="at most so many of each part; 0 means all")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose id has this in it")
    parser.add_argument("--again", action="store_true", help="also those whose verdict was not ok")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="where the ledgers lie (runs/chaos)")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(parts()):
        parser.error(f"there is no part {sorted(unknown)[0]!r}; expected {', '.join(parts())}")
    return options


def _chosen(part: str, limit: int | None, only: str) -> list[Case]:
    module = importlib.import_module(f"tests.chaos.{part}")
    cases: Sequence[Case] = module.cases()
    if only:
        return [case for case in cases if only in case.id]
    if limit is None:
        limit = getattr(module, "IN_AN_HOUR", 0)
    return list(cases[: limit or None])


def _run(part: str, ledger: Ledger, cases: Sequence[Case], *, again: bool) -> None:
    waiting = ledger.waiting(cases, again=again)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=CONSOLE) as progress:
        bar = progress.add_task(part, total=len(cases), completed=len(cases) - len(waiting), last="")
        for entry in ledger.run(waiting, again=True):
            progress.update(bar, advance=1, last=escape(entry.id))
            if not entry.is_ok:
                progress.console.print(f"[red]{escape(part)} {escape(entry.id)}[/]: {escape(entry.verdict)}")


def _report(tried: dict[str, list[Entry]], out: Path) -> int:
    """One line a part on stdout; returns how many verdicts are not ok."""
    table = Table("part", "cases", "ok", "not ok", "minutes", title=f"chaos: {out}")
    wrong = 0
    for part, entries in tried.items():
        bad = [entry for entry in entries if not entry.is_ok]
        wrong += len(bad)
        minutes = sum(entry.seconds for entry in entries) / 60
        table.add_row(part, *map(str, (len(entries), len(entries) - len(bad), len(bad))), f"{minutes:.1f}")
    console = Console()
    console.print(table)
    for part, entries in tried.items():
        for entry in entries:
            if not entry.is_ok:
                console.print(f"{part} {entry.id}: {entry.verdict}", markup=False, highlight=False)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
