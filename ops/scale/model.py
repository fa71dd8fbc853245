"""A run of any size, and what it asks of the parts that all of it share.

Sizes grow together as in pipeline/recipes/qwen3_32b.yaml: 256 samples under way at an engine of four GPUs, learner
layout TP4 PP4, and as many data parallel replicas as there are ranks. Polling periods are the product's own constants.
What the code takes of a processor was measured on one core (x86, 2026-11) with the product's functions; what a cluster
has is assumed, and named so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from launch.cluster.roles.base import EPOCH_POLL_S, FINISHED_POLL_S
from launch.plan.costs import GPUS_PER_NODE, NETWORK_BYTES_S
from pipeline.config.loader import load_recipe
from pipeline.config.recipe import Recipe
from rollout_sglang.monitor import PERIOD_S
from rollout_sglang.weights.update_lease import KEPT

RECIPE: Recipe = load_recipe(Path("qwen3_32b"))
RESPONSE_TOKENS = 3206
STEP_S = 215.0
"""Of qwen3_32b on 32 + 32 H100 (launch.plan.costs.DECODE_EFFICIENCY); engines and learner grow alike, so it stays."""
WEIGHT_BYTES = 34e9
"""Qwen3-32B in 128×128-block FP8, with embedding and head in bfloat16."""
CHECKPOINT_BYTES = 32.76e9 * 14
"""Weights in bfloat16, main weights and two moments in float32."""

PARSED_TOKENS_S = 1.2e6
"""Measured: answers of engines → records, in one process."""
BUILT_TOKENS_S = 9.1e6
"""Measured: records → one batch."""
WRITTEN_TOKENS_S = 10.5e6
"""Measured: a batch → its file, digest and compression included."""
READ_TOKENS_S = 22e6
"""Measured: the file → a batch, checks included; each rank reads all of it."""
BATCH_BYTES_A_TOKEN = 6.5
"""Measured, compressed."""
ANSWER_BYTES_A_TOKEN = 43.0
"""Measured: JSON of SGLang, with log-probabilities."""
CALL_S = 1.1e-3
"""Measured: processor time of one HTTP call."""
PUBLISH_CALLS = 6
"""Of rank 0 for each engine: health, pause, checksums, probe, name, continue."""

METADATA_S = 10_000.0
"""Assumed: requests a second of the file server (a Lustre MDS or an NFS filer reaches 5,000 to 50,000)."""
ROUND_TRIP_S = 3e-4
"""Assumed: of one request to an idle file server."""
FILE_BYTES_S = 100e9
"""Assumed: reading and writing, all hosts together."""
ROUTER_BYTES_S = 2.5e9
"""Assumed: what one router passes on."""
VERIFY_S = 0.05
"""Assumed: processor time of one verification."""
COLLECTOR_CORES = 96
"""Assumed: cores of the collector's host, for verifiers."""


@dataclass(frozen=True)
class Size:
    """How many engines, and ranks of the learner."""

    engines: int
    ranks: int

    @property
    def learner_hosts(self) -> int:
        return math.ceil(self.ranks / GPUS_PER_NODE)

    @property
    def stages(self) -> int:
        return RECIPE.learner.pipeline_parallel

    @property
    def samples(self) -> int:
        """Of a step."""
        share = RECIPE.rollout.prompts_per_batch // RECIPE.rollout.engines
        return self.engines * share * RECIPE.rollout.group_size

    @property
    def tokens(self) -> float:
        """Response tokens of a step."""
        return self.samples * RESPONSE_TOKENS


@dataclass(frozen=True)
class Limit:
    """One part that all share: what a run asks of it, as a share of what it has."""

    part: str
    load: float
    note: str

    def breaks_at(self, engines: int) -> int:
        """At how many engines it is full, when all grows alike."""
        return int(engines / self.load)


def metadata_requests_s(size: Size, requests: dict[str, float]) -> dict[str, float]:
    """Requests a second on the shared file system, in the long run, by role."""
    looks = requests["engines listed"] + size.engines * requests["engines listed, each"] + requests["published?"]
    in_step = size.ranks * requests["batch opened"] + 3 * requests["file replaced"] + requests["file created"]
    return {
        "engines: is there a later start? finished?": size.engines
        * (requests["epoch check"] / EPOCH_POLL_S + requests["finished?"] / FINISHED_POLL_S),
        "learner's agents: is there a later start?": size.learner_hosts * requests["epoch check"] / EPOCH_POLL_S,
        "collector: which engines are there?": looks / look_s(size, requests),
        "learner's rank 0: is the batch there?": requests["batch there?"],
        "learner's ranks: the batch, once a step": in_step / STEP_S,
    }


