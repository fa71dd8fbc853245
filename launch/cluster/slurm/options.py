"""What a user of Slurm says beside the recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from launch.plan.grace import StopTime
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
