"""Render the tables of `evenkeel runs` and `scaling`: one run, the runs of a folder, a comparison, fits of curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.analysis.summary import count, decimal, duration, percent
from precision.text import listed, one_line


def render(numbers: Mapping[str, Any]) -> Table:
    """Return a table of a run's summary (pipeline.analysis.summary)."""
    table = Table(title=Text(f"{numbers['name']} ({numbers['state']})"), show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(numbers):
        table.add_row(name, Text(value))
    return table


def _rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    def change(first: float | None, last: float | None) -> str:
        return f"{decimal(first)} → {decimal(last)}"

    def counted(kinds: Mapping[str, str]) -> str:
        return ", ".join(f"{name} {numbers[key]}" for key, name in kinds.items() if numbers[key])

    steps = ("steps", f"{numbers['steps']} of {numbers['steps_planned']}")
    wall = ("wall time", f"{duration(numbers['wall_s'])}, without pauses between two starts")
    learner = ("learner", f"{numbers['learner_layout']}, {numbers['learner_precision']}")
    warnings = [("warning", sentence) for sentence in numbers["warnings"]]
    if sft := numbers["sft"]:
        return [
            ("loss", f"{change(sft['loss_first'], sft['loss_last'])} nats a token"),
            ("held-out loss", f"{change(sft['held_out_loss_first'], sft['held_out_loss_last'])} nats a token"),
            steps,
            wall,
            ("learned tokens", count(numbers["tokens"])),
            ("learning rate", f"{decimal(sft['lr_last'])} at the last step"),
            learner,
            *warnings,
        ]
    low, high = numbers["pass_at_1_last_low"], numbers["pass_at_1_last_high"]
    interval = f" (95 %: {percent(low)} to {percent(high)})" if low is not None and high is not None else ""
    told = [
        ("held-out pass@1", f"{percent(numbers['pass_at_1_first'])} → {percent(numbers['pass_at_1_last'])}{interval}")
    ]
    if numbers["k"] != 1:
        many = f"{percent(numbers['pass_at_k_first'])} → {percent(numbers['pass_at_k_last'])}"
        told.append((f"held-out pass@{numbers['k'] or 'k'}", many))
    failures = numbers["held_out_failures_first"], numbers["held_out_failures_last"]
    if any(failures):
        told.append(("held-out failures", f"{failures[0]} → {failures[1]} samples without a reward"))
    told.append(("held-out reward", change(numbers["held_out_reward_first"], numbers["held_out_reward_last"])))
    first, last = numbers["held_out_parts_first"], numbers["held_out_parts_last"]
    names = dict.fromkeys((*last, *first))
    parts = [f"{one_line(name, _NAME)} {change(first.get(name), last.get(name))}" for name in names]
    if parts:
        told.append(("held-out parts", listed(parts, most=12, between=", ")))
    return [
        *told,
        steps,
        wall,
        ("samples", count(numbers["samples"])),
        ("trained tokens", f"{count(numbers['tokens'])}, {count(numbers['tokens_per_s'])} a second of the steps"),
        learner,
        ("engines", f"{numbers['engines']}, {numbers['rollout_precision']}"),
        ("objective", str(numbers["objective"])),
        ("advantage", f"{numbers['advantage']}, correction {numbers['correction']}"),
        ("schedule", f"{numbers['schedule']}, oldest token {decimal(numbers['lag_max'])} versions"),
        ("ESS", f"last {decimal(numbers['ess_last'])}, lowest {decimal(numbers['ess_min'])}"),
        ("k3 KL, entropy", f"{decimal(numbers['k3_kl_last'])}, {decimal(numbers['entropy_last'])}"),
        ("prompts", counted(_PROMPTS) or "all asked as they came"),
        ("trouble", counted(_TROUBLE) or "none"),
        ("bottleneck", str(numbers["bottleneck"])),
        *warnings,
        *(("alarm", text) for text in numbers["alarms"]),
    ]


_NAME = 60
"""Most characters of a part's name in a table."""
_TROUBLE = {
    "restarts": "restarts",
    "dropped": "dropped groups",
    "verifier_failures": "failed verifiers",
    "teacher_failures": "samples without the teacher's scores",
}
_PROMPTS = {
    "refills": "refills",
    "zero_variance": "groups without contrast",
    "filtered": "groups dropped by prompts.group_filter",
    "solved_groups": "groups of solved problems",
    "interrupted": "interrupted samples",
}


def render_list(folder: Path, runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each run of pipeline.analysis.summary.list_runs."""
    table = Table(title=Text(f"runs in {folder}"), title_justify="left")
    for heading in ("run", "state", "steps", "held-out pass@1", "reward", "wall time"):
        table.add_column(heading, overflow="fold")
    for run in runs:
        cells = (
            [run["error"]]
            if "error" in run
            else [
                str(run["state"]),
                f"{run['steps']} of {run['steps_planned']}",
                f"{percent(run['pass_at_1_first'])} → {percent(run['pass_at_1_last'])}",
                decimal(run["reward_last"]),
                duration(run["wall_s"]),
            ]
        )
        table.add_row(*map(Text, (Path(run["path"]).name, *cells)))
    return table


def render_comparison(compared: Mapping[str, Any]) -> Table:
    """Return a table of pipeline.analysis.comparison.compare_runs: a column a run, a row for each difference."""
    runs = compared["runs"]
    told = []
    for run in runs:  # several warnings or alarms are lines of one row
        rows = {"state": str(run["state"])}
        for name, value in _rows(run):
            rows[name] = f"{rows[name]}\n{value}" if name in rows else value
        told.append(rows)
    values_of = {name: [rows.get(name, "–") for rows in told] for name in dict.fromkeys(n for t in told for n in t)}
    differing = {name: values for name, values in values_of.items() if len(set(values)) > 1}
    where = "where they differ" if differing or compared["recipe"] else "which differ in nothing"
    table = Table(title=Text(f"{len(runs)} runs, {where}"), title_justify="left")
    table.add_column(style="dim", overflow="fold")
    for run in runs:
        table.add_column(Text(run["path"]), overflow="fold")
    for name, values in differing.items():
        table.add_row(Text(name), *map(Text, values))
    table.add_section()
    for key, chosen in compared["recipe"].items():
        table.add_row(Text(key), *(Text(str(value)) for value in chosen))
    return table


def print_summary(result: Mapping[str, Any]) -> None:
    Console().print(render(result))
    if "report" in result:
        print(f"report: {result['report']}")


def tables(report: dict[str, Any]) -> list[Table]:
    """Return tables of a scaling report: its fits, its fits at a common A, and its forecasts."""

    def with_interval(fit: dict[str, Any], key: str) -> str:
        digits = {"A": ".3f", "B": ".2f", "C_mid": ".4g"}[key]
        low, high = fit[f"{key}_interval"]
        return f"{fit[key]:{digits}} ({low:{digits}} to {high:{digits}})"

    fits = report.get("runs_fitted") or [report]
    own = Table("curve", "points", "R_0", "A", "B", "C_mid", "noise", "A known", box=None)
    for fit in fits:
        own.add_row(
            ", ".join(fit["runs"]),
            str(fit["num_points"]),
            f"{fit['R_0']:.3f}",
            *(with_interval(fit, key) for key in ("A", "B", "C_mid")),
            f"{fit['residual_std']:.4f}",
            "yes" if fit["identifiable"] else "no",
        )
    tables = [own]
    if "common_A" in report:
        common = Table("curve", "B", "C_mid", "noise", box=None, title=f"at A = {report['common_A']:.3f}")
        for fit in fits:
            refit = fit["at_common_A"]
            row = (with_interval(refit, "B"), with_interval(refit, "C_mid"), f"{refit['residual_std']:.4f}")
            common.add_row(", ".join(fit["runs"]), *row)
        tables.append(common)
    if "forecasts" in report:
        forecasts = Table(report["x"], report["y"], "95 %", "", box=None)
        for one in report["forecasts"]:
            low, high = one["R_interval"]
            beyond = "beyond the data" if one["extrapolated"] else ""
            forecasts.add_row(f"{one['C']:g}", f"{one['R']:.3f}", f"{low:.3f} to {high:.3f}", beyond)
        tables.append(forecasts)
    return tables


def warnings(report: dict[str, Any]) -> list[str]:
    fits = report.get("runs_fitted") or [report]
    named = [f"{', '.join(fit['runs'])}: {text}" if len(fits) > 1 else text for fit in fits for text in fit["warnings"]]
    return named + (report["warnings"] if "runs_fitted" in report else [])
