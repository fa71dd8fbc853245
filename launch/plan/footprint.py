"""Count the bytes that a learner rank needs, from sizes alone. Loads neither torch nor Megatron.

    static      parameters + gradients + optimizer state
    buckets     of a weight channel that sends while the next step trains, or keeps its buffer
    training    + activations in flight + the head + working memory of the backward pass
    scoring     + one layer at a time + the head (forward only)
    publishing  + whole tensors being gathered + the buckets of the weight channel

A rank needs static + buckets + the largest of the other three + an allowance. Every pipeline stage is counted: the
first holds the embedding and the most micro-batches, and the last holds the head.

Bytes per parameter in bfloat16: 2, float32 gradients 4, float32 main copy and two moments 12. In float32: 4, gradients
4, two moments 8. The distributed optimizer divides the last part by the data parallel ranks. In bfloat16 that is 18, or
6 + 12/DP, as in Megatron-LM's theoretical memory usage with default gradients. FP8 training adds 2 per number in a
layer's matrices: TE keeps them quantized by rows and by columns between steps. Emulated FP8 keeps a rounded copy of
them in the parameters' dtype.

Activations are all tensors that autograd keeps: see `kept_by_layer`. The allowance stands for the rest: uneven loads of
experts, buffers of NCCL and cuBLAS, and fragmentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from launch.build.sizes import layer_sizes
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.te_precision import is_fp8
from megatron_bridge.parallel.layout import Layout, layers_of_chunks
from pipeline.config.recipe import LearnerSection

GIB = 2**30
CHUNK_BYTES = 3 * (16 << 20)
"""Full-precision scratch of log-probabilities: three chunks of `megatron_bridge.model.logprobs`."""

PART_BYTES = 256 << 20
"""The float32 head's gradient in parts: see `megatron_bridge.model.fp32_head`."""

LOGITS_BYTES = 1 << 30
"""Logits in pieces, where a pass may compute them so: see `megatron_bridge.model.build`."""

Kernels = Literal["fused", "local"]
"""fused: Transformer Engine with flash attention, as on a GPU. local: Megatron's layers, as on a CPU."""


RUNTIME_BYTES = 3 * GIB
"""CUDA context, NCCL channels and cuBLAS workspaces of one process: assumed, not measured."""
FRAGMENTATION = 0.1
"""Share of the transient memory that the caching allocator cannot reuse: assumed, not measured."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The inputs of a footprint besides model and layout."""

    tokens: int
    """Positions of one micro-batch of a data parallel rank, its context parallel ranks together."""
    count: int
    """Micro-batches of a step: the most that are ever in flight."""
    kernels: Kernels = "fused"
    repeated_keys: bool = False
    """Whether every query head keeps a copy of its keys and values: float32 on a GPU (model.packed_attention)."""
    fp32_lm_head: bool = False
    bucket_bytes: int = 0
    """Bucket size of the weight channel; 0 for the disk channel."""
    buckets_stay: bool = False
    """Whether buckets exist while a step trains: the channel sends beside training, or keeps its buffer."""
    emulates_at_publish: bool = False
    """Whether each publish rounds all matrices as engines hold them, to measure the effect (weight_sync.disk)."""
    runtime_bytes: int = RUNTIME_BYTES
    fragmentation: float = FRAGMENTATION


