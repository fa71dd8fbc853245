"""`evenkeel runs show`: the headline numbers of one run as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from pipeline.analysis.html_report import count, decimal, duration, percent


def render(numbers: Mapping[str, Any]) -> Table:
    """A table of two columns of what pipeline.analysis.summary returned."""
    table = Table(title=Text(f"{numbers['name']} ({numbers['state']})"), show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(numbers):
        table.add_row(name, Text(value))
    return table


def _rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    low, high = numbers["pass_at_1_last_low"], numbers["pass_at_1_last_high"]
    interval = f" (95 %: {percent(low)} to {percent(high)})" if low is not None and high is not None else ""
    k = numbers["k"] or "k"
    return [
        ("held-out pass@1", f"{percent(numbers['pass_at_1_first'])} → {percent(numbers['pass_at_1_last'])}{interval}"),
        (f"held-out pass@{k}", f"{percent(numbers['pass_at_k_first'])} → {percent(numbers['pass_at_k_last'])}"),
        ("steps", f"{numbers['steps']} of {numbers['steps_planned']}"),
        ("wall time", f"{duration(numbers['wall_s'])}, first to last event"),
        ("samples", count(numbers["samples"])),
        ("trained tokens", f"{count(numbers['tokens'])}, {count(numbers['tokens_per_s'])} a second"),
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


_TROUBLE = {"restarts": "restarts", "dropped": "dropped groups", "verifier_failures": "failed verifiers"}
_PROMPTS = {
    "refills": "refills",
    "zero_variance": "groups without contrast",
    "solved_groups": "groups of solved problems",
    "interrupted": "interrupted samples",
}


def _counted(numbers: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {numbers[key]}" for key, name in kinds.items() if numbers[key])
