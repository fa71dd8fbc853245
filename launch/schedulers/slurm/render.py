"""The files of `evenkeel launch slurm`: text that depends on the recipe and the options alone.

DIR/job.sbatch     what is submitted      DIR/recipe.yaml   the recipe, every default spelled out
DIR/setup.sh       lines of the user's, sourced first       DIR/README.md    how to submit, watch and stop it
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from launch.plan.hosts import FIXED_S, SAFETY, StopTime
from launch.schedulers.slurm.options import SlurmOptions, check_mounts, check_path
from launch.schedulers.slurm.placement import Shape
from pipeline.config.recipe import Recipe

SCRIPT, RECIPE, SETUP, README = "job.sbatch", "recipe.yaml", "setup.sh", "README.md"


def render(recipe: Recipe, options: SlurmOptions, folder: Path, setup: str = "") -> dict[str, str]:
    """Name → text of each file. `folder` is the absolute path under which every node will find them."""
    check_path("--out", folder)
    check_mounts(recipe, options, folder)
    shape = Shape.of(recipe, options.gpus_per_node, options.learner_nodes)
    return {
        SCRIPT: batch_script(recipe, options, shape, folder),
        RECIPE: recipe.to_yaml(),
        SETUP: setup or "# Shell lines that the batch script sources first: modules, a virtual environment, NCCL_*.\n",
        README: readme(recipe, options, shape, folder),
    }


def batch_script(recipe: Recipe, options: SlurmOptions, shape: Shape, folder: Path) -> str:
    """One ordinary job. The supervisor replaces the shell, so that Slurm's signals reach it."""
    directives = "".join(f"#SBATCH {line}\n" for line in _directives(recipe, options, shape, folder))
    command = " \\\n  ".join(" ".join(map(shlex.quote, part)) for part in _supervisor(options, folder))
    return f"""#!/bin/bash
# {recipe.run.name}: {_in_words(shape, options)}
# Rendered by `evenkeel launch slurm`; change the recipe or the options and render again.
{directives}set -euo pipefail
if [ -n "${{EVENKEEL_API_KEY:-}}" ]; then
  echo "warning: EVENKEEL_API_KEY was exported when this job was submitted, so Slurm has stored it; it is not used" >&2
  unset EVENKEEL_API_KEY
fi
# What the shell sets from here on reaches the job steps, whatever --export the job was submitted with.
export SLURM_EXPORT_ENV=ALL
set +u  # scripts that activate environments are rarely written for it
source {shlex.quote(str(folder / SETUP))}
set -u
exec {command}
"""


def _directives(recipe: Recipe, options: SlurmOptions, shape: Shape, folder: Path) -> Iterator[str]:
    yield f"--job-name={job_name(recipe)}"
    yield f"--nodes={shape.num_nodes + options.spare}"
    yield "--ntasks-per-node=1"
    if options.gpus_per_node:
        yield f"--gpus-per-node={options.gpus_per_node}"
    yield "--exclusive"
    yield "--mem=0"
    yield "--no-kill"
    yield "--requeue"
    yield f"--signal=B:USR1@{options.grace_s}"
    yield "--open-mode=append"
    yield f"--output={folder}/slurm-%j.out"
    yield f"--chdir={options.workdir}"
    for name in ("time", "partition", "account"):
        if (value := getattr(options, name)) is not None:
            yield f"--{name}={value}"
    yield from options.sbatch


def _supervisor(options: SlurmOptions, folder: Path) -> Iterator[list[str]]:
    """The command in the batch script, in groups of words that belong together."""
    yield [options.python, "-P", "-m", "launch.schedulers.slurm.batch", str(folder)]
    yield ["--gpus-per-node", str(options.gpus_per_node)]
    if options.learner_nodes is not None:
        yield ["--learner-nodes", str(options.learner_nodes)]
    yield ["--grace", str(options.grace_s)]
    yield ["--python", options.python]
    if options.api_key_file:
        yield ["--api-key-file", options.api_key_file]
    else:
        yield ["--key-dir", options.key_dir]
    for name in ("container_image", "rollout_image", "container_mounts"):
        if (value := getattr(options, name)) is not None:
            yield [f"--{name.replace('_', '-')}", value]
    if options.metrics_port is not None:
        yield ["--metrics-port", str(options.metrics_port)]
    if not options.resubmit:
        yield ["--no-resubmit"]