@dataclass(frozen=True, kw_only=True)
class HeldParameters:
    """Numbers in the parameters of one rank."""

    total: int
    dense: int
    """Parameters outside of experts: optimizer state spread over data × context parallel ranks."""
    expert: int
    """Parameters of experts: optimizer state spread over the ranks that hold the same experts."""
    matrices: int
    """The part of `dense` and `expert` in the layers' matrices, which FP8 training multiplies in e4m3."""
    largest: int
    """The largest matrix of a layer; its gradient briefly exists twice."""
    outer: int
    """The embedding or head of this stage; its gradient briefly exists twice."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a rank of one pipeline stage."""

    stage: int
    held: HeldParameters
    parameters: int
    quantized: int
    """Copies of parameters in FP8; 0 without FP8 training."""
    gradients: int
    optimizer: int
    buckets: int
    activations: int
    """Tensors kept for the backward pass, of all micro-batches in flight."""
    head: int
    """Final norm, logits, and scratch of their logarithms and gradient; last stage only."""
    working: int
    """Gradients of activations and of a matrix, and the recomputed layer, in a layer's backward pass."""
    scoring: int
    """Memory above static in the log-probability pass."""
    publishing: int
    """Memory above static while weights are exported."""
    allowance: int
    static: int
    training: int
    """Memory above static in a training step."""
    total: int

    def items(self) -> dict[str, int]:
        """Return the parts that add up to `total`, by name."""
        busy = "head" if self.head > self.working else "working"
        parts = dict(parameters=self.parameters, quantized=self.quantized, gradients=self.gradients)
        parts |= dict(optimizer=self.optimizer, buckets=self.buckets)
        transient = {
            self.training: {"activations": self.activations, busy: getattr(self, busy)},
            self.scoring: {"scoring": self.scoring},
            self.publishing: {"publishing": self.publishing},
        }
        shown = {name: size for name, size in parts.items() if size or name not in ("quantized", "buckets")}
        return shown | transient[max(transient)] | {"allowance": self.allowance}


