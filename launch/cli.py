"""Define the `evenkeel` command. Each command imports its dependencies when it runs, so that `--help` is instant."""

from __future__ import annotations

import io
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from launch import terminal
from launch.convert.commands import convert_app
from launch.exit_codes import run_command
from launch.quant_map.commands import quant_map_app
from launch.repair import repair
from launch.roles.commands import role_app
from launch.schedulers.kubernetes.command import kubernetes
from launch.schedulers.slurm.command import slurm
from launch.show.commands import export, fork, plugins, runs_app, scaling, trace, trajectories_app
from launch.terminal import (
    AsJson,
    Overrides,
    RecipeArgument,
    RecipePath,
    check_recipe_or_run,
    emit,
    emit_or_print,
    going_on,
)
from pipeline.child_process import append_working_folder_to_path
from pipeline.errors import RecipeError

app = typer.Typer(
    name="evenkeel",
    help="RL post-training that stays stable when the engine that samples and the engine that learns do not agree.\n\n"
    "A typical session:  evenkeel model new → evenkeel sft → evenkeel train → evenkeel report.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
launch_app = typer.Typer(help="Render what a cluster's scheduler needs to run a recipe.", no_args_is_help=True)
launch_app.command("slurm")(slurm)
launch_app.command("kubernetes")(kubernetes)
model_app = typer.Typer(help="Make models.", no_args_is_help=True)
verify_app = typer.Typer(help="Check that engine and learner agree, and that a run lost nothing.", no_args_is_help=True)
app.add_typer(convert_app, name="convert")
app.add_typer(launch_app, name="launch")
app.add_typer(model_app, name="model")
app.add_typer(quant_map_app, name="quant-map")
app.add_typer(role_app, name="role")
app.add_typer(runs_app, name="runs")
app.add_typer(trajectories_app, name="trajectories")
app.add_typer(verify_app, name="verify")

app.command("export")(export)
app.command("fork")(fork)
app.command("plugins")(plugins)
app.command("repair")(repair)
app.command("scaling")(scaling)
app.command("trace")(trace)
COMPLETION_VARIABLE = "_EVENKEEL_COMPLETE"
"""Set by a shell that asks for the completions of a word; typer answers."""
RunPath = Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.", show_default=False)]


def _print_version(asked: bool) -> None:
    if not asked:
        return
    try:
        print(f"evenkeel {metadata.version('evenkeel')}")
    except metadata.PackageNotFoundError:
        print("evenkeel (from its sources, not installed)")
    raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options of `evenkeel` itself; the help of the whole is that of `app`."""


@app.command()
def train(
    recipe: Annotated[Path | None, RecipeArgument] = None,
    overrides: Overrides = None,
    replay: Annotated[
        Path | None, typer.Option(help="Train again on the recorded batches of this run, without engines.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65532,
            help="Show /metrics for Prometheus on loopback: the supervisor at this port, learner, collector and router "
            "at the next three, engines at their own.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a policy; the same command resumes a run that was interrupted.

    Starts SGLang engines, a collector and a Megatron-Core learner on this machine, restarts whatever dies, and stops
    them at the end. Each has GPUs of its own among those that CUDA_VISIBLE_DEVICES leaves; with weights.channel ipc
    learner and engines share them. `--replay RUN` instead repeats the learner's part of a finished run into RUN-replay
    and says whether the weights came out bit-identical: it exits 1 where they did not. Once that is finished, the next
    one trains into RUN-replay-2.
    """

    from launch.run.replay import replay_run
    from launch.run.train import train_run
    from launch.show.runs import print_summary
    from pipeline.config.loader import load_recipe, taken_from

    if replay is not None:
        result = replay_run(replay, overrides or [])
        emit_or_print(result, as_json)
        raise typer.Exit(0 if result["bit_identical"] else 1)
    if recipe is None:
        raise RecipeError("give a recipe, for example `evenkeel train demo`, or --replay RUN")
    result = train_run(load_recipe(recipe, overrides or []), metrics_port, source=taken_from(recipe))
    if as_json:
        emit(result)
    elif "stopped" not in result:
        print_summary(result)


@app.command()
def sft(
    recipe: RecipePath,
    out: Annotated[Path, typer.Option(help="Folder for the trained HF model.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 220,
    batch_size: Annotated[int, typer.Option(min=1, max=2**20, help="Demonstrations a step.")] = 128,
    lr: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Peak learning rate. Default: 1e-5 with --data, 3e-3 on demonstrations (tiny, random models)."
        ),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            min=0, help="Steps in which the learning rate rises linearly. Default: a quarter of --steps, at most 50."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help='Your own rows instead of the task\'s: {"prompt", "response"} or {"messages"}; JSON Lines, Parquet, a '
            "saved dataset (docs/sft.md)."
        ),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(metavar="SHARE|FILE", help="With --data: rows whose loss is measured, not trained on."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Supervised fine-tuning, with the same Megatron-Core learner and checkpoint format: on the task's demonstrations,
    or on --data.

    Reads model, task and learner of the recipe. The learning rate rises for --warmup-steps, then falls linearly to
    zero.
    """
    from launch.run.sft import read_recipe, run_sft

    result = run_sft(
        read_recipe(recipe, overrides or [], steps, data),
        out,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        warmup_steps=warmup_steps,
        data=data,
        held_out=held_out,
    )
    emit_or_print(result, as_json)


@app.command("recipe")
def show_recipe(
    recipe: Annotated[Path | None, RecipeArgument] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="List every key, its type, default and meaning.")] = False,
) -> None:
    """Print a recipe with every default spelled out, or the list of known keys. The files it was
    read from, and warnings, go to stderr."""
    from pipeline.config.loader import load_recipe, taken_from
    from pipeline.config.recipe import Recipe, advice

    if schema:
        print(json.dumps(Recipe.model_json_schema(), indent=1))
    elif recipe is not None:
        resolved = load_recipe(recipe, overrides or [])
        print(f"recipe: {taken_from(recipe)}", file=sys.stderr)
        for sentence in advice(resolved):
            print(f"warning: {sentence}", file=sys.stderr)
        print(resolved.to_yaml(), end="")
    else:
        raise RecipeError("give a recipe, or --schema")


@app.command()
def plan(
    recipe: RecipePath,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs there are, learner and engines together.", show_default=False)],
    gpu_gib: Annotated[float, typer.Option(help="Memory of each, in GiB (an H100 has 79.6).", show_default=False)],
    host_gib: Annotated[
        float | None, typer.Option(help="Memory of a host with 8 GPUs of the learner. Default: not judged.")
    ] = None,
    mean_response_tokens: Annotated[
        float | None, typer.Option(help="Mean sampled tokens of a response or episode. Default: half of the most.")
    ] = None,
    rollout_tokens_per_gpu_s: Annotated[
        float | None,
        typer.Option(help="Response tokens a second of one engine GPU, over a whole batch. Default: by roofline."),
    ] = None,
    mfu: Annotated[
        float | None, typer.Option(help="Share of peak FLOPS in the learner's matrix work. Default: 0.4.")
    ] = None,
    peak_tflops: Annotated[float | None, typer.Option(help="bfloat16 TFLOPS of a GPU. Default: 989, an H100.")] = None,
    disk_gb_s: Annotated[float | None, typer.Option(help="GB/s of the shared file system. Default: 2.")] = None,
    broadcast_gb_s: Annotated[float | None, typer.Option(help="GB/s of a broadcast publish. Default: 3.6.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Will a recipe fit these GPUs, which learner layouts would, and how long will a step take?

    Needs neither a GPU nor weights: the model's config.json is enough. A relative model.path is looked for here, then
    beside the recipe. Learner and engines have GPUs of their own; with weights.channel ipc they share them.

    **Memory**: parameters are counted exactly, and activations tensor by tensor for full micro-batches. CUDA context
    and fragmentation are assumed. **Layouts**: all that use the learner's GPUs, each with the least recomputation that
    fits, ranked by seconds a step; for the others, what they lack. **Seconds**: a roofline over assumed speeds, put
    through a simulation of the recipe's schedule. They are guesses until you replace the assumptions by what you
    measured; counts and static memory are not. **Disk**: the whole run's, and by run.keep_batches and keep_logprobs.

    Exits 0 whether the recipe fits or not: read `fits` and `reasons` of --json, or the first lines.

    For example:  evenkeel plan qwen3_32b --gpus 64 --gpu-gib 80 --mean-response-tokens 3206
    """
    from launch.plan.planner import make_plan

    chosen = dict(
        mean_response_tokens=mean_response_tokens,
        rollout_tokens_per_gpu_s=rollout_tokens_per_gpu_s,
        mfu=mfu,
        peak_tflops=peak_tflops,
        disk_gb_s=disk_gb_s,
        broadcast_gb_s=broadcast_gb_s,
    )
    result = make_plan(recipe, overrides or [], chosen, gpus=gpus, gpu_gib=gpu_gib, host_gib=host_gib)
    if as_json:
        emit(result)
    else:
        from rich.console import Console

        from launch.plan.view import render

        Console().print(render(result))


@app.command()
def mismatch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|RUN",
            help="A recipe (fresh rollouts of its model), or a run directory (a batch that it recorded).",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for mismatch.json and .html; default: runs/NAME-mismatch.")
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, help="RECIPE: prompts to sample; default: rollout.prompts_per_batch."),
    ] = None,
    now: Annotated[
        Path | None, typer.Option(help="RECIPE: HF folder of the weights that are trained; default: model.path.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=0, help="RUN: batch index; default: the last trained batch.")] = None,
    locate: Annotated[
        bool, typer.Option("--locate/--no-locate", help="Search for faults of single modules; a pass for each.")
    ] = True,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Where does the mismatch of learner and engine come from?

    Splits the log-ratio of every sampled token into staleness, quantization, (for mixtures) routing, kernels and
    decoding; the terms add up exactly. Starts one engine and one learner of the recipe's layout. Writes a page of plots
    and says in a paragraph what to do. See docs/precision.md.
    """
    check_recipe_or_run(source)  # before Megatron and SGLang are imported
    from launch.attribution.measure import measure

    with going_on("an engine and a learner score the same tokens"):
        result = measure(source, overrides or [], out=out, num_prompts=prompts, now=now, batch=batch, locate=locate)
    if as_json:
        emit(result)
        return
    print(result["verdict"])
    print(f"page: {result['page']}")


@app.command()
def report(run: RunPath) -> None:
    """Write RUN/report.html: one self-contained page with curves and histograms.

    It leads to RUN/samples.html: prompts, responses and rewards of some groups, each token colored by how far learner
    and engine disagree on it.
    """
    from pipeline.analysis.report import write_report

    print(write_report(run))


@app.command()
def doctor(
    folder: Annotated[
        Path | None, typer.Argument(help="Where runs are written, on all hosts; default: runs.", show_default=False)
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Hosts of a cluster, NAME or NAME=ADDRESS, with commas between them.")
    ] = None,
    via: Annotated[
        str, typer.Option(help="Starts a program on {host}, such as: srun --nodelist={host} -N1 -n1.")
    ] = "ssh {host}",
    python: Annotated[
        str | None, typer.Option(help="Python on the hosts, with Even Keel; default: the path of this Python.")
    ] = None,
    ports: Annotated[
        str, typer.Option(help="Ports that each host must reach on every other host; 0: any free port.")
    ] = "29500,30000",
    visible_within: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which an unseen change counts as lost.")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Check this machine: Python, packages, CUDA, memory, disk, ports.

    With `--hosts A,B FOLDER` it checks instead what several hosts need of each other and of the folder that they share:
    exclusive creation, how late changes are seen, free space, ports.
    """
    if hosts is None:
        if (via, python, ports, visible_within) != ("ssh {host}", None, "29500,30000", 60.0):
            raise RecipeError(
                "--via, --python, --ports and --visible-within need --hosts A,B; give it, or leave them out"
            )
        from launch.doctor import machine

        with going_on("importing every package, as a run does (half a minute)"):
            checks = machine.diagnose(folder or Path("runs"))
        raise typer.Exit(machine.report(checks, as_json))
    from launch.doctor.hosts import check_hosts

    raise typer.Exit(check_hosts(hosts, folder or Path("runs"), as_json, via, python, ports, visible_within))


@model_app.command("new")
def model_new(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)],
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 128,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 2,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    ffn: Annotated[int, typer.Option(help="Feed-forward size.")] = 384,
    experts: Annotated[int | None, typer.Option(help="Experts of each layer: a Qwen3-MoE model.")] = None,
    experts_per_token: Annotated[int | None, typer.Option(help="Experts that each token visits; default 2.")] = None,
    expert_ffn: Annotated[int | None, typer.Option(help="Feed-forward size of an expert; default: --ffn.")] = None,
    characters: Annotated[
        str, typer.Option(help="The tokenizer's alphabet.")
    ] = "0123456789+-*=,;:abcdefghijklmnopqrstuvwxyz ",
    tie: Annotated[bool, typer.Option(help="Tie embeddings and LM head.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="Folder of a config.json whose sizes are taken, instead of those above.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the weights.")] = 0,
) -> None:
    """Write a random Qwen3 or Qwen3-MoE HF checkpoint with a character-level tokenizer. Downloads nothing."""
    from launch.convert.new_model import new_model, new_model_like

    if config is not None:
        sizes = (name for name in context.params if name not in ("directory", "characters", "config", "seed"))
        given = [name for name in sizes if "COMMANDLINE" in str(context.get_parameter_source(name))]
        if given:
            raise RecipeError(f"--config says what --{given[0].replace('_', '-')} would; leave one of them out")
        new_model_like(directory, config, characters=characters, seed=seed)
        print(directory)
        return
    new_model(
        directory,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_ffn=expert_ffn,
        characters=characters,
        tie=tie,
        seed=seed,
    )
    print(directory)


@verify_app.command("parity")
def verify_parity(
    model: Annotated[Path | None, typer.Option(help="HF folder; default: a random tiny model.")] = None,
    layouts: Annotated[str, typer.Option(help="Learner layouts to compare, by comma.")] = "TP1,TP2,PP2",
    tolerance: Annotated[float, typer.Option(help="Largest logprob gap allowed in fp32.")] = 1e-4,
    as_json: AsJson = False,
) -> None:
    """Compare learner and engine logprobs: on prompts, on sampled tokens, after a publish, and with FP8 rollouts.

    Exits 1 when the fp32 gap exceeds the tolerance or when emulating the rollout's formats in the learner closes less
    than 90 % of the FP8 gap.
    """
    from launch.verify.parity import parity

    result = parity(model, layouts.split(","), tolerance)
    emit_or_print(result, as_json)
    raise typer.Exit(0 if result["ok"] else 1)


@verify_app.command("layouts")
def verify_layouts(
    models: Annotated[str, typer.Option(help="dense, experts, replay (experts as recorded), by comma.")] = (
        "dense,experts,replay"
    ),
    layouts: Annotated[
        str | None,
        typer.Option(
            help="By comma, for example TP2,TP2×SP×CP2,PP2×VPP2. Sizes: TPn PPn VPPn CPn DPn EPn ETPn; words: SP, "
            "RECOMPUTE (full), SELECTIVE, PLAIN (no distributed optimizer); MBn: n rows a micro-batch. Default: all.",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Largest relative difference allowed.")] = 1e-5,
    as_json: AsJson = False,
) -> None:
    """Train three float32 steps in every parallel layout and compare loss, gradient norm, ESS and weight changes with
    those of one process.

    Makes its own tiny models; needs no engine. Exits 1 when a difference exceeds the tolerance.
    """
    from launch.verify.layouts import render
    from launch.verify.layouts import verify_layouts as compare

    result = compare(models.split(","), layouts.split(",") if layouts else None, tolerance)
    if as_json:
        emit(result)
    else:
        render(result)
    raise typer.Exit(0 if result["ok"] else 1)


@verify_app.command("history")
def verify_history(run: RunPath, as_json: AsJson = False) -> None:
    """Read every batch and check it: no group lost or duplicated, every token of a version that the schedule allows."""
    from launch.verify.history import check_history

    result = check_history(run)
    emit_or_print(result, as_json)
    raise typer.Exit(0 if result["ok"] else 1)


def main() -> NoReturn:
    """Run a command and exit; an error becomes one line and an exit status (launch.exit_codes)."""
    for stream in (sys.stdout, sys.stderr):  # a name or a terminal in another encoding is no error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    terminal.is_command = True
    sys.exit(run_command(_command))


def _command() -> None:
    append_working_folder_to_path()
    command = typer.main.get_command(app)
    if COMPLETION_VARIABLE in os.environ:
        command(prog_name="evenkeel")  # which answers, and exits
    with command.make_context("evenkeel", sys.argv[1:]) as context:
        command.invoke(context)


if __name__ == "__main__":
    main()
