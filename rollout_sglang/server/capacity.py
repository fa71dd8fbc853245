"""Compute how many tokens of keys and values an engine has room for. Loads neither torch nor SGLang.

    room of a GPU    = memory × mem_fraction_static - weights
    bytes per token  = 2 · layers · kv_heads · head_dim · bytes, ÷ min(TP, kv_heads) on each GPU

SGLang's `--mem-fraction-static` is the share of a GPU's memory for weights, keys and values together; activations and
CUDA graphs use the rest. SGLang takes the share of the memory that is free when the engine starts. `--max-total-tokens`
bounds the room, so that an engine that shares its GPU has the same room after every start. With more ranks than
key/value heads, every rank still holds one head. Decoding is captured in graphs for batches up to the requests that the
recipe has under way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.sections import RolloutSection
from pipeline.errors import LayoutError, ModelError, RecipeError
from pipeline.gpu_needs import option

DEFAULT_MEM_FRACTION = 0.85
"""The share assumed when the recipe's extra_args do not set it. SGLang itself chooses by GPU and settings."""

KV_CACHE_BYTES = {"fp8_e5m2": 1.0, "fp8_e4m3": 1.0, "bf16": 2.0, "bfloat16": 2.0, "fp4_e2m1": 0.5}
"""Value of --kv-cache-dtype → bytes per number. `auto` is the engine's dtype."""

BLOCK_SCALE_BYTES = 4 / (128 * 128)
MOST_CAPTURED = 512
"""Largest batch that is captured by default: with more, a step computes for longer than its launches take."""
GRAPHS_BYTES, CAPTURED_REQUEST_BYTES = 1.1 * 2**30, 2 * 2**20
"""Memory of the decode graphs of a GPU: of all together, and for each request of the largest batch as SGLang reserves.
One H200 gave 1.6 GiB to graphs for up to 256 requests of a 1.7 B model (SGLang 0.5.17)."""
NO_GRAPHS = ("--disable-cuda-graph", "--disable-decode-cuda-graph")


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """The sizes of a model that determine an engine's memory."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    linear: int
    """Parameters in the matrices that fp8 rollouts quantize, experts included."""
    other: int
    """All other parameters: embedding, head, norms, router."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    mem_fraction: float
    weight_bytes: float
    """Per GPU."""
    kv_bytes_per_token: float
    """Per GPU."""
    kv_tokens: int
    """0 when the weights alone do not fit."""
    graph_bytes: float
    """CUDA graphs, per GPU."""

    @property
    def gpu_bytes(self) -> float:
        """The bytes of weights, keys, values and CUDA graphs on each GPU."""
        return self.weight_bytes + self.kv_tokens * self.kv_bytes_per_token + self.graph_bytes


def engine_capacity(model: EngineModel, rollout: RolloutSection, gpu_bytes: float) -> Capacity:
    """Compute the capacity of one engine of `rollout.tensor_parallel` GPUs with `gpu_bytes` each. Raises LayoutError
    when key/value heads and GPUs do not divide each other, RecipeError for unreadable extra_args."""
    ranks, heads = rollout.tensor_parallel, model.num_kv_heads
    if heads % ranks and ranks % heads:
        raise LayoutError(
            f"rollout.tensor_parallel is {ranks}, which neither divides nor is a multiple of the model's "
            f"num_key_value_heads {heads}; use {heads} or a divisor of it"
        )
    text = option(rollout.extra_args, "--mem-fraction-static")
    try:
        fraction = DEFAULT_MEM_FRACTION if text is None else float(text)
    except ValueError:
        fraction = 0.0
    if not 0.0 < fraction < 1.0:
        raise RecipeError(f"rollout.extra_args: --mem-fraction-static is {text!r}, expected a number between 0 and 1")
    most = option(rollout.extra_args, "--max-total-tokens")
    if most is not None and not (most.isdecimal() and int(most)):
        raise RecipeError(f"rollout.extra_args: --max-total-tokens is {most!r}, expected a positive number")
    kv_dtype = option(rollout.extra_args, "--kv-cache-dtype") or "auto"
    sizes = {"auto": 4.0 if rollout.precision == "fp32" else 2.0, **KV_CACHE_BYTES}
    if kv_dtype not in sizes:
        raise RecipeError(f"rollout.extra_args: --kv-cache-dtype is {kv_dtype!r}, expected one of {', '.join(sizes)}")
    weights = weight_bytes(model, rollout) / ranks
    per_token = 2 * model.num_layers * heads * model.head_dim * sizes[kv_dtype] / min(ranks, heads)
    captured = captured_requests(rollout)
    tokens = max(0, int((gpu_bytes * fraction - weights) / per_token))
    return Capacity(
        mem_fraction=fraction,
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        kv_tokens=tokens if most is None else min(tokens, int(most)),
        graph_bytes=GRAPHS_BYTES + captured * CAPTURED_REQUEST_BYTES if captured else 0.0,
    )


