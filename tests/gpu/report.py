"""The table that people read: by check, what was measured, what was wanted, and whether it was met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.gpu.goals import Figure, Figures, Goal, Verdict
from tests.gpu.results import Results

CURVE_POINTS = 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    measured: str
    wanted: str
    verdict: Verdict
    reason: str

    def plain(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def judged(results: Results, checks: Sequence[Any]) -> dict[str, list[Row]]:
    """The rows of every check, tried or not."""
    return {
        check.NAME: [_row(goal, figures_of(results, check), results, check) for goal in check.GOALS] for check in checks
    }


def figures_of(results: Results, check: Any) -> Figures:
    """Of all parts, with what follows from them."""
    figures = results.figures(check.NAME)
    return figures | check.derive(figures)


def _row(goal: Goal, figures: Figures, results: Results, check: Any) -> Row:
    verdict, reason = goal.judge(figures)
    parts = results.checks.get(check.NAME, {})
    if verdict == "not measured" and goal.figure not in figures:
        # A figure that begins with the name of a part is that part's.
        own = [outcome for part, outcome in parts.items() if goal.figure.startswith(part)] or list(parts.values())
        said = "; ".join(dict.fromkeys(outcome.reason for outcome in own if outcome.reason))
        reason = said or (reason if parts else "not run")
    shown = verdict != "not measured"
    return Row(
        what=goal.what,
        measured=f"{_text(figures[goal.figure])} {goal.unit}".strip() if shown else "",
        wanted=f"{goal.wanted} {goal.unit}".strip() if goal.wanted else "",
        verdict=verdict,
        reason=reason,
    )


def _text(value: Figure) -> str:
    if isinstance(value, list):
        if len(value) > CURVE_POINTS:  # first to last, evenly
            value = [value[round(i * (len(value) - 1) / (CURVE_POINTS - 1))] for i in range(CURVE_POINTS)]
        return " ".join(f"{one:.4g}" if isinstance(one, float) else str(one) for one in value)
    return value if isinstance(value, str) else f"{value:.4g}"


def write_report(results: Results, checks: Sequence[Any], rows: Mapping[str, Sequence[Row]]) -> str:
    """Markdown."""
    verdicts = [row.verdict for found in rows.values() for row in found if row.wanted]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in ("met", "missed", "not measured"))
    title = "Rehearsal on a CPU: proves the scripts, measures nothing" if results.rehearsal else "One GPU, measured"
    lines = [f"# {title}, {results.date}", "", f"Goals: {counts}.", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results.machine.items()) + ".", ""]
    lines += [", ".join(f"{name} {value}" for name, value in results.versions.items()) + ".", ""]
    commits = {outcome.commit: None for parts in results.checks.values() for outcome in parts.values()}
    lines += [f"Sources: {'; '.join(commits)}."]
    for check in checks:
        lines += ["", f"## {check.NAME}", "", _summary(results, check), ""]
        lines += ["| what | measured | goal | verdict |", "|---|---|---|---|"]
        lines += [_line(row) for row in rows[check.NAME]]
        for name, table in figures_of(results, check).items():
            if isinstance(table, list) and table and isinstance(table[0], list):
                lines += ["", f"{name}:", "", *_table(table)]
    return "\n".join(lines) + "\n"


def _summary(results: Results, check: Any) -> str:
    text = " ".join((check.__doc__ or "").split("\n\n")[0].split())
    parts = results.checks.get(check.NAME, {})
    took = ", ".join(f"{part} {outcome.status} in {outcome.seconds:.0f} s" for part, outcome in parts.items())
    return f"{text} ({took or 'not run'})"


def _line(row: Row) -> str:
    verdict = f"{row.verdict}: {row.reason}" if row.reason else row.verdict
    cells = (row.what, row.measured, row.wanted, verdict)
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _table(rows: Sequence[Any]) -> list[str]:
    """A list of lists, the first of them the head."""
    cells = [[_text(cell) if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    escaped = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells]
    return [f"| {escaped[0]} |", "|" + "---|" * len(cells[0]), *(f"| {row} |" for row in escaped[1:])]