def job_name(recipe: Recipe) -> str:
    """The run's name, as Slurm prints it."""
    return re.sub(r"[^\w.-]", "-", recipe.run.name)


def _in_words(shape: Shape, options: SlurmOptions) -> str:
    gpus = f" of {shape.gpus_per_node} GPUs" if shape.gpus_per_node else ""
    spare = f" and {options.spare} to spare" if options.spare else ""
    engines = f"{shape.engines} engine{'s' if shape.engines != 1 else ''}"
    return f"{_nodes(shape.num_nodes)}{gpus}{spare}; a learner over {_nodes(shape.learner_nodes)}, {engines}"


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count != 1 else ''}"


def _as_planned(grace: int | StopTime) -> str:
    """What the notice before the time limit was planned from, as a user has to judge it."""
    if isinstance(grace, int):
        return ""
    step, publish, save = (f"{seconds:.0f} s" for seconds in (grace.step_s, grace.publish_s, grace.save_s))
    return f"""
  That is {SAFETY:g} times what is planned, and {FIXED_S} s: a step of {step}, a publish of {publish}, and two saves of
  {save} at {grace.disk_gb_s:g} GB/s, a guess at the run directory's file system. Where it is slower, render again with
  its `--disk-gb-s`, or a `--grace` of your own: a save that is cut off costs all steps since the one before."""


def readme(recipe: Recipe, options: SlurmOptions, shape: Shape, folder: Path) -> str:
    """How to submit, watch and stop the job."""
    name, run = job_name(recipe), options.workdir / recipe.directory
    again = (
        "a further job is submitted, which goes on"
        if options.resubmit
        else "submit it again and the run goes on (--no-resubmit was given)"
    )
    spare = (
        f"A node that dies is replaced by the {options.spare} to spare, without a new job."
        if options.spare
        else "No node is spare: when one dies, the job is requeued and goes on from the last checkpoint."
    )
    commands = {
        f"sbatch {folder / SCRIPT}": "submit it",
        f"squeue --name {name}": "is it running, and where?",
        f"tail -f {folder}/slurm-*.out": "what the supervisor says",
        f"ls {run}/logs/slurm-*/": "a folder for each attempt, a file for each role",
        f"evenkeel runs show {run}": "what the run has reached",
        f"scancel --signal=TERM --batch --name {name}": "end in order: checkpoint, then exit 0",
    }
    width = max(map(len, commands)) + 4
    listed = "\n".join(f"    {command:<{width}}{what}" for command, what in commands.items())
    return f"""# {recipe.run.name} under Slurm

{_in_words(shape, options)}. The run directory is `{run}`; it must be the same folder on every node.

{listed}

After an orderly end the same `sbatch` goes on. A plain `scancel` ends the job at once; what came after the last
checkpoint is then trained again.

- {options.grace_s} s before the time limit the learner ends its step and saves; {again}.{_as_planned(options.grace)}
- {spare}
- The API key of the engines is made when the job starts, in a file that only you can read
  ({options.api_key_file or options.key_dir}), and removed when it ends. Do not export EVENKEEL_API_KEY when you submit,
  nor another secret: Slurm stores the environment. A teacher's key lies in a file, which setup.sh names:
  `export EVENKEEL_TEACHER_API_KEY_FILE=FILE`.
- The node of the batch script needs Slurm's commands and Even Keel's core. With a container image the roles run in it;
  mount this folder, the run directory and the folder of the key there, at the same paths.
"""
