"""What a user of Slurm says beside the recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from launch.plan.hosts import StopTime
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError

_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_PATH = re.compile(r"[^\s'\"\\$`%]+")
_ONE_LINE = re.compile(r"[^\s'\"\\$`]+")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Every path is absolute, so that the job may be submitted from anywhere."""

    workdir: Path
    """Where the roles run: relative paths of the recipe begin here, on every node."""
    python: str
    """Interpreter of the batch script and of the roles."""
    gpus_per_node: int = 8
    learner_nodes: int | None = None
    spare: int = 1
    time: str | None = None
    grace: int | StopTime = 60
    """Seconds between the signal that announces the time limit and the limit, or the plan from which they follow."""
    partition: str | None = None
    account: str | None = None
    metrics_port: int | None = None
    """Of the supervisor; the roles have the ports after it."""
    resubmit: bool = True
    key_dir: str = "~/.evenkeel"
    api_key_file: str | None = None
    container_image: str | None = None
    rollout_image: str | None = None
    container_mounts: str | None = None
    sbatch: tuple[str, ...] = field(default=())
    """Further options of sbatch, such as `--qos=high`."""

    @property
    def grace_s(self) -> int:
        """Of notice before the time limit."""
        return self.grace.grace_s if isinstance(self.grace, StopTime) else self.grace

    def __post_init__(self) -> None:
        check_path("--workdir", self.workdir)
        if self.gpus_per_node < 0 or self.spare < 0 or self.grace_s < 1:
            raise RecipeError(
                f"--gpus-per-node {self.gpus_per_node} --spare {self.spare} --grace {self.grace_s}: the first two must "
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
    """Paths stand in #SBATCH lines, where Slurm splits at spaces and fills in what follows a %. Raises RecipeError."""
    if not _PATH.fullmatch(str(path)):
        raise RecipeError(
            f"{option} is {str(path)!r}; Slurm would misread it: use a folder without space, line break, quote, $, % "
            "or backslash in its path"
        )


def check_mounts(recipe: Recipe, options: SlurmOptions, folder: Path) -> None:
    """Whether roles in containers see what they need. Raises RecipeError: otherwise they fail after the queue.

    Where the batch script uses a folder too, it must be mounted where the node has it.
    """
    if options.container_image is None and options.rollout_image is None:
        return
    key = ("--api-key-file", options.api_key_file) if options.api_key_file else ("--key-dir", options.key_dir)
    both = {"--out": folder, "--workdir": options.workdir, key[0]: Path(key[1]).expanduser()}
    both["run.root"] = options.workdir / recipe.run.root
    needed = both | {name: options.workdir / path for name, path in _paths(recipe.model_dump())}
    mounts = [_mount(text) for text in (options.container_mounts or "").split(",") if text]
    for name, path in needed.items():
        inside = [(there, here) for here, there in mounts if path.is_relative_to(there)]
        there, here = max(inside, key=lambda mount: len(mount[0].parts), default=(None, None))
        if there is None or (here != there and name in both):
            found = "in no mount" if there is None else f"another folder there ({here}:{there})"
            raise RecipeError(
                f"{name} is {path}, which containers do not see: it is {found} of --container-mounts "
                f"{options.container_mounts or '(none)'}; add {path}:{path}, or a folder above it"
            )


def _mount(text: str) -> tuple[Path, Path]:
    """Where a mount comes from, and where it is: SOURCE, SOURCE:TARGET or SOURCE:TARGET:FLAGS."""
    source, _, rest = text.partition(":")
    return Path(source), Path(rest.partition(":")[0] or source)


def _paths(value: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    """All paths that a recipe names, with their keys."""
    if isinstance(value, PurePath):
        yield key, Path(value)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _paths(one, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _paths(one, key)
