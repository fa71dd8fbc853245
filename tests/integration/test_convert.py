"""`evenkeel convert` with real ranks, a real engine, ModelOpt, and matrices as large as Qwen3-32B's."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from launch.convert.folders import hf_to_fp8, hf_to_megatron, megatron_to_hf
from launch.convert.inspect import inspect_folder
from launch.convert.new_model import new_model
from megatron_bridge.hf.headers import weight_files
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.hf.tensor_files import num_bytes, write_shards
from pipeline.config.loader import load_recipe
from pipeline.config.sections import RolloutPrecision
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import CorruptCheckpointError
from pipeline.ports.weights import TensorSpec
from pipeline.trainer.checkpoints import COMMIT, commit
from rollout_sglang.client import EngineClient
from rollout_sglang.server.start import EngineSpec, free_port
from tests.integration.workers.scoring import score
from tests.support.engine_forks import start_engine
from tests.support.rank_programs import forked_programs
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, environment, evenkeel_json, make_recipe

pytestmark = pytest.mark.timeout(400)

KEY = "a-key-of-the-tests"


def stored_bytes(folder: Path) -> dict[str, bytes]:
    return {
        name: tensor.flatten().view(torch.uint8).numpy().tobytes()
        for file in weight_files(folder)
        for name, tensor in load_file(file).items()
    }


@pytest.mark.slow
def test_to_megatron_and_back_is_byte_identical(tmp_path: Path) -> None:
    """Untied, by the command line, read by another layout (one rank) for --verify."""
    source, checkpoint, back = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    new_model(source, dtype="bfloat16")
    sizes = ["--tensor-parallel", "2", "--pipeline-parallel", "2"]
    result = evenkeel_json("convert", "hf-to-megatron", str(source), str(checkpoint), *sizes, "--verify", timeout=200)
    assert result["dtype"] == "BF16"
    assert result["left_over"] == []
    assert result["verify"]["max_gap_nats"] < 1e-4
    assert inspect_folder(checkpoint)["kind"] == "Megatron checkpoint, weights only"
    megatron_to_hf(checkpoint, back, verify_logprobs=False)
    assert stored_bytes(back) == stored_bytes(source)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()

    as_a_run = run_with_checkpoint(tmp_path, source, checkpoint)
    megatron_to_hf(as_a_run, tmp_path / "from-run", verify_logprobs=False)
    assert stored_bytes(tmp_path / "from-run") == stored_bytes(source)

    shard = max(checkpoint.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(CorruptCheckpointError, match=shard.name):
        megatron_to_hf(checkpoint, tmp_path / "damaged", verify_logprobs=False)
    assert not (tmp_path / "damaged").exists()


def run_with_checkpoint(folder: Path, model: Path, weights: Path) -> Path:
    """A run that stopped at step 7: its checkpoint says nothing about the model, its recipe does."""
    recipe = load_recipe(make_recipe(folder, model, "run"))
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    checkpoint = run.checkpoints / "000007"
    shutil.copytree(weights, checkpoint, ignore=shutil.ignore_patterns("*config.json", "tokenizer*", COMMIT))
    commit(checkpoint, 7)
    return checkpoint


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(dict(tie=True), dict(tensor=2, pipeline=2, expert=1), marks=pytest.mark.slow),
        # The router and the norms lie on both ranks, half of the experts on each.
        (dict(experts=4, experts_per_token=2, expert_ffn=128), dict(tensor=1, pipeline=1, expert=2)),
    ],
    ids=["tied", "experts"],
)
def test_other_models_too(tmp_path: Path, model: dict[str, Any], layout: dict[str, int]) -> None:
    source = tmp_path / "hf"
    new_model(source, **model)
    with forked_programs():
        hf_to_megatron(source, tmp_path / "m", **layout, dtype="keep", verify_logprobs=False)
    megatron_to_hf(tmp_path / "m", tmp_path / "back", verify_logprobs=False)
    assert stored_bytes(tmp_path / "back") == stored_bytes(source)


@pytest.mark.engine
@pytest.mark.slow
def test_a_stock_engine_serves_what_the_learner_emulates(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    new_model(source)
    with forked_programs():
        result = hf_to_fp8(source, tmp_path / "block128", "block128", verify_logprobs=True)
    assert result["verify"]["mean_gap_emulated_nats"] < 0.1 * result["verify"]["mean_gap_plain_nats"]
    hf_to_fp8(source, tmp_path / "tensor", "tensor", verify_logprobs=False)
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    generator = random.Random(0)
    rows = [[generator.randrange(vocabulary) for _ in range(40)] for _ in range(8)]
    served = engine_scores(tmp_path, rows)
    (scores,) = run_ranks(1, score, source, rows, 1.0, ("fp8_block", "fp8_tensor"))
    learner = {name: np.stack(found) for name, found in scores.items()}
    for layout, rollout_format in (("block128", "fp8_block"), ("tensor", "fp8_tensor")):
        plain = np.abs(learner["plain"] - served[layout]).mean()
        emulated = np.abs(learner[rollout_format] - served[layout]).mean()
        assert plain > 1e-3, "without a gap there is nothing to close"
        assert emulated < 0.1 * plain, layout


def engine_scores(folder: Path, rows: list[list[int]]) -> dict[str, NDArray[np.float64]]:
    """Prefill log-probabilities of the two FP8 folders. Their own config says how they are quantized."""
    stored: RolloutPrecision = "fp8_block"
    with ExitStack() as stack:
        specs = {
            layout: EngineSpec(
                model=folder / layout,
                port=free_port(),
                precision=stored,
                dtype="float32",
                log=folder / f"{layout}.log",
                version=0,
                api_key=KEY,
            )
            for layout in ("block128", "tensor")
        }
        servers = {layout: start_engine(spec) for layout, spec in specs.items()}
        for server in servers.values():
            stack.callback(server.kill)
        for server in servers.values():
            server.wait_ready(300.0)
        return {layout: np.stack(asyncio.run(prefill(spec.url, rows))) for layout, spec in specs.items()}


async def prefill(url: str, rows: list[list[int]]) -> list[NDArray[np.float64]]:
    client = EngineClient(url, KEY, index=0, request_deadline_s=120)
    try:
        return [np.asarray(row, np.float64) for row in await client.prompt_logprobs(rows)]
    finally:
        await client.close()


def worker(folder: Path, module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"tests.integration.workers.{module}", *arguments]
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_memory_does_not_follow_the_size_of_the_model(tmp_path: Path) -> None:
    """Two layers of Qwen3-32B: 0.98 GB a layer, 262 MB the largest matrix, 1 GiB a shard."""
    source = tmp_path / "large"
    write_large(source)
    grown = int(worker(tmp_path, "convert_memory", str(source), str(tmp_path / "out")).split()[-1])
    assert grown < 300 << 20, f"{grown >> 20} MiB: more than a third of a layer"
    found = inspect_folder(tmp_path / "out")
    assert found["quantized_share"] > 0.999


def write_large(folder: Path) -> None:
    """Random weights, written piece by piece: one stretch of noise, scaled anew for each piece."""
    new_model(folder)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text()) | dict(
        hidden_size=5120, intermediate_size=25600, num_attention_heads=64, num_key_value_heads=8, head_dim=128
    )
    (folder / "config.json").write_text(json.dumps(config))
    noise = (torch.randn(4 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def pieces(spec: TensorSpec) -> Iterator[torch.Tensor]:
        left, scale = num_bytes(spec) // 2, 1.0
        while left:
            yield noise[:left] * scale
            left, scale = max(0, left - noise.numel()), 2.0 if scale == 0.25 else scale / 2

    sizes = ModelConfig.from_hf(config).tensors()
    specs = [TensorSpec(name=name, dtype="bfloat16", shape=size) for name, size in sizes.items()]
    write_shards(((spec, pieces(spec)) for spec in specs), folder, shard_bytes=1 << 30)


@pytest.mark.slow
def test_modelopt_calibrates_every_scale(tmp_path: Path) -> None:
    source, out, prompts = tmp_path / "hf", tmp_path / "out", tmp_path / "prompts.jsonl"
    new_model(source)
    prompts.write_text("".join(json.dumps({"prompt": f"{number}*{number}="}) + "\n" for number in range(8)))
    options = ["--calibration", str(prompts)]
    result = evenkeel_json("convert", "hf-to-modelopt", str(source), str(out), *options, timeout=200)
    assert result["calibration_rows"] == 8
    assert set(result["scales"]) == {"input_scale", "weight_scale"}
    assert all(0 < scale["min"] <= scale["max"] < 0.5 for scale in result["scales"].values())
    found = inspect_folder(out)
    assert found["kind"].startswith("HF, ModelOpt FP8")
    assert found["quantized_share"] > 0.9