def look_s(size: Size, requests: dict[str, float]) -> float:
    """Seconds from one look of the collector at all engines to the next."""
    reading = (requests["engines listed"] + size.engines * requests["engines listed, each"]) * ROUND_TRIP_S
    return PERIOD_S + reading + size.engines * CALL_S


def limits(size: Size, requests: dict[str, float]) -> list[Limit]:
    """What a run asks of each shared part; above 1 it is too much."""
    tokens, hosts = size.tokens, size.learner_hosts
    parsing = tokens / PARSED_TOKENS_S + tokens / BUILT_TOKENS_S + tokens / WRITTEN_TOKENS_S
    looking = size.engines * CALL_S / look_s(size, requests) * STEP_S
    batch = tokens * BATCH_BYTES_A_TOKEN
    return [
        Limit(
            "collector: one Python process",
            (parsing + looking) / STEP_S,
            f"{parsing:,.0f} s a step for {tokens / 1e6:,.0f} million tokens, {looking:,.0f} s for looks at engines",
        ),
        Limit(
            "verifiers on the collector's host",
            size.samples * VERIFY_S / COLLECTOR_CORES / STEP_S,
            f"{size.samples:,} samples a step",
        ),
        Limit(
            "reading the batch: file system",
            hosts * batch / FILE_BYTES_S / STEP_S,
            f"{batch / 1e9:.1f} GB on each of {hosts} hosts",
        ),
        Limit(
            "reading the batch: every rank",
            tokens / READ_TOKENS_S / STEP_S,
            f"{tokens / READ_TOKENS_S:,.0f} s a step, before the update begins",
        ),
        Limit(
            "learner's rank 0: calls of a publish",
            size.engines * PUBLISH_CALLS * CALL_S / STEP_S,
            f"{size.engines * PUBLISH_CALLS * CALL_S:.1f} s of calls a publish",
        ),
        Limit(
            "metadata of the file system",
            sum(metadata_requests_s(size, requests).values()) / METADATA_S,
            f"{sum(metadata_requests_s(size, requests).values()):,.0f} requests a second of {METADATA_S:,.0f}",
        ),
        Limit(
            "router: bytes of answers",
            tokens * ANSWER_BYTES_A_TOKEN / ROUTER_BYTES_S / STEP_S,
            f"{tokens * ANSWER_BYTES_A_TOKEN / STEP_S / 1e6:,.0f} MB/s",
        ),
        Limit(
            "all engines start at once: file system",
            size.engines * WEIGHT_BYTES / FILE_BYTES_S / RECIPE.rollout.start_deadline_s,
            f"{size.engines * WEIGHT_BYTES / FILE_BYTES_S:,.0f} s of {RECIPE.rollout.start_deadline_s:,.0f}",
        ),
    ]


def publish_s(size: Size) -> dict[str, float]:
    """Seconds of the bytes of one publish, by who sends to whom.

    groups: rank e mod (ranks of the stage) sends its stage's share to engine e, stages side by side (what is built).
    tree: the ranks of one replica send to the first engines, each engine passes on what it has, bucket by bucket.
    disk: a folder is written, and every engine reads all of it.
    """
    in_a_stage = size.ranks // size.stages
    share = WEIGHT_BYTES / size.stages
    bucket = RECIPE.weights.bucket_mib * 2**20
    arriving = WEIGHT_BYTES / NETWORK_BYTES_S
    depth = math.ceil(math.log2(size.engines + 1))
    return {
        "groups": max(arriving, math.ceil(size.engines / in_a_stage) * share / NETWORK_BYTES_S),
        "tree": arriving + depth * bucket / NETWORK_BYTES_S,
        "disk": (1 + size.engines) * WEIGHT_BYTES / FILE_BYTES_S,
    }


def files(size: Size, steps: int) -> dict[str, int]:
    """Files in the run directory at the end of a run without restarts."""
    saved = RECIPE.checkpoint.keep * (2 * size.ranks + 4)
    return {
        "batches, one a step": steps,
        "log-probabilities, one a step": steps,
        "evaluations": steps // RECIPE.evaluation.every + 2,
        f"checkpoints, {RECIPE.checkpoint.keep} kept, two files a rank": saved,
        f"policies, {RECIPE.weights.keep + 1} kept, a file for 4 GiB": (RECIPE.weights.keep + 1) * (9 + 5),
        "weight updates, the newest": 2 * KEPT,
        "engines, and starts of roles": 3 * size.engines + 8,
        "logs, events, metrics": size.engines + size.learner_hosts + 6,
    }
