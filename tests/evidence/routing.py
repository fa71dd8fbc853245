"""What routing adds to the gap of a mixture, and what replay leaves of it: `python -m tests.evidence.routing [JSON]`.

A Qwen3-MoE whose router logits are nearly tied is sampled by a real SGLang server in float32 and in bfloat16, and
scored by the learner in both, with its own experts and with the engine's. The same is done for a router as a new model
has it. Prints a table; with a path, writes it there as JSON too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from launch.convert.new_model import new_model
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import leave_layout
from megatron_bridge.step.micro_batches import TokenRows
from pipeline.config.recipe import LearnerPrecision, LearnerSection
from pipeline.data.batch import Batch, Completion, Group, LogprobContract, Prompt, Sample
from pipeline.data.routed_experts import ExpertShape
from pipeline.ports.engines import Sampling
from precision.ess import sequence_ess_of_totals
from precision.ratios import RatioSums
from precision.supervised import Supervised
from rollout_sglang.client import EngineClient
from rollout_sglang.server.start import EngineSpec, free_port, start
from rollout_sglang.weights.update_lease import fresh_number

LAYERS, EXPERTS, PER_TOKEN = 4, 16, 4
SHAPE = ExpertShape(num_layers=LAYERS, moe_layers=tuple(range(LAYERS)), num_experts=EXPERTS, per_token=PER_TOKEN)
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 24, 8, 16, 48
DTYPES: dict[str, LearnerPrecision] = {"float32": "fp32", "bfloat16": "bf16"}
SPREADS = {"nearly tied": 0.02, "as new": 1.0}
"""Router → how far the rows of its matrix lie from their mean, beside those of a new model."""
HEAD = 8.0
"""The head of a new model makes all tokens about equally likely; this many times as large, it prefers some."""
CONTRACT = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="0" * 64)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine against one learner."""

    router: str
    engine: str
    learner: str
    tokens: int
    rows_differ: float
    """Share of (token, layer) pairs."""
    tokens_differ: float
    """Share of tokens with such a pair in any layer."""
    without: dict[str, float]
    """k3, ESS of tokens and of sequences, mean |log-ratio| with the learner's own experts."""
    replayed: dict[str, float]
    """… with the engine's."""


def write_mixture(folder: Path, spread: float) -> None:
    """A random mixture; within a layer, router logits lie `spread` times as far apart as in a new model."""
    new_model(
        folder, hidden=128, layers=LAYERS, head_dim=32, experts=EXPERTS, experts_per_token=PER_TOKEN, expert_ffn=96
    )
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        mean = tensors[name].mean(0, keepdim=True) * EXPERTS**0.5  # as long as a row: logits keep their size
        tensors[name] = mean + spread * (tensors[name] - tensors[name].mean(0, keepdim=True))
    tensors["lm_head.weight"] *= HEAD
    save_file(tensors, path, metadata={"format": "pt"})


def sample_all(folders: dict[str, Path], dtype: str) -> dict[str, Batch]:
    """Rollouts of each model by one engine, which is given one after the other."""
    first = next(iter(folders.values()))
    spec = EngineSpec(
        model=first,
        port=free_port(),
        precision="fp32" if dtype == "float32" else "bf16",
        dtype=dtype,
        log=first.parent / f"engine-{dtype}.log",
        version=0,
        extra_args=("--enable-return-routed-experts",),
    )
    process = start(spec)
    try:
        process.wait_ready(600.0)
        return asyncio.run(_sample_all(spec.url, folders))
    finally:
        process.kill()


async def _sample_all(url: str, folders: dict[str, Path]) -> dict[str, Batch]:
    client = EngineClient(url, None, index=0, request_deadline_s=600, update=fresh_number())
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(2, 40, PROMPT_TOKENS).tolist()) for _ in range(PROMPTS)]
    found = {}
    try:
        for version, (name, folder) in enumerate(folders.items()):
            await client.pause()
            await client.update_from_disk(version, folder, deadline_s=300)
            await client.name(version)
            await client.resume()
            sampling = Sampling(max_new_tokens=NEW_TOKENS, experts=SHAPE)
            groups = await asyncio.gather(*(client.generate(prompt, SAMPLES, sampling) for prompt in prompts))
            found[name] = batch_of(prompts, groups)
    finally:
        await client.close()
    return found