def captured_requests(rollout: RolloutSection) -> int:
    """Return the largest batch whose decoding an engine captures in CUDA graphs: the requests that it has under way at
    once, at most MOST_CAPTURED, or what extra_args say. 0 where they turn graphs off. Raises RecipeError for no number.
    """
    given = rollout.extra_args
    if any(name in given for name in NO_GRAPHS) or option(given, "--cuda-graph-backend-decode") == "disabled":
        return 0
    most = option(given, "--cuda-graph-max-bs-decode")
    if most is None:
        return min(MOST_CAPTURED, math.ceil(rollout.concurrent_prompts * rollout.group_size / rollout.engines))
    if not (most.isdecimal() and int(most)):
        raise RecipeError(f"rollout.extra_args: --cuda-graph-max-bs-decode is {most!r}, expected a positive number")
    return int(most)


def weight_bytes(model: EngineModel, rollout: RolloutSection) -> float:
    """Return the bytes of all weights in the rollout's formats: on the GPUs of an engine together, and in a publish."""
    dtype = 4.0 if rollout.precision == "fp32" else 2.0  # of unquantized weights; bfloat16 in FP8 engines
    linear = {"fp8_block": 1 + BLOCK_SCALE_BYTES, "fp8_tensor": 1.0}.get(rollout.precision, dtype)
    return model.linear * linear + model.other * dtype


BLOCK_CHANNELS = 128


def check_block_shapes(hf_config: Mapping[str, Any], tensor_parallel: int = 1) -> None:
    """Raise ModelError naming every width of a `config.json` that block FP8 cannot divide."""
    hidden = int(hf_config["hidden_size"])
    heads = int(hf_config["num_attention_heads"])
    kv_heads = int(hf_config.get("num_key_value_heads") or heads)
    head_dim = int(hf_config.get("head_dim") or hidden // heads)
    # Newer transformers releases write the number of experts as num_local_experts.
    experts = hf_config.get("num_experts") or hf_config.get("num_local_experts")
    inner = "moe_intermediate_size" if experts else "intermediate_size"
    widths = {
        "hidden_size": hidden,
        "num_attention_heads × head_dim / tensor_parallel": heads * head_dim // tensor_parallel,
        # With more ranks than key-value heads, SGLang gives each rank a copy of one head.
        "num_key_value_heads × head_dim / tensor_parallel": max(1, kv_heads // tensor_parallel) * head_dim,
        f"{inner} / tensor_parallel": int(hf_config[inner]) // tensor_parallel,
    }
    wrong = [f"{name} = {width}" for name, width in widths.items() if width % BLOCK_CHANNELS]
    if wrong:
        raise ModelError(
            f"fp8_block needs multiples of {BLOCK_CHANNELS}, but {', '.join(wrong)}; use rollout.precision bf16 (on "
            "a CPU fp8_tensor too), a smaller rollout.tensor_parallel, or another model"
        )
