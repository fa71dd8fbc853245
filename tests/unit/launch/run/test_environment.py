"""What a role notes about the machine and the software that it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.build.sizes import active_parameters
from launch.run.environment import environment, learner_facts
from megatron_bridge.hf.model_config import ModelConfig, read_config

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
