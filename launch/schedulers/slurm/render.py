"""Render the files of `evenkeel launch slurm`, which depend on the recipe and the options alone.

DIR/job.sbatch     the batch script      DIR/recipe.yaml   the recipe with every default
DIR/setup.sh       the user's shell lines, sourced first
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from launch.schedulers.slurm.placement import Shape
from pipeline.child_process import KERNEL_CACHE_VARIABLE
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError

SCRIPT, RECIPE, SETUP = "job.sbatch", "recipe.yaml", "setup.sh"
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_PATH = re.compile(r"[^\s'\"\\$`%]+")
_ONE_LINE = re.compile(r"[^\s'\"\\$`]+")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The user's options for Slurm. Every path is absolute: the job may be submitted from any folder."""

    workdir: Path
    """The roles' working folder on every node, where relative paths of the recipe start."""
    python: str
    """The interpreter of the batch script and of the roles."""
    gpus_per_node: int = 8
    learner_nodes: int | None = None
    spare: int = 1
    time: str | None = None
    grace: int = 60
    """Seconds between the signal that announces the time limit and the limit."""
    partition: str | None = None
    account: str | None = None
    metrics_port: int | None = None
    """The supervisor's port; the roles use the next ports."""
    resubmit: bool = True
    key_dir: str = "~/.evenkeel"
    api_key_file: str | None = None
    container_image: str | None = None
    rollout_image: str | None = None
    container_mounts: str | None = None
    sbatch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_path("--workdir", self.workdir)
        if self.gpus_per_node < 0 or self.spare < 0 or self.grace < 1:
            raise RecipeError(
                f"--gpus-per-node {self.gpus_per_node} --spare {self.spare} --grace {self.grace}: the first two must "
                "be 0 or more, the last one 1 or more"
            )
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise RecipeError(f"--time is {self.time!r}, expected Slurm's form, such as 90, 24:00:00 or 2-00:00:00")
        if self.python != Path(self.python).name and not Path(self.python).is_absolute():
            raise RecipeError(
                f"--python is {self.python!r}, which every folder understands otherwise; give an absolute path, or a "
                "name on the PATH such as python3"
            )
        for one in self.sbatch:
            if one.startswith("-a") or re.match(r"--ar(r(a(y)?)?)?(=|$)", one):
                raise RecipeError(
                    f"--sbatch is {one!r}: all tasks of an array would train the same run; leave it out, and render a "
                    "job for each run"
                )
        words = dict(
            partition=self.partition,
            account=self.account,
            python=self.python,
            key_dir=self.key_dir,
            api_key_file=self.api_key_file,
            container_image=self.container_image,
            rollout_image=self.rollout_image,
            container_mounts=self.container_mounts,
        )
        for name, word in {**words, **{f"sbatch {one}": one for one in self.sbatch}}.items():
            if word is not None and not _ONE_LINE.fullmatch(word):
                raise RecipeError(f"--{name.replace('_', '-')} is {word!r}; use no space, quote, $ or backslash in it")


def check_path(option: str, path: Path) -> None:
    """Raise RecipeError for a path that Slurm would misread in #SBATCH lines: it splits at spaces and expands %."""
    if not _PATH.fullmatch(str(path)):
        raise RecipeError(
            f"{option} is {str(path)!r}; Slurm would misread it: use a folder without space, line break, quote, $, % "
            "or backslash in its path"
        )


def check_mounts(recipe: Recipe, options: SlurmOptions, folder: Path) -> None:
    """Raise RecipeError when containers lack a path that the roles need, since the roles would fail after the queue. A
    folder that the batch script uses too must have the same path inside and outside of containers."""
    if options.container_image is None and options.rollout_image is None:
        return
    key = ("--api-key-file", options.api_key_file) if options.api_key_file else ("--key-dir", options.key_dir)
    both = {"--out": folder, "--workdir": options.workdir, key[0]: Path(key[1]).expanduser()}
    both["run.root"] = options.workdir / recipe.run.root
    needed = both | {name: options.workdir / path for name, path in _paths(recipe.model_dump())}
    mounts = []
    for text in filter(None, (options.container_mounts or "").split(",")):
        # SOURCE, SOURCE:TARGET or SOURCE:TARGET:FLAGS
        source, _, rest = text.partition(":")
        mounts.append((Path(source), Path(rest.partition(":")[0] or source)))
    for name, path in needed.items():
        inside = [(there, here) for here, there in mounts if path.is_relative_to(there)]
        there, here = max(inside, key=lambda mount: len(mount[0].parts), default=(None, None))
        if there is None or (here != there and name in both):
            found = "in no mount" if there is None else f"another folder there ({here}:{there})"
            raise RecipeError(
                f"{name} is {path}, which containers do not see: it is {found} of --container-mounts "
                f"{options.container_mounts or '(none)'}; add {path}:{path}, or a folder above it"
            )


