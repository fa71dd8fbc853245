"""A plan as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

SHOWN = 12
"""Layouts and misfits printed; --json holds all."""

_ASSUMED = {
    "mean_response_tokens": "tokens of a response, on average (--mean-response-tokens)",
    "mean_prompt_tokens": "tokens of a prompt: half of what context_tokens leaves beside max_new_tokens",
    "rollout_tokens_per_gpu_s": "response tokens a second of one engine GPU, long tail included "
    "(--rollout-tokens-per-gpu-s)",
    "mfu": "of the peak, in the learner's matrix work, without bubbles and communication (--mfu)",
    "peak_tflops": "dense bfloat16 TFLOPS of a GPU (--peak-tflops)",
    "disk_gb_s": "GB/s of the shared file system, writing and for each reader (--disk-gb-s)",
    "delta_share": "of the published bytes, what one version changes (weights.channel: delta; docs/precision.md)",
    "local_gb_s": "GB/s at which an engine loads from its own host (delta)",
    "broadcast_gb_s": "GB/s from learner to engines, gathering included (--broadcast-gb-s)",
    "nvlink_gb_s": "GB/s of collectives within a node",
    "network_gb_s": "GB/s of each GPU between nodes",
    "hbm_gb_s": "GB/s of GPU memory",
    "decode_efficiency": "of that while engines decode, if no rollout throughput is given; fitted to one published run",
    "gpus_per_node": "GPUs with NVLink between them",
    "runtime_gib_per_rank": "GiB for the CUDA context, NCCL and cuBLAS",
    "fragmentation": "of the memory above static, lost to fragmentation",
}

_CAVEATS = (
    "Not in the model: padding, uneven loads of experts, stages of unequal work, kernels that are less efficient on "
    "small shards, the optimizer's own time, commits, checkpoints and evaluation."
)


def render(plan: Mapping[str, Any]) -> RenderableType:
    """The plan as tables: the verdict, its reasons, the alternatives, and what was assumed."""
    return Group(*_parts(plan))


def _parts(plan: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield from _verdict(plan)
    yield _stages(plan)
    yield _run(plan)
    yield _schedules(plan)
    counted = plan["layouts_for"]
    title = f"Learner layouts on {counted['gpus']} GPUs ({counted['counted']}), fastest first"
    yield _layouts(plan["layouts"], title)
    if plan["misfits"]:
        yield _misfits(plan["misfits"])
    yield _assumptions(plan["assumptions"])
    yield Text(_CAVEATS, style="dim")


def _verdict(plan: Mapping[str, Any]) -> Iterator[RenderableType]:
    model, gpus = plan["model"], plan["gpus"]
    active = "" if model["active_parameters"] > 0.9 * model["parameters"] else (
        f", {model['active_parameters'] / 1e9:.2f} B at work for each token"
    )  # fmt: skip
    unknown = "" if gpus["teacher_judged"] else " (its config.json is not here: its memory is not judged)"
    teacher = f", teacher on {gpus['teacher']}{unknown}" if gpus["teacher"] else ""
    yield Text(f"{plan['recipe']}: {model['architecture']}, {model['parameters'] / 1e9:.2f} B parameters{active}")
    yield Text(
        f"learner {plan['layout']} on {gpus['learner']} GPUs, engines on {gpus['engines']}{teacher}: "
        f"{gpus['needed']} needed, {gpus['given']} of {gpus['gib_each']:g} GiB given"
    )
    if plan["fits"]:
        yield Text(f"fits: the fullest learner rank needs {plan['total_gib_per_rank']:.1f} GiB", style="bold green")
    yield Text(f"host memory, while a checkpoint is written: {plan['save_copy_gib_per_rank']:.1f} GiB a learner rank")
    for reason in plan["reasons"]:
        yield Text(f"does not fit: {reason}", style="bold red")


def _stages(plan: Mapping[str, Any]) -> Table:
    # Parameters, gradients and optimizer add up to static; --json has each.
    parts = {"activations": "activ.", "head": "head", "working": "work", "scoring": "score", "publishing": "publish"}
    used = {part: title for part, title in parts.items() if any(f"{part}_gib" in stage for stage in plan["stages"])}
    columns = {"static": "static", **used, "allowance": "spare", "total": "total"}
    table = _table("Memory of a learner rank, GiB by pipeline stage", "stage", "M param.")
    for title in columns.values():
        table.add_column(title, justify="right", no_wrap=True)
    for stage in plan["stages"]:
        cells = [f"{stage.get(f'{name}_gib', 0.0):.1f}" for name in columns]
        table.add_row(str(stage["stage"]), f"{stage['parameters_per_rank'] / 1e6:.0f}", *cells)
    table.caption = "static = parameters + gradients + optimizer; of head and work only the larger is there at once"
    return table


def _run(plan: Mapping[str, Any]) -> Table:
    engines, publish, step = plan["engines"], plan["publish"], plan["step"]
    table = _table("Engines and one step", "what", "estimate")
    rows = {
        "keys and values": f"{engines['kv_tokens_per_engine']:,} tokens an engine: "
        f"{engines['mean_samples_per_engine']:,} samples of mean length, "
        f"{engines['longest_samples_per_engine']:,} of the longest",
        "engine weights": f"{engines['weights_gib_per_gpu']:.2f} GiB a GPU ({engines['precision']}), "
        f"{engines['kv_bytes_per_token_and_gpu'] / 1024:g} KiB of keys and values a token and GPU",
        "publish": f"{publish['gigabytes']:.1f} GB by {publish['channel']}: {publish['seconds']:.1f} s"
        + (
            f"; replicas of {publish['replica_gigabytes']:.0f} GB beside each engine"
            if "replica_gigabytes" in publish
            else ""
        ),
        "rollout": f"{step['rollout_s']:.1f} s a batch",
        "learner": f"{step['score_s']:.1f} s log-probabilities + {step['update_s']:.1f} s update",
        "step": f"{step['seconds']:.1f} s ({step['schedule']}); engines busy {step['engines_busy']:.0%}, learner waits "
        f"{step['learner_waits']:.0%}",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _schedules(plan: Mapping[str, Any]) -> Table:
    table = _table("The same phases under other schedules, simulated", "schedule", "s a step", "largest lag", "")
    for row in plan["schedules"]:
        table.add_row(
            row["schedule"], f"{row['seconds']:.1f}", str(row["largest_lag"]), "this recipe" if row["recipe"] else ""
        )
    return table


def _layouts(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = _table(title, "layout", "s a step", "learner", "static", "activ.", "GiB", "")
    for row in rows[:SHOWN]:
        sizes = [f"{row[name]:.1f}" for name in ("static_gib_per_rank", "activations_gib", "total_gib")]
        table.add_row(
            row["layout"], f"{row['step_s']:.1f}", f"{row['learner_s']:.1f}", *sizes, "recipe" * row["recipe"]
        )
    shown = f", {SHOWN} shown; --json lists all" if len(rows) > SHOWN else ""
    table.caption = f"{len(rows)} fit{shown}; learner = its part of a step, GiB = all of the fullest rank"
    return table


def _misfits(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Layouts that do not fit, even with full recomputation", "layout", "why")
    for row in rows[:SHOWN]:
        table.add_row(row["layout"], row["reason"])
    if len(rows) > SHOWN:
        table.caption = f"{len(rows) - SHOWN} more; --json lists all"
    return table


def _assumptions(values: Mapping[str, Any]) -> Table:
    table = _table("Assumed, not measured", "value", "what")
    for name, meaning in _ASSUMED.items():
        table.add_row(f"{values[name]:g}", meaning)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
