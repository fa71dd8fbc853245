"""A run under a real Slurm: rendered by `evenkeel launch slurm`, submitted as it is, and watched from outside."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.data.run_directory import numbered_folders
from tests.cluster.cluster_run import Watched
from tests.cluster.rig import Slurm
from tests.support.runs import ROOT, evenkeel, make_recipe

STEP_OPTIONS = ("--gpus-per-node", "0", "--learner-nodes", "2")


@dataclass
class SlurmRun(Watched):
    """One run: a learner of two pipeline stages over two nodes, an engine and the collector beside it."""

    slurm: Slurm
    name: str
    model: Path
    steps: int = 4
    options: tuple[str, ...] = ()
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shared.joinpath(self.name).mkdir()
        sections: dict[str, dict[str, Any]] = dict(
            run=dict(name=self.name, root=str(self.shared / "runs"), steps=self.steps, max_restarts=10),
            learner=dict(pipeline_parallel=2, micro_batch_tokens=256, step_deadline_s=60),
            rollout=dict(request_deadline_s=20, start_deadline_s=180),
            weights=dict(publish_deadline_s=20),
            checkpoint=dict(every=1),
        )
        for section, values in self.sections.items():
            sections[section] = sections.get(section, {}) | values
        recipe = make_recipe(self.folder, self.model, self.name, **sections)
        data = yaml.safe_load(recipe.read_text())
        data["rollout"] |= dict(prompts_per_batch=4, group_size=4, max_new_tokens=12, context_tokens=64)
        recipe.write_text(yaml.safe_dump(data))
        setup = self.folder / "lines.sh"
        setup.write_text(f"export PYTHONPATH={ROOT} OMP_NUM_THREADS=1 COLUMNS=200\n")
        rendered = evenkeel_launch(
            recipe, self.job, *STEP_OPTIONS, "--setup", str(setup), "--key-dir", str(self.keys), *self.options
        )
        assert rendered.strip() == f"sbatch {self.job}/job.sbatch"

    @property
    def shared(self) -> Path:
        return self.slurm.hosts.shared

    @property
    def folder(self) -> Path:
        """Of this test: recipe and prompts."""
        return self.shared / self.name

    @property
    def job(self) -> Path:
        """What was rendered."""
        return self.folder / "job"

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.shared / "runs" / self.name

    def submit(self) -> str:
        self.jobs.append(self.slurm.call("sbatch", "--parsable", str(self.job / "job.sbatch")).strip())
        return self.jobs[-1]

    # What happens

    def saved(self) -> list[int]:
        """Steps with a complete checkpoint."""
        folder = self.path / "checkpoints"
        steps = numbered_folders(folder) if folder.is_dir() else []
        return [step for step in steps if (folder / f"{step:06d}" / "COMMIT").exists()]

    def starts(self, role: str) -> int:
        """How often a role was started."""
        folder = self.path / "epochs" / role
        return len([path for path in folder.glob("0*")]) if folder.is_dir() else 0

    def field(self, job: str, name: str) -> str:
        """One field of `scontrol show job`."""
        words = self.slurm.call("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def said(self) -> str:
        """The output of the batch scripts."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.job.glob("slurm-*.out")))

    def logs(self, job: str, restart: int = 0) -> Path:
        return self.path / "logs" / f"slurm-{job}-{restart}"

    def gave_up(self) -> str:
        return "the job gave up" if "\nerror: " in f"\n{self.said()}" else ""

    def wait_end(self, job: str, deadline_s: float = 240.0) -> None:
        """Until the job has ended, with exit code 0."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: self.state(job) in ended, f"the end of job {job}", deadline_s)
        assert (self.state(job), self.field(job, "ExitCode")) == ("COMPLETED", "0:0"), self.tails()

    def tails(self, lines: int = 12) -> str:
        """The end of every log."""
        logs = sorted(self.path.glob("logs/slurm-*/*.log")) if self.path.exists() else []
        texts = {path.name: path.read_text(errors="replace") for path in logs}
        texts["the batch scripts"] = self.said()
        return "\n".join(f"--- {name}\n" + "\n".join(text.splitlines()[-lines:]) for name, text in texts.items())


def evenkeel_launch(recipe: Path, out: Path, *options: str) -> str:
    """`evenkeel launch slurm`; returns what it printed."""
    words = ["launch", "slurm", str(recipe), "--out", str(out), "--workdir", str(ROOT), "--python", sys.executable]
    done = evenkeel(*words, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout
