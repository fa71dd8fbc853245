"""`evenkeel runs`: the headline numbers of one run, of the runs of a folder, or of several side by side."""

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
    """A table of two columns of what pipeline.analysis.summary returned."""
    table = Table(title=Text(f"{numbers['name']} ({numbers['state']})"), show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(numbers):
        table.add_row(name, Text(value))
    return table


def _rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    if numbers["sft"]:
        return _sft_rows(numbers)
    low, high = numbers["pass_at_1_last_low"], numbers["pass_at_1_last_high"]
    interval = f" (95 %: {percent(low)} to {percent(high)})" if low is not None and high is not None else ""
    k = numbers["k"] or "k"
    return [
        ("held-out pass@1", f"{percent(numbers['pass_at_1_first'])} → {percent(numbers['pass_at_1_last'])}{interval}"),
        *(
            [(f"held-out pass@{k}", f"{percent(numbers['pass_at_k_first'])} → {percent(numbers['pass_at_k_last'])}")]
            if k != 1
            else []
        ),
        *_unjudged(numbers),
        ("held-out reward", _change(numbers["held_out_reward_first"], numbers["held_out_reward_last"])),
        *_parts(numbers),
        ("steps", f"{numbers['steps']} of {numbers['steps_planned']}"),
        ("wall time", f"{duration(numbers['wall_s'])}, without pauses between two starts"),
        ("samples", count(numbers["samples"])),
        ("trained tokens", f"{count(numbers['tokens'])}, {count(numbers['tokens_per_s'])} a second of the steps"),
        ("learner", f"{numbers['learner_layout']}, {numbers['learner_precision']}"),
        ("engines", f"{numbers['engines']}, {numbers['rollout_precision']}"),
        ("objective", str(numbers["objective"])),
        ("advantage", f"{numbers['advantage']}, correction {numbers['correction']}"),
        ("schedule", f"{numbers['schedule']}, oldest token {decimal(numbers['lag_max'])} versions"),
        ("ESS", f"last {decimal(numbers['ess_last'])}, lowest {decimal(numbers['ess_min'])}"),
        ("k3 KL, entropy", f"{decimal(numbers['k3_kl_last'])}, {decimal(numbers['entropy_last'])}"),
        ("prompts", _counted(numbers, _PROMPTS) or "all asked as they came"),
        ("trouble", _counted(numbers, _TROUBLE) or "none"),
        ("bottleneck", str(numbers["bottleneck"])),
        *(("warning", sentence) for sentence in numbers["warnings"]),
        *(("alarm", text) for text in numbers["alarms"]),
    ]


def _sft_rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    sft = numbers["sft"]
    return [
        ("loss", f"{_change(sft['loss_first'], sft['loss_last'])} nats a token"),
        ("held-out loss", f"{_change(sft['held_out_loss_first'], sft['held_out_loss_last'])} nats a token"),
        ("steps", f"{numbers['steps']} of {numbers['steps_planned']}"),
        ("wall time", f"{duration(numbers['wall_s'])}, without pauses between two starts"),
        ("learned tokens", count(numbers["tokens"])),
        ("learning rate", f"{decimal(sft['lr_last'])} at the last step"),
        ("learner", f"{numbers['learner_layout']}, {numbers['learner_precision']}"),
        *(("warning", sentence) for sentence in numbers["warnings"]),
    ]


def _change(first: float | None, last: float | None) -> str:
    return f"{decimal(first)} → {decimal(last)}"


def _unjudged(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A row where a held-out sample of the first or the last evaluation has no reward."""
    first, last = numbers["held_out_failures_first"], numbers["held_out_failures_last"]
    return [("held-out failures", f"{first} → {last} samples without a reward")] if first or last else []


def _parts(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One row for all parts of the held-out reward; none where it has no parts."""
    first, last = numbers["held_out_parts_first"], numbers["held_out_parts_last"]
    names = dict.fromkeys((*last, *first))
    told = [f"{one_line(name, _NAME)} {_change(first.get(name), last.get(name))}" for name in names]
    return [("held-out parts", listed(told, most=12, between=", "))] if told else []


_NAME = 60
"""Characters of a part's name that are shown."""
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


def _counted(numbers: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {numbers[key]}" for key, name in kinds.items() if numbers[key])


def render_list(folder: Path, runs: Sequence[Mapping[str, Any]]) -> Table:
    """A row a run, of what pipeline.analysis.summary.list_runs returned."""
    table = Table(title=Text(f"runs in {folder}"), title_justify="left")
    for heading in ("run", "state", "steps", "held-out pass@1", "reward", "wall time"):
        table.add_column(heading, overflow="fold")
    for run in runs:
        name = Path(run["path"]).name
        table.add_row(*map(Text, (name, run["error"]) if "error" in run else (name, *_listed(run))))
    return table


def _listed(run: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(run["state"]),
        f"{run['steps']} of {run['steps_planned']}",
        f"{percent(run['pass_at_1_first'])} → {percent(run['pass_at_1_last'])}",
        decimal(run["reward_last"]),
        duration(run["wall_s"]),
    )


def render_comparison(compared: Mapping[str, Any]) -> Table:
    """A column a run, of what pipeline.analysis.comparison.compare_runs returned; only rows in which runs differ."""
    runs = compared["runs"]
    told = [_by_name(run) for run in runs]
    rows = {name: [numbers.get(name, "–") for numbers in told] for name in dict.fromkeys(n for t in told for n in t)}
    differing = {name: values for name, values in rows.items() if len(set(values)) > 1}
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


def _by_name(numbers: Mapping[str, Any]) -> dict[str, str]:
    """The rows of `render`; several warnings or alarms are lines of one."""
    rows = {"state": str(numbers["state"])}
    for name, value in _rows(numbers):
        rows[name] = f"{rows[name]}\n{value}" if name in rows else value
    return rows


def print_summary(result: Mapping[str, Any]) -> None:
    """Print a run's headline numbers as a table, and where its report lies."""
    Console().print(render(result))
    if "report" in result:
        print(f"report: {result['report']}")
