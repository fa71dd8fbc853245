"""Six steps of the demo by a learner of the packages for GPUs (torch 2.11), with engines of this environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.data.event_log import read_events
from pipeline.data.run_directory import RunDirectory
from rollout_sglang.server.rollout_python import PYTHON_VARIABLE
from tests.installs.test_resolution import ROOT, pins

LEARNER = ROOT / ".venv-learner"

pytestmark = [
    pytest.mark.installs,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (LEARNER / ".installed").exists(), reason="`make test-installs` found no Python 3.12"),
]


def in_learner(program: str, *arguments: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the learner's environment; engines run in this one."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EVENKEEL"))}
    environment = clean | {PYTHON_VARIABLE: sys.executable, "TMPDIR": str(scratch)}
    command = [str(LEARNER / "bin" / program), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)


def test_nccl_is_that_of_the_list_though_torch_was_compiled_with_another(tmp_path: Path) -> None:
    asked = "import torch; from pipeline.nccl import loaded_release as r; print(r(), *torch.cuda.nccl.version())"
    done = in_learner("python", "-P", "-c", asked, scratch=tmp_path)
    assert done.stdout.split() == [pins("learner-gpu")["nvidia-nccl-cu13"], "2", "28", "9"], done.stderr


def test_six_steps_are_trained_published_and_verified(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Over ipc, as on one GPU: there the learner's log ended with `terminate called … std::system_error`."""
    folder = Path(str(tmp_path_factory.mktemp("t")))
    settings = {
        "model.path": folder / "model",
        "run.root": folder,
        "run.steps": 6,
        "rollout.prompts_per_batch": 8,
        "weights.channel": "ipc",
        "evaluation.every": 6,
        "evaluation.prompts": 8,
    }
    made = in_learner("evenkeel", "model", "new", str(folder / "model"), scratch=folder)
    assert made.returncode == 0, made.stderr[-2000:]
    overrides = [f"--set={key}={value}" for key, value in settings.items()]
    done = in_learner("evenkeel", "train", "pipeline/recipes/demo.yaml", "--json", *overrides, scratch=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["steps"] == 6
    run = folder / "demo"
    assert RunDirectory(run).published_version() == 6
    started = {one["role"].partition("-")[0]: one["packages"] for one in read_events(run, "environment")}
    assert started["learner"]["torch"] == pins("learner-gpu")["torch"]
    assert started["engine"]["sglang"] == pins("cpu")["sglang"]
    time.sleep(5)  # torch's server of shared memory ends two seconds after the last process that used it
    said = done.stderr + "".join(log.read_text() for log in (run / "logs").glob("[cl]*.log"))
    assert "terminate called" not in said
    assert "Traceback" not in said