def batch_of(prompts: list[tuple[int, ...]], groups: list[list[Completion]]) -> Batch:
    """As a collector stores them; rewards do not matter here."""
    built = [
        Group(
            prompt=Prompt(group=number, text="", answer="", tokens=prompt),
            samples=tuple(Sample(completion=completion, reward=0.0) for completion in group),
        )
        for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
    ]
    return Batch.from_groups(0, built, contract=CONTRACT, dropped=(), next_group=len(built), recipe_sha256="0" * 64)


@contextmanager
def learner_of(folder: Path, precision: LearnerPrecision) -> Iterator[MegatronLearner]:
    section = LearnerSection(precision=precision, micro_batch_tokens=4096)
    try:
        yield MegatronLearner.create(folder, section, Supervised(), temperature=1.0, seed=0, total_steps=1)
    finally:
        leave_layout()


def figures(logprobs: torch.Tensor, batch: Batch) -> dict[str, float]:
    """Of the log-ratios of all response tokens."""
    rollout = torch.from_numpy(batch.rollout_logprobs)
    sums = RatioSums.from_logprobs(logprobs, rollout, torch.ones(len(rollout), dtype=torch.bool))
    lengths = torch.from_numpy(batch.response_lengths)
    totals = torch.stack([part.sum() for part in (logprobs - rollout).double().split(lengths.tolist())])
    return dict(
        k3=sums.k3_kl,
        ess=sums.ess,
        sequence_ess=sequence_ess_of_totals(totals),
        mean_abs=sums.mean_abs_log_ratio,
        largest=sums.max_abs_log_ratio,
    )


def compare(router: str, folder: Path, engine: str, learner: str, batch: Batch) -> Row:
    """Score the engine's rollouts with the learner's experts and with the engine's."""
    with learner_of(folder, DTYPES[learner]) as scorer:
        replayed = scorer.score_rows(TokenRows.of_batch(batch))
        without = scorer.score_rows(TokenRows.of_batch(replace(batch, experts=None)))
    assert replayed.replay is not None
    assert replayed.replay.found is not None
    found = replayed.replay.found
    return Row(
        router=router,
        engine=engine,
        learner=learner,
        tokens=batch.num_response_tokens,
        rows_differ=found.expert_rows_differ_share,
        tokens_differ=found.expert_tokens_differ_share,
        without=figures(without.logprobs.cpu(), batch),
        replayed=figures(replayed.logprobs.cpu(), batch),
    )


def study(folder: Path) -> list[Row]:
    """Every router, engine and learner."""
    folders = {name: folder / name.replace(" ", "-") for name in SPREADS}
    for name, path in folders.items():
        write_mixture(path, SPREADS[name])
    rows = []
    for engine in DTYPES:
        batches = sample_all(folders, engine)
        for router, batch in batches.items():
            rows += [compare(router, folders[router], engine, learner, batch) for learner in DTYPES]
    return rows


def table(rows: list[Row]) -> Table:
    shown = Table(title="Routing: own experts → the engine's")
    for column in ("router", "engine", "learner", "rows differ", "tokens differ", "k3", "token ESS", "sequence ESS"):
        shown.add_column(column, justify="left" if column in ("router", "engine", "learner") else "right")
    for row in sorted(rows, key=lambda row: (row.router, row.engine, row.learner)):
        pairs = [f"{row.without[name]:.4g} → {row.replayed[name]:.4g}" for name in ("k3", "ess", "sequence_ess")]
        shown.add_row(row.router, row.engine, row.learner, f"{row.rows_differ:.2%}", f"{row.tokens_differ:.2%}", *pairs)
    return shown


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="evenkeel-routing-") as scratch:
        rows = study(Path(scratch))
    Console(width=140).print(table(rows))
    if arguments:
        found: list[dict[str, Any]] = [vars(row) for row in rows]
        Path(arguments[0]).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
