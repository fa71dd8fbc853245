"""Write the HTML report of a run, under way or not: one self-contained page, light or dark as the reader's system
is."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.analysis import summary
from pipeline.analysis.drawing import page
from pipeline.analysis.figures import PHASE_COLORS, sections
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.samples import write_samples
from pipeline.data.files import write_atomically

NOTEWORTHY = ("restarted", "dropped", "retried")
MAX_LISTED_EVENTS = 200


def write_report(run_dir: Path) -> Path:
    """Write `report.html`, and `samples.html` once a batch is committed, into the run directory; return the path of the
    report. Raises StoreError (no run directory)."""
    run_log = RunLog.read(run_dir)
    samples = write_samples(run_log)
    path = run_dir / "report.html"
    write_atomically(path, render_page(run_log, samples=samples is not None))
    return path


def write_last_report(run_dir: Path) -> Path | None:
    """Write the report of a run that has ended; return its path, or print the error: it must not fail the run."""
    try:
        return write_report(run_dir)
    except Exception as error:  # noqa: BLE001 - whatever it is, the run has ended well
        print(f"warning: no report was written ({type(error).__name__}: {error})", file=sys.stderr)
        return None


def render_page(run_log: RunLog, *, samples: bool = False) -> str:
    """Return the report as HTML. With `samples`, it links to the page of samples."""
    # A row for each noteworthy event: time since the first one, kind, and details in words. Neighbors of the same kind
    # and reason become one row with their number.
    listed = []
    for _, run in groupby(run_log.of_kind(*NOTEWORTHY), key=lambda event: (event["kind"], event.get("reason"))):
        same = list(run)
        first = same[0]
        rest = [f"{key} {value}" for key, value in first.items() if key not in ("kind", "time", "reason")]
        rest = rest if len(same) == 1 else [f"{len(same)} times"]
        reason = [str(first["reason"])] if first.get("reason") else []
        when = summary.duration(first["time"] - run_log.events[0]["time"])
        listed.append(dict(when=when, kind=str(first["kind"]), text=": ".join([", ".join(rest), *reason])))
    histories, shares = summary.alarm_history(run_log), summary.newest_shares(run_log)
    formats = dict(percent=summary.percent, decimal=summary.decimal, duration=summary.duration, count=summary.count)
    return page(
        "report.html.j2",
        formats,
        samples=samples,
        summary=summary.summarize(run_log, histories),
        sections=sections(run_log),
        shares=[dict(phase=phase, share=share, color=PHASE_COLORS[phase]) for phase, share in shares.items() if share],
        alarms=histories,
        events=listed[-MAX_LISTED_EVENTS:],
        num_events=len(listed),
        environment=environment_rows(run_log),
        recipe=run_log.recipe.to_yaml(),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def environment_rows(run_log: RunLog) -> list[tuple[str, str]]:
    """Return the hosts, devices, packages and commits that a run's roles noted at each start, each value once."""

    def all_of(texts: Iterable[str]) -> str:
        return ", then ".join(dict.fromkeys(texts))

    def machine(event: Mapping[str, Any]) -> str:
        gpus = ", ".join(f"{number} × {name}" for name, number in Counter(event.get("gpus") or ()).items())
        return f"{event['host']} ({gpus or 'no GPU'}, {event['cores']} CPU cores)"

    noted = run_log.of_kind("environment")
    rows = [("Commit", all_of(str(event["commit"]) for event in noted if event.get("commit")))]
    for role in sorted({event["role"] for event in noted}):
        name, dash, index = role.partition("-")
        host = f"Host of {f'{name} {index}' if dash else f'the {name}'}"
        rows.append((host, all_of(machine(event) for event in noted if event["role"] == role)))
    rows.append(("Python", all_of(event["python"] for event in noted)))
    packages: dict[str, list[str]] = {}
    for event in noted:
        for name, version in event["packages"].items():
            packages.setdefault(name, []).append(str(version))
    rows += [(name, all_of(versions)) for name, versions in packages.items()]
    return [(name, text) for name, text in rows if text]