def _paths(value: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    if isinstance(value, PurePath):
        yield key, Path(value)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _paths(one, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _paths(one, key)


def render(recipe: Recipe, options: SlurmOptions, folder: Path, setup: str = "") -> dict[str, str]:
    """Render the text of each file by name. `folder` is its absolute path on every node."""
    check_path("--out", folder)
    check_mounts(recipe, options, folder)
    shape = Shape.of(recipe, options.gpus_per_node, options.learner_nodes)
    return {
        SCRIPT: batch_script(recipe, options, shape, folder),
        RECIPE: recipe.to_yaml(),
        SETUP: setup or "# Shell lines that the batch script sources first: modules, a virtual environment, NCCL_*.\n",
    }


def batch_script(recipe: Recipe, options: SlurmOptions, shape: Shape, folder: Path) -> str:
    """Render the batch script. The supervisor replaces its shell, so Slurm's signals reach the supervisor."""
    nodes = f"{shape.num_nodes} nodes and {options.spare} to spare, {shape.learner_nodes} of them for the learner"
    directives = [
        "--job-name=" + re.sub(r"[^\w.-]", "-", recipe.run.name),
        f"--nodes={shape.num_nodes + options.spare}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []),
        *("--exclusive", "--mem=0", "--no-kill", "--requeue", f"--signal=B:USR1@{options.grace}"),
        *("--open-mode=append", f"--output={folder}/slurm-%j.out", f"--chdir={options.workdir}"),
    ]
    chosen = dict(time=options.time, partition=options.partition, account=options.account)
    directives += [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    directives += options.sbatch

    # Each option with its value on a separate line.
    supervisor = [[options.python, "-P", "-m", "launch.schedulers.slurm.batch", str(folder)]]
    supervisor += [["--gpus-per-node", str(options.gpus_per_node)]]
    if options.learner_nodes is not None:
        supervisor += [["--learner-nodes", str(options.learner_nodes)]]
    supervisor += [["--grace", str(options.grace)], ["--python", options.python]]
    key = options.api_key_file
    supervisor += [["--api-key-file", key] if key else ["--key-dir", options.key_dir]]
    for name in ("container_image", "rollout_image", "container_mounts", "metrics_port"):
        if (value := getattr(options, name)) is not None:
            supervisor += [[f"--{name.replace('_', '-')}", str(value)]]
    if not options.resubmit:
        supervisor += [["--no-resubmit"]]
    command = " \\\n  ".join(" ".join(map(shlex.quote, part)) for part in supervisor)
    lines = "".join(f"#SBATCH {line}\n" for line in directives)
    kernels = ""
    if options.container_image or options.rollout_image:  # a container's home ends with it
        cache = options.workdir / ".cache/evenkeel/kernels"
        kernels = f'export {KERNEL_CACHE_VARIABLE}="${{{KERNEL_CACHE_VARIABLE}:-{cache}}}"\n'
    return f"""#!/bin/bash
# {recipe.run.name}: {nodes}, and {shape.engines} engines
# Rendered by `evenkeel launch slurm`; change the recipe or the options and render again.
{lines}set -euo pipefail
if [ -n "${{EVENKEEL_API_KEY:-}}" ]; then
  echo "warning: EVENKEEL_API_KEY was exported when this job was submitted, so Slurm has stored it; it is not used" >&2
  unset EVENKEEL_API_KEY
fi
# What the shell sets from here on reaches the job steps, whatever --export the job was submitted with.
export SLURM_EXPORT_ENV=ALL
{kernels}set +u  # scripts that activate environments are rarely written for it
source {shlex.quote(str(folder / SETUP))}
set -u
exec {command}
"""
