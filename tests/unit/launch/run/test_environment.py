"""What a role notes about the machine and the software that it runs on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launch.build.sizes import active_parameters
from launch.run.environment import commit_of, environment, learner_facts, note_engine
from megatron_bridge.hf.model_config import ModelConfig, read_config
from pipeline.data.epochs import claim
from pipeline.data.event_log import read_events
from pipeline.data.run_directory import RunDirectory

MODEL = Path(__file__).parents[4] / "pipeline/recipes/models/qwen3-32b"


def gpu(folder: Path, bus: str, model: str) -> None:
    (folder / bus).mkdir(parents=True)
    (folder / bus / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\nGPU UUID: \t GPU-????\n")


def test_host_cores_packages_and_gpus_are_found(tmp_path: Path) -> None:
    gpu(tmp_path, "0000:01:00.0", "NVIDIA H100 80GB HBM3")
    gpu(tmp_path, "0000:02:00.0", "NVIDIA H100 80GB HBM3")
    found = environment(gpus=tmp_path)
    assert found["gpus"] == ["NVIDIA H100 80GB HBM3"] * 2
    assert found["host"]
    assert found["cores"] >= 1
    assert {"evenkeel", "torch", "megatron-core", "numpy"} <= found["packages"].keys()
    assert environment(gpus=tmp_path / "none")["gpus"] == []


@pytest.mark.parametrize(
    ("names", "peak"),
    [
        (["NVIDIA H100 80GB HBM3"] * 8, 989.0),
        (["NVIDIA H100 PCIe"], 756.0),
        (["NVIDIA A100-SXM4-80GB"], 312.0),
        (["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"], None),
        (["Something New"], None),
        ([], None),
    ],
)
def test_a_peak_is_said_only_of_gpus_that_are_known_and_alike(names: list[str], peak: float | None) -> None:
    config = ModelConfig.from_hf(read_config(MODEL))
    facts = learner_facts(config, 8, names)
    assert facts["active_parameters"] == active_parameters(config)
    assert facts.get("peak_tflops") == peak


def test_a_commit_says_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *arguments], check=True, capture_output=True, timeout=60)

    assert commit_of(tmp_path) is None
    git("init")
    assert commit_of(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = commit_of(tmp_path)
    assert clean is not None
    assert len(clean) == 12
    (tmp_path / "b").write_text("not the project's")
    assert commit_of(tmp_path) == clean
    (tmp_path / "a").write_text("2")
    assert commit_of(tmp_path) == f"{clean}+"


def test_an_engine_notes_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    note_engine(run, claim(tmp_path, "engine", 0))
    (event,) = read_events(tmp_path, "environment")
    assert event["role"] == "engine-0"
    assert event["packages"]["sglang"]
    assert (tmp_path / "events" / "engine-0-000001.jsonl").is_file()
