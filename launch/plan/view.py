"""Render a plan as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

SHOWN = 12
"""The most layouts and misfits that are printed; --json holds all."""

_ASSUMED = {
    "mean_response_tokens": "sampled tokens of a response or episode, on average (--mean-response-tokens)",
    "mean_prompt_tokens": "tokens of a prompt: half of what context_tokens leaves beside the longest response",
    "mean_observed_tokens": "tokens that an episode reads between its turns, each time as many as a prompt has",
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

_HOST = ("checkpoint_gib", "older_versions_gib", "resting_optimizer_gib", "published_version_gib", "processes_gib")

_CAVEATS = (
    "Not in the model: padding without pipeline stages, uneven loads of experts, stages of unequal work, kernels that "
    "are less efficient on small shards, the optimizer's own time, commits, checkpoints and evaluation; of episodes, "
    "rows of branches and time outside the engines."
)


def render(plan: Mapping[str, Any]) -> RenderableType:
    model, gpus, counted = plan["model"], plan["gpus"], plan["layouts_for"]
    engines, episodes, publish, step = plan["engines"], plan["episodes"], plan["publish"], plan["step"]
    active = f", {model['active_parameters'] / 1e9:.2f} B at work for each token"
    if model["active_parameters"] > 0.9 * model["parameters"]:
        active = ""
    unknown = "" if gpus["teacher_judged"] else " (its config.json is not here: its memory is not judged)"
    teacher = f", teacher on {gpus['teacher']}{unknown}" if gpus["teacher"] else ""
    parts: list[RenderableType] = [
        Text(f"{plan['recipe']}: {model['architecture']}, {model['parameters'] / 1e9:.2f} B parameters{active}"),
        Text(
            f"learner {plan['layout']} on {gpus['learner']} GPUs, engines on {gpus['engines']}{teacher}: "
            f"{gpus['needed']} needed, {gpus['given']} of {gpus['gib_each']:g} GiB given"
        ),
    ]
    if plan["fits"]:
        fullest = f"fits: the fullest learner rank needs {plan['total_gib_per_rank']:.1f} GiB"
        parts.append(Text(fullest, style="bold green"))
    host = plan["host"]
    uses = {name.removesuffix("_gib").replace("_", " "): size for name, size in host.items() if name in _HOST}
    parts.append(
        Text(
            f"host memory: {sum(uses.values()):.0f} GiB for {host['ranks']} learner ranks: "
            + ", ".join(f"{use} {size:.0f}" for use, size in uses.items() if size)
        )
    )
    parts += [Text(f"does not fit: {reason}", style="bold red") for reason in plan["reasons"]]

    # Parameters, gradients and optimizer add up to static; --json has each.
    names = {"activations": "activ.", "head": "head", "working": "work", "scoring": "score", "publishing": "publish"}
    used = {part: title for part, title in names.items() if any(f"{part}_gib" in stage for stage in plan["stages"])}
    columns = {"static": "static", **used, "allowance": "spare", "total": "total"}
    stages = _table("Memory of a learner rank, GiB by pipeline stage", "stage", "M param.")
    for title in columns.values():
        stages.add_column(title, justify="right", no_wrap=True)
    for stage in plan["stages"]:
        cells = [f"{stage.get(f'{name}_gib', 0.0):.1f}" for name in columns]
        stages.add_row(str(stage["stage"]), f"{stage['parameters_per_rank'] / 1e6:.0f}", *cells)
    stages.caption = "static = parameters + gradients + optimizer; of head and work only the larger is there at once"

    run = _table("Engines and one step", "what", "estimate")
    replicas = publish.get("replica_gigabytes")
    beside = "" if replicas is None else f"; replicas of {replicas:.0f} GB beside each engine"
    if publish["sender_gigabytes"]:
        beside = f"; {publish['sender_gigabytes']:.1f} GB from one GPU's port"
    if episodes is not None:
        run.add_row(
            "episodes",
            f"{episodes['turns']:,} turns and {episodes['longest_tokens']:,} tokens at the most, "
            f"{episodes['mean_tokens']:,.0f} on average; {episodes['under_way_per_engine']:,} under way on an engine, "
            "which holds the context of each between its turns too",
        )
    run.add_row(
        "keys and values",
        f"{engines['kv_tokens_per_engine']:,} tokens an engine: {engines['mean_samples_per_engine']:,} "
        f"{'samples' if episodes is None else 'episodes'} of mean length, {engines['longest_samples_per_engine']:,} of "
        "the longest",
    )
    run.add_row(
        "engine weights",
        f"{engines['weights_gib_per_gpu']:.2f} GiB a GPU ({engines['precision']}), CUDA graphs "
        f"{engines['cuda_graphs_gib_per_gpu']:.1f}, "
        f"{engines['kv_bytes_per_token_and_gpu'] / 1024:g} KiB of keys and values a token and GPU",
    )
    run.add_row("publish", f"{publish['gigabytes']:.1f} GB by {publish['channel']}: {publish['seconds']:.1f} s{beside}")
    run.add_row("rollout", f"{step['rollout_s']:.1f} s a batch")
    run.add_row("learner", f"{step['score_s']:.1f} s log-probabilities + {step['update_s']:.1f} s update")
    run.add_row(
        "step",
        f"{step['seconds']:.1f} s ({step['schedule']}); engines busy {step['engines_busy']:.0%}, learner waits "
        f"{step['learner_waits']:.0%}",
    )

    disk = plan["disk"]
    grows = f"{disk['steps']:,} steps × ({disk['batch_gigabytes']:.2g} GB of a batch"
    grows += f" + {disk['logprobs_gigabytes']:.2g} of the learner's log-probabilities)"
    said = f"{disk['all_terabytes']:.3g} TB: {grows} + checkpoints, policies {disk['fixed_terabytes']:.2g} TB"
    if disk["logprobs_kept"] < disk["steps"]:
        said += (
            f"; by run.keep_batches and run.keep_logprobs {disk['terabytes']:.3g} TB at the most, with "
            f"{disk['batches_kept']:,} batches and log-probabilities of {disk['logprobs_kept']:,}"
        )
    run.add_row("disk", said)

    schedules = _table("The same phases under other schedules, simulated", "schedule", "s a step", "largest lag", "")
    for row in plan["schedules"]:
        mark = "this recipe" if row["recipe"] else ""
        schedules.add_row(row["schedule"], f"{row['seconds']:.1f}", str(row["largest_lag"]), mark)

    title = f"Learner layouts on {counted['gpus']} GPUs ({counted['counted']}), fastest first"
    layouts = _table(title, "layout", "s a step", "learner", "static", "activ.", "GiB", "")
    for row in plan["layouts"][:SHOWN]:
        sizes = [f"{row[name]:.1f}" for name in ("static_gib_per_rank", "activations_gib", "total_gib")]
        seconds = f"{row['step_s']:.1f}", f"{row['learner_s']:.1f}"
        layouts.add_row(row["layout"], *seconds, *sizes, "recipe" * row["recipe"])
    shown = f", {SHOWN} shown; --json lists all" if len(plan["layouts"]) > SHOWN else ""
    layouts.caption = f"{len(plan['layouts'])} fit{shown}; learner = its part of a step, GiB = all of the fullest rank"
    parts += [stages, run, schedules, layouts]

    if plan["misfits"]:
        misfits = _table("Layouts that do not fit, even with full recomputation", "layout", "why")
        for row in plan["misfits"][:SHOWN]:
            misfits.add_row(row["layout"], row["reason"])
        if len(plan["misfits"]) > SHOWN:
            misfits.caption = f"{len(plan['misfits']) - SHOWN} more; --json lists all"
        parts.append(misfits)
    assumed = _table("Assumed, not measured", "value", "what")
    for name, meaning in _ASSUMED.items():
        if name == "mean_observed_tokens" and episodes is None:
            continue
        assumed.add_row(f"{plan['assumptions'][name]:g}", meaning)
    return Group(*parts, assumed, Text(_CAVEATS, style="dim"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