def footprints(config: ModelConfig, learner: LearnerSection, work: Workload) -> list[Footprint]:
    """Count the bytes of a rank of each pipeline stage. The layout must have passed `check_layout`."""
    layout, size = Layout.of(learner), learner.parameter_bytes
    tokens = -(-work.tokens // layout.context)
    attention, mlp = kept_by_layer(config, learner, work)
    each = layer_activations(config, learner, work)
    # Numbers per position around an MLP: gate and up, and the hidden states before and after, gathered.
    if config.experts is None:
        inner = 2 * config.ffn_size // layout.tensor
    else:
        inner = config.experts.per_token * (2 * config.hidden_size + 2 * config.experts.ffn_size) // layout.tensor
    around = tokens * size * (inner + 2 * config.hidden_size)
    again = dict(none=0, selective=int(tokens * mlp), full=int(tokens * (attention + mlp)))[recomputed(learner)]
    copies = learner.parameter_bytes if learner.fp8_emulation else 2 if is_fp8(learner.precision) else 0
    state = optimizer_bytes(learner)
    reduced = 4 if learner.megatron.ddp.get("grad_reduce_in_fp32", True) else size
    ranks = layout.tensor * layout.context * layout.data
    largest, assembled = (number * size for number in _largest_tensors(config))
    # The largest tensor travels alone, in a bucket of its own.
    buckets = 2 * max(largest, work.bucket_bytes) if work.bucket_bytes else 0
    stages = []
    for stage in range(layout.pipeline):
        held = held_parameters(config, learner, stage)
        if learner.distributed_optimizer:
            dense = state * held.dense / (layout.data * layout.context)
            optimizer = math.ceil(dense + state * held.expert * layout.expert * layout.expert_tensor / ranks)
        else:
            optimizer = math.ceil(state * held.total)
        layers = max(layers_of_chunks(config.num_layers, learner)[stage])
        activations = int(tokens * layers * chunks_in_flight(layout, stage, work.count) * each)
        head = scored = 0
        if stage == layout.pipeline - 1:
            scored = _head_bytes(config, layout, work, size, in_pieces=True)
            head = _head_bytes(config, layout, work, size, in_pieces=learner.recompute == "full")
        # While a layer is differentiated; or the embedding's gradient, where other micro-batches are in flight.
        working = max(around + held.largest * size + again, held.outer * size if layout.pipeline > 1 else 0)
        publishing = assembled + (0 if work.buckets_stay else buckets)
        publishing += held.matrices * size if work.emulates_at_publish else 0
        parameters, quantized, gradients = held.total * size, held.matrices * copies, held.total * reduced
        static = parameters + quantized + gradients + optimizer
        there = buckets if work.buckets_stay else 0
        training, scoring = activations + max(head, working), max(scored, around)
        transient = there + max(training, scoring, publishing)
        allowance = work.runtime_bytes + int(work.fragmentation * transient)
        stages.append(
            Footprint(
                stage=stage,
                held=held,
                parameters=parameters,
                quantized=quantized,
                gradients=gradients,
                optimizer=optimizer,
                buckets=there,
                activations=activations,
                head=head,
                working=working,
                scoring=scoring,
                publishing=publishing,
                allowance=allowance,
                static=static,
                training=training,
                total=static + transient + allowance,
            )
        )
    return stages


def worst_footprint(config: ModelConfig, learner: LearnerSection, work: Workload) -> Footprint:
    return max(footprints(config, learner, work), key=lambda one: one.total)


def held_parameters(config: ModelConfig, learner: LearnerSection, stage: int) -> HeldParameters:
    """Count the numbers in each rank of a stage, exactly: a tied embedding lives on the first and the last stage."""
    layout, layers = Layout.of(learner), sum(layers_of_chunks(config.num_layers, learner)[stage])
    first, last = stage == 0, stage == layout.pipeline - 1
    embedding = config.vocabulary_rows(layout.tensor) * config.hidden_size
    outer: dict[str, int] = {"final_norm": config.hidden_size} if last else {}
    if first:
        outer["embedding"] = embedding
    if last and not (first and config.tied_embeddings):
        outer["head"] = embedding
    dense = expert = matrices = largest = 0
    for times, sizes in ((layers, layer_sizes(config)), (1, outer)):
        for name, number in sizes.items():
            # Norms and the router are on all ranks of a stage.
            split = 1 if "norm" in name or name == "mlp.gate.weight" else layout.tensor
            held = number // (layout.expert * layout.expert_tensor if ".experts" in name else split)
            if ".experts" in name:
                expert += times * held
            else:
                dense += times * held
            if name.endswith("proj.weight"):
                matrices += times * held
            if sizes is not outer:
                # Gate and up are one matrix; the experts of a rank are differentiated together.
                largest = max(largest, 2 * held if "gate_proj" in name else held)
    widest = embedding // layout.tensor if first or last else 0
    return HeldParameters(
        total=dense + expert, dense=dense, expert=expert, matrices=matrices, largest=largest, outer=widest
    )


def chunks_in_flight(layout: Layout, stage: int, num_micro_batches: int) -> int:
    """Count the model chunks whose activations a stage holds at once, by 1F1B or Megatron's interleaved schedule."""
    if layout.pipeline == 1:
        return 1
    if layout.virtual == 1:
        return min(layout.pipeline - stage, num_micro_batches)
    warm_up = (layout.pipeline - stage - 1) * 2 + (layout.virtual - 1) * layout.pipeline
    return min(warm_up + 1, num_micro_batches * layout.virtual)


def layer_activations(config: ModelConfig, learner: LearnerSection, work: Workload) -> float:
    """Count the bytes per position that autograd keeps of one decoder layer, on one rank. Selective recomputation
    repeats the MLP; full recomputation repeats the whole layer from its input."""
    if recomputed(learner) == "full":
        layout = Layout.of(learner)
        return learner.parameter_bytes * config.hidden_size / (layout.tensor if layout.sequence else 1)
    attention, mlp = kept_by_layer(config, learner, work)
    return attention + (0 if recomputed(learner) == "selective" else mlp)


def recomputed(learner: LearnerSection) -> Literal["none", "selective", "full"]:
    """Return what is recomputed. Selected modules without the MLP save little, and count as none."""
    modules = learner.megatron.transformer.get("recompute_modules") or ("mlp", "moe")
    return learner.recompute if learner.recompute == "full" or {"mlp", "moe"} & {*modules} else "none"


def optimizer_bytes(learner: LearnerSection) -> float:
    """Count the optimizer's bytes on the device for each number: two moments, beside 16-bit weights a main copy."""
    given = learner.megatron.optimizer
    kept = ["exp_avg_dtype", "exp_avg_sq_dtype", *(["main_params_dtype"] if learner.precision != "fp32" else [])]
    bytes_of = dict(bfloat16=2, float16=2, uint8=1)
    on_host = given.get("optimizer_offload_fraction", 0.0) if given.get("optimizer_cpu_offload") else 0.0
    return float(sum([bytes_of.get(str(given.get(name)), 4) for name in kept]) * (1 - on_host))


def kept_by_layer(config: ModelConfig, learner: LearnerSection, work: Workload) -> tuple[float, float]:
    """Return the bytes per position of (norms and attention, the MLP) of a layer without recomputation.

    fused (h hidden, q and k widths of all query and key heads, d of one head, f ffn; 2 bytes each in bfloat16):
        4h   input and output of both norms      2q + 2k   rotated queries and keys, values, attention's output
        q + k more, raw, with query and key norms          3f   gate, up and their product
    local, where nothing is fused, counted tensor by tensor for rows of one length: norms 6h; 5q + 5k of attention, and
    4d for rotations; 2q + k more with query and key norms; 2q - 2k more with repeated keys; 5f.

    FP8 training keeps the inputs of matrix products in one byte: both norms' outputs, the product, and the tokens sent
    to experts. Tensor parallel ranks share all of it, but the norms' part only with sequence parallelism.
    """
    layout, size = Layout.of(learner), learner.parameter_bytes
    residual_split = layout.tensor if layout.sequence else 1
    h, (q, k, _) = config.hidden_size, config.qkv_rows
    if work.kernels == "fused":
        norms, whole = (3 if is_fp8(learner.precision) else 4) * h, 0
        attention = 2 * q + 2 * k + (q + k if config.qk_norm else 0)
    else:
        norms, whole = 6 * h, 4 * config.head_dim
        attention = 5 * q + 5 * k + (2 * q + k if config.qk_norm else 0) + (2 * (q - k) if work.repeated_keys else 0)
    outside = size * (norms / residual_split + attention / layout.tensor + whole)
    multiplied = 0.5 if is_fp8(learner.precision) else 1.0  # of `size`: inputs of products
    copies = 2 + multiplied if work.kernels == "fused" else 5
    if config.experts is None:
        return outside, size * copies * config.ffn_size / layout.tensor
    experts = config.experts
    sent = multiplied * config.hidden_size * layout.expert_tensor
    routed = size * experts.per_token * (sent + copies * experts.ffn_size)
    return outside, (routed + 2 * 4 * experts.count) / residual_split  # float32 router logits and weights


def _head_bytes(config: ModelConfig, layout: Layout, work: Workload, size: int, *, in_pieces: bool) -> int:
    """Count final norm, gathered hidden states, logits (overwritten by their gradient) and the head's scratch.
    `in_pieces`: large logits are computed in pieces, whose gradients of the head's matrix are added up."""
    tokens = -(-work.tokens // layout.context)
    width = config.vocabulary_rows(layout.tensor) // layout.tensor
    matrix = width * config.hidden_size
    hidden: float = (2 if work.kernels == "fused" else 3) * size * config.hidden_size
    hidden /= layout.tensor if layout.sequence else 1
    gathered = size * config.hidden_size if layout.sequence else 0
    precise, gradient = size, matrix * size + tokens * size * config.hidden_size
    if work.fp32_lm_head and size != 4:  # see megatron_bridge.model.fp32_head
        precise = 4
        # Parts of the logits' gradient, their float32 products, and the sums of these (the head's in its dtype).
        columns = min(width, PART_BYTES // (4 * tokens))
        gradient = matrix * size + 4 * columns * (tokens + config.hidden_size) + tokens * 4 * 4 * config.hidden_size
    logits = tokens * precise * width
    if in_pieces and logits > LOGITS_BYTES:
        logits, gradient = max(LOGITS_BYTES, precise * width), gradient + matrix * size
    return int(tokens * (hidden + gathered) + logits) + max(CHUNK_BYTES, gradient)


@lru_cache(maxsize=32)
def _largest_tensors(config: ModelConfig) -> tuple[int, int]:
    """Return the numbers in the largest tensor, and in the largest with its gathered shards if it is assembled from
    them; the shards of the vocabulary are the whole tensor."""
    sizes = {name: math.prod(size) for name, size in config.tensors().items()}
    ends = {sizes.pop(name) for name in ("model.embed_tokens.weight", "lm_head.weight") if name in sizes}
    return max(ends | {*sizes.values()}), max(ends | {2 * max(sizes.values())})
