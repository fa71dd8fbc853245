"""One HTML page that tells a run: nothing to install, nothing to fetch, light or dark as the reader's system is.

`write_report` works at any moment: on a run that goes on, that died, or that has not begun.
"""

from __future__ import annotations

import re
import time
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from pipeline.analysis.alarm_history import alarm_history
from pipeline.analysis.figures.control import TITLE as CONTROL_TITLE
from pipeline.analysis.figures.control import control_figures, control_text
from pipeline.analysis.figures.drawing import Named
from pipeline.analysis.figures.learning import LEARNING_TEXT, held_out, learning_figures, sft_figures
from pipeline.analysis.figures.mismatch import HISTOGRAM_TITLE, WIDE_TITLES, mismatch_figures
from pipeline.analysis.figures.objective import advantage_figures, advantage_text, objective_figures
from pipeline.analysis.figures.reward import HISTOGRAM_TITLE as REWARDS_TITLE
from pipeline.analysis.figures.reward import REWARDS_TEXT, held_out_figures, reward_figures
from pipeline.analysis.figures.routing import ROUTING_TEXT, routing_figures
from pipeline.analysis.figures.throughput import throughput_figures, throughput_text
from pipeline.analysis.figures.timing import PHASES_TITLE, TIMELINE_TITLE, share_bar, timing_figures
from pipeline.analysis.flight.bottleneck import newest_shares
from pipeline.analysis.guides import reading_of
from pipeline.analysis.pages.samples import write_samples
from pipeline.analysis.pages.style import page_style
from pipeline.analysis.run_environment import environment_rows
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.summary import summarize
from pipeline.data.files import write_atomically

NOTEWORTHY = ("restarted", "dropped", "retried")
"""Event kinds that a reader wants to see one by one."""

MAX_LISTED_EVENTS = 200

WIDE = ("", HISTOGRAM_TITLE, REWARDS_TITLE, *WIDE_TITLES, CONTROL_TITLE, TIMELINE_TITLE, PHASES_TITLE)
"""Titles of the figures that take the whole width."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html`, and `samples.html` beside it, into the run directory; return the first one's path. Raises
    StoreError (no run directory)."""
    run_log = RunLog.read(run_dir)
    samples = write_samples(run_log)
    page = run_dir / "report.html"
    write_atomically(page, render_page(run_log, samples=samples is not None))
    return page


def render_page(run_log: RunLog, *, samples: bool = False) -> str:
    """The page as text; `samples`: there is a page of samples that it leads to."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(percent=percent, decimal=decimal, duration=duration, count=count, code=code)
    template = environment.from_string(
        resources.files("pipeline.analysis").joinpath("html_report.html.j2").read_text(encoding="utf-8")
    )
    listed = event_rows(run_log)
    return template.render(
        style=page_style(),
        samples=samples,
        summary=summarize(run_log),
        sections=sections(run_log),
        shares=share_bar(newest_shares(run_log)),
        alarms=alarm_rows(run_log),
        events=listed[-MAX_LISTED_EVENTS:],
        num_events=len(listed),
        environment=environment_rows(run_log),
        recipe=run_log.recipe.to_yaml(),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def sections(run_log: RunLog) -> list[dict[str, Any]]:
    """Title, explanation and figures of each part of the page; parts without any figure are left out."""
    if run_log.is_sft:
        parts = [("Supervised fine-tuning", "Rest the pointer on a curve to read its value.", sft_figures(run_log))]
    else:
        parts = _rl_sections(run_log)
    return [
        dict(
            title=title,
            text=text,
            figures=[
                dict(
                    title=name,
                    svg=svg,
                    narrow=None if name else held_out(run_log, narrow=True),
                    wide=name in WIDE,
                    reading=reading_of(name, run_log),
                )
                for name, svg in drawn
                if svg is not None
            ],
        )
        for title, text, drawn in parts
        if any(svg is not None for _, svg in drawn)
    ]


def _rl_sections(run_log: RunLog) -> list[tuple[str, str, list[Named]]]:
    return [
        (
            "Held-out prompts",
            "Never trained on. The band is the 95 % interval of pass@1.",
            [("", held_out(run_log)), *held_out_figures(run_log)],
        ),
        ("Learning", LEARNING_TEXT, learning_figures(run_log)),
        ("Rewards", REWARDS_TEXT, reward_figures(run_log)),
        (
            "Mismatch between engine and learner",
            "Every token is scored again by the learner before it is trained on. Equal policies would have ESS 1.",
            mismatch_figures(run_log),
        ),
        ("Controller", control_text(run_log), control_figures(run_log)),
        ("Experts", ROUTING_TEXT, routing_figures(run_log)),
        (
            "Objective and correction",
            "Shares are of tokens, whatever the mean of the loss counts alike: of those that were run through the "
            "model, or of all of the step where they are found before.",
            objective_figures(run_log),
        ),
        ("Advantage", advantage_text(run_log), advantage_figures(run_log)),
        ("Where the time goes", "Numbers in the bars are steps, batches and versions.", timing_figures(run_log)),
        ("Throughput", throughput_text(run_log), throughput_figures(run_log)),
    ]


def alarm_rows(run_log: RunLog) -> list[dict[str, str]]:
    """What was out of bounds, over which steps, and what to do about it."""
    rows = []
    for history in alarm_history(run_log):
        rule, worst = history.worst.rule, history.worst
        text = f"{rule.what} was {worst.value_text} at worst, {rule.wrong} {worst.bound:g}"
        rows.append(
            dict(
                when=history.steps,
                name=history.name,
                text=f"{text[0].upper()}{text[1:]}.",
                to_do=f"{rule.to_do[0].upper()}{rule.to_do[1:]}.",
                source=rule.source,
            )
        )
    return rows


def event_rows(run_log: RunLog) -> list[dict[str, str]]:
    """When (since the first event), what, and the rest of the event in words; neighbors that say the same for the same
    reason become one row with their number."""
    rows = []
    for _, run in groupby(run_log.of_kind(*NOTEWORTHY), key=lambda event: (event["kind"], event.get("reason"))):
        same = list(run)
        first = same[0]
        rest = [f"{key} {value}" for key, value in first.items() if key not in ("kind", "time", "reason")]
        rest = rest if len(same) == 1 else [f"{len(same)} times"]
        reason = [str(first["reason"])] if first.get("reason") else []
        when = duration(first["time"] - run_log.events[0]["time"])
        rows.append(dict(when=when, kind=str(first["kind"]), text=": ".join([", ".join(rest), *reason])))
    return rows


def code(text: str) -> Markup:
    """A sentence as HTML, with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def percent(value: float | None) -> str:
    """12.3 %, or a dash."""
    return "–" if value is None else f"{100 * value:.1f} %"


def decimal(value: float | None) -> str:
    """Four significant digits, or a dash."""
    return "–" if value is None else f"{value:.4g}"


def count(value: float | None) -> str:
    """Whole number with thin spaces between thousands, or a dash."""
    return "–" if value is None else f"{value:,.0f}".replace(",", "\u2009")


def duration(seconds: float) -> str:
    """For example 42 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
