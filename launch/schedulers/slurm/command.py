"""Define the command `evenkeel launch slurm`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from launch.terminal import Overrides, RecipePath, SizesFolder
from pipeline.errors import RecipeError


def slurm(
    recipe: RecipePath,
    out: Annotated[Path, typer.Option(help="Folder for the files; every node must see it.", show_default=False)],
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job as well.")] = False,
    gpus_per_node: Annotated[int, typer.Option(min=0, max=1024, help="GPUs of a node; 0: roles run on CPUs.")] = 8,
    learner_nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the learner. Default: as few as its processes need.")
    ] = None,
    spare: Annotated[int, typer.Option(min=0, max=4096, help="Spare nodes, to replace nodes that fail.")] = 1,
    time: Annotated[str | None, typer.Option(help="Time limit, as sbatch takes it. Default: the partition's.")] = None,
    grace: Annotated[
        int | None, typer.Option(min=1, help="Seconds of notice before the time limit. Default: as planned.")
    ] = None,
    disk_gb_s: Annotated[
        float | None, typer.Option(help="GB/s of the run directory's file system, for the planned notice. Default: 2.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition of the job.")] = None,
    account: Annotated[str | None, typer.Option(help="Account of the job.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="A further option of sbatch, as --qos=high; repeat.")
    ] = None,
    resubmit: Annotated[
        bool, typer.Option(help="At the time limit, submit the job again until the run is finished.")
    ] = True,
    setup: Annotated[
        Path | None, typer.Option(help="File of shell lines that the job sources first: modules, environments.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="Python on the nodes. Default: this Python.")] = None,
    workdir: Annotated[
        Path | None, typer.Option(help="Where relative paths of the recipe begin, on every node. Default: here.")
    ] = None,
    container_image: Annotated[
        str | None, typer.Option(help="Image in which the roles run (pyxis and enroot, srun --container-image).")
    ] = None,
    rollout_image: Annotated[
        str | None, typer.Option(help="Image for engines and router. Default: --container-image.")
    ] = None,
    container_mounts: Annotated[str | None, typer.Option(help="Passed to srun --container-mounts.")] = None,
    key_dir: Annotated[
        str, typer.Option(help="Folder of yours, seen by all nodes, for the file with the engines' API key.")
    ] = "~/.evenkeel",
    api_key_file: Annotated[
        str | None, typer.Option(help="File with the API key. Default: a new key for each job.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65532, help="Port of the supervisor's /metrics for Prometheus; the roles take the next ports."
        ),
    ] = None,
    model_config: SizesFolder = None,
    overrides: Overrides = None,
) -> None:
    """Write a batch job that runs the recipe under Slurm, and submit it with --submit.

    The job starts a supervisor in its batch script, which starts each role as a job step on a node of its own choice.
    A node that dies is replaced by a spare one, or the job is requeued. At the time limit the learner saves a
    checkpoint and the job submits itself again. The same recipe and options give the same bytes.

    For example:  evenkeel launch slurm qwen3_32b --out jobs/qwen --partition h100 --time 24:00:00
    """
    from launch.build.engines import check_extra_args
    from launch.plan.hosts import grace_s, sizes_folder
    from launch.plan.planner import Planner, default_assumptions
    from launch.schedulers.slurm.render import SCRIPT, SlurmOptions, render
    from pipeline.config.loader import find_recipe, load_recipe
    from pipeline.config.task_sections import DataTask
    from pipeline.tasks.data import data_paths

    if rollout_image and not (container_image or python):
        raise RecipeError(
            "--rollout-image is given without --container-image, and one Python starts roles inside and outside of "
            f"containers, where {sys.executable} may not be; give --container-image, or --python python3"
        )
    loaded = load_recipe(recipe, overrides or [])
    check_extra_args(loaded)
    sizes = sizes_folder(recipe, loaded.model.path, model_config)
    if grace is None:
        assumed = default_assumptions(loaded, dict(disk_gb_s=disk_gb_s))
        # The seconds depend neither on the number of GPUs nor on their memory.
        grace = grace_s(Planner(find_recipe(recipe), loaded, assumed, gpus=1, gpu_gib=80.0, sizes=sizes))
    options = SlurmOptions(
        workdir=(workdir or Path.cwd()).absolute(),
        python=python or ("python3" if container_image else sys.executable),
        gpus_per_node=gpus_per_node,
        learner_nodes=learner_nodes,
        spare=spare,
        time=time,
        grace=grace,
        partition=partition,
        account=account,
        resubmit=resubmit,
        key_dir=key_dir,
        metrics_port=metrics_port,
        api_key_file=api_key_file,
        container_image=container_image,
        rollout_image=rollout_image,
        container_mounts=container_mounts,
        sbatch=tuple(sbatch or ()),
    )
    for path in data_paths(loaded.task) if isinstance(loaded.task, DataTask) else []:
        if not (options.workdir / path).exists():
            there = options.workdir / path
            print(f"note: data {there} is not on this machine; every node must see it there", file=sys.stderr)
    try:
        lines = setup.read_text("utf-8") if setup else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise RecipeError(f"cannot read --setup {setup}: {reason}; give a file of shell lines") from None
    files = render(loaded, options, out.absolute(), lines)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    print(submitted(out / SCRIPT) if submit else f"sbatch {out.absolute() / SCRIPT}")


def submitted(script: Path) -> str:
    """Submit the script and return sbatch's output; Slurm does not store the API key. Raises RecipeError."""
    from launch.schedulers.slurm.srun import SlurmError, run_slurm

    if shutil.which("sbatch") is None:
        raise RecipeError(f"--submit needs Slurm's sbatch; on a node that has it: sbatch {script}")
    try:
        return run_slurm("sbatch", str(script)).strip()
    except SlurmError as error:
        raise RecipeError(
            f"{error}; correct that, see whether the job is there all the same (squeue --me), and submit it again"
        ) from error
