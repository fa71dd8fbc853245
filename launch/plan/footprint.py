"""How many bytes a learner rank needs, worked out from sizes alone. Loads neither torch nor Megatron.

    static      parameters + gradients + optimizer state                        there all the time
    buckets     of a weight channel that sends while the next step trains, or keeps them
    training    + activations in flight + the head + what a backward step works on
    scoring     + one layer at a time + the head (forward only)
    publishing  + whole tensors being gathered + the buckets of the weight channel

A rank needs static + buckets + the largest of the other three + an allowance. Every pipeline stage is worked out,
because the first holds the embedding and the most micro-batches, and the last holds the head.

Bytes a parameter: bfloat16 2, gradients always float32 4, and float32 main copy and two moments 12 in bfloat16 or the
two moments alone 8 in float32, the last part divided by the data parallel ranks with the distributed optimizer. In
bfloat16 that is 18, or 6 + 12/DP: the same as Megatron-LM's theoretical memory usage with its default gradients. FP8
training adds 2 for each number in a layer's matrices: TE keeps them quantized by rows and by columns from one step to
the next. Emulated FP8 keeps a rounded copy of them, as wide as they are.

Activations count every tensor that autograd keeps: see `layer_activations`. What is not counted: uneven loads of
experts, NCCL's and cuBLAS's own buffers and fragmentation (the allowance stands for these).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from launch.build.sizes import layer_sizes
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.te_precision import is_fp8
from megatron_bridge.parallel.layout import Layout
from pipeline.config.recipe import LearnerSection, Recipe

GIB = 2**30
CHUNK_BYTES = 3 * (16 << 20)
"""Full-precision scratch of log-probabilities: three chunks of `logprobs_torch`."""

_MAY_BE_NONE = ("quantized", "buckets")
"""Not shown where they are 0."""

Kernels = Literal["fused", "local"]
"""fused: Transformer Engine with flash attention, as on a GPU. local: Megatron's own layers, as on a CPU."""


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """What a data parallel rank (its context parallel ranks together) works through in a step."""

    tokens: int
    """Positions of one micro-batch."""
    count: int
    """Micro-batches of a step: no more than these are ever in flight."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What no formula gives: assumed, not measured."""

    runtime_bytes: int = 3 * GIB
    """CUDA context, NCCL channels and cuBLAS workspaces of one process."""
    fragmentation: float = 0.1
    """Of what comes and goes above static, the share that the caching allocator cannot hand out again."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything beside model and layout that memory depends on."""

    micro_batches: MicroBatches
    kernels: Kernels = "fused"
    repeated_keys: bool = False
    """Whether every query head keeps keys and values of its own: float32 on a GPU (model.packed_attention)."""
    fp32_lm_head: bool = False
    bucket_bytes: int = 0
    """Of the weight channel; 0 for the disk channel."""
    buckets_stay: bool = False
    """Whether there are buckets while a step trains: the channel sends beside training, or keeps its buffer."""
    emulates_at_publish: bool = False
    """Whether each publish rounds all matrices once more as engines hold them, to measure what that does
    (megatron_bridge.weight_sync.disk)."""
    allowance: Allowance = Allowance()

    @classmethod
    def of(cls, recipe: Recipe, learner: LearnerSection, micro_batches: MicroBatches) -> Workload:
        """Of a recipe on GPUs, with another `learner` section perhaps."""
        channel = recipe.weights.channel
        # Emulation and float32 are computed in Megatron's own layers, on a GPU too (megatron_bridge.model.build).
        local = learner.fp8_emulation or learner.precision == "fp32"
        return cls(
            micro_batches=micro_batches,
            kernels="local" if local else "fused",
            repeated_keys=learner.precision == "fp32",
            fp32_lm_head=recipe.model.fp32_lm_head,
            bucket_bytes=recipe.weights.bucket_mib << 20 if channel in ("broadcast", "ipc") else 0,
            buckets_stay=channel == "ipc" or (channel == "broadcast" and recipe.build_schedule().overlaps),
            emulates_at_publish=local and not learner.fp8_emulation and recipe.rollout.quantized_format is not None,
        )


@dataclass(frozen=True, kw_only=True)
class HeldParameters:
    """Numbers in the parameters of one rank."""

    dense: int
    """All but the experts: optimizer state spread over data × context parallel ranks."""
    expert: int
    """In experts: optimizer state spread over the ranks that hold the same experts."""
    matrices: int
    """In the matrices of layers, which FP8 training multiplies in e4m3; counted in `dense` or `expert` as well."""
    largest: int
    """In the largest matrix of a layer, whose gradient exists once more for a moment."""
    outer: int
    """In the embedding or head, if this stage has one: likewise."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


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
    """Of the weight channel, where they are there while a step trains."""
    activations: int
    """Kept for the backward pass, all micro-batches in flight."""
    head: int
    """Final norm, logits and what taking their logarithms and gradient needs; last stage only."""
    working: int
    """Gradients of activations and of one matrix while a layer is differentiated, and the layer computed again. By
    then the head is done with."""
    scoring: int
    """Above static in the log-probability pass."""
    publishing: int
    """Above static while weights are exported."""
    allowance: int

    @property
    def static(self) -> int:
        return self.parameters + self.quantized + self.gradients + self.optimizer

    @property
    def training(self) -> int:
        """Above static in a training step."""
        return self.activations + max(self.head, self.working)

    @property
    def total(self) -> int:
        return self.static + self.buckets + max(self.training, self.scoring, self.publishing) + self.allowance

    def items(self) -> dict[str, int]:
        """What adds up to `total`, by name."""
        busy = "head" if self.head > self.working else "working"
        static = ("parameters", "quantized", "gradients", "optimizer", "buckets")
        parts = {name: getattr(self, name) for name in static if name not in _MAY_BE_NONE or getattr(self, name)}
        transient = {
            self.training: {"activations": self.activations, busy: getattr(self, busy)},
            self.scoring: {"scoring": self.scoring},
            self.publishing: {"publishing": self.publishing},
        }
        return parts | transient[max(transient)] | {"allowance": self.allowance}


def footprints(config: ModelConfig, learner: LearnerSection, work: Workload) -> list[Footprint]:
    """One for each pipeline stage. The layout must have passed `check_layout`."""
    return [_footprint(config, learner, work, stage) for stage in range(learner.pipeline_parallel)]


def worst_footprint(config: ModelConfig, learner: LearnerSection, work: Workload) -> Footprint:
    """That of the stage that needs most."""
    return max(footprints(config, learner, work), key=lambda one: one.total)


def _footprint(config: ModelConfig, learner: LearnerSection, work: Workload, stage: int) -> Footprint:
    layout = Layout.of(learner)
    size = learner.parameter_bytes
    own = held_parameters(config, layout, stage)
    last = stage == layout.pipeline - 1
    head = _head_bytes(config, layout, work, size) if last else 0
    whole = _largest_tensor(config) * size
    # The largest tensor travels alone, in a bucket of its own.
    buckets = 2 * max(whole, work.bucket_bytes) if work.bucket_bytes else 0
    found = dict(
        parameters=own.total * size,
        quantized=own.matrices * _quantized_bytes(learner),
        gradients=own.total * 4,
        optimizer=_optimizer_bytes(own, learner, layout),
        buckets=buckets if work.buckets_stay else 0,
        activations=_activations(config, learner, work, stage),
        head=head,
        working=_working_bytes(config, learner, work, own),
        scoring=max(head, _tokens(layout, work) * size * _widest(config, layout)),
        # A whole tensor is put together from its shards, so that both exist; likewise a bucket.
        publishing=2 * whole
        + (0 if work.buckets_stay else buckets)
        + (own.matrices * size if work.emulates_at_publish else 0),
    )
    plain = Footprint(stage=stage, held=own, allowance=0, **found)
    allowance = work.allowance.runtime_bytes + int(work.allowance.fragmentation * (plain.total - plain.static))
    return Footprint(stage=stage, held=own, allowance=allowance, **found)


def held_parameters(config: ModelConfig, layout: Layout, stage: int) -> HeldParameters:
    """Numbers held by each rank of a pipeline stage, exactly: a shared embedding lives on the first and last stage."""
    first, last = stage == 0, stage == layout.pipeline - 1
    layers = config.num_layers // layout.pipeline
    parts = [(layers, layer_sizes(config))]
    embedding = config.vocabulary_rows(layout.tensor) * config.hidden_size
    outer: dict[str, int] = {"final_norm": config.hidden_size} if last else {}
    if first:
        outer["embedding"] = embedding
    if last and not (first and config.tied_embeddings):
        outer["head"] = embedding
    parts.append((1, outer))
    dense = expert = matrices = largest = 0
    for times, sizes in parts:
        for name, number in sizes.items():
            held = number // _split(name, layout)
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
    return HeldParameters(dense=dense, expert=expert, matrices=matrices, largest=largest, outer=widest)


def _split(name: str, layout: Layout) -> int:
    """How many ranks of a stage share a parameter: norms and the router are on all of them."""
    if ".experts" in name:
        return layout.expert * layout.expert_tensor
    return 1 if "norm" in name or name == "mlp.gate.weight" else layout.tensor


def _quantized_bytes(learner: LearnerSection) -> int:
    if learner.fp8_emulation:
        return learner.parameter_bytes
    return 2 if is_fp8(learner.precision) else 0


def _optimizer_bytes(own: HeldParameters, learner: LearnerSection, layout: Layout) -> int:
    each = 8 if learner.precision == "fp32" else 12
    if not learner.distributed_optimizer:
        return each * own.total
    stage_ranks = layout.tensor * layout.context * layout.data
    dense = each * own.dense / (layout.data * layout.context)
    return math.ceil(dense + each * own.expert * layout.expert * layout.expert_tensor / stage_ranks)


def chunks_in_flight(layout: Layout, stage: int, num_micro_batches: int) -> int:
    """Model chunks whose activations a stage holds at once: 1F1B, or Megatron's interleaved schedule."""
    if layout.pipeline == 1:
        return 1
    if layout.virtual == 1:
        return min(layout.pipeline - stage, num_micro_batches)
    warm_up = (layout.pipeline - stage - 1) * 2 + (layout.virtual - 1) * layout.pipeline
    return min(warm_up + 1, num_micro_batches * layout.virtual)


def _activations(config: ModelConfig, learner: LearnerSection, work: Workload, stage: int) -> int:
    layout = Layout.of(learner)
    layers = config.num_layers // (layout.pipeline * layout.virtual)
    chunks = chunks_in_flight(layout, stage, work.micro_batches.count)
    each = layer_activations(config, learner, work)
    return int(_tokens(layout, work) * layers * chunks * each)


def layer_activations(config: ModelConfig, learner: LearnerSection, work: Workload) -> float:
    """Bytes a position that autograd keeps of one decoder layer, on one rank.

    fused (h hidden, q and k widths of all query and key heads, d of one, f ffn; 2 bytes each in bfloat16):
        4h   input and output of both norms      2q + 2k   rotated queries and keys, values, attention's output
        q + k more, raw, where they are normed   3f        gate, up and their product
    local, where nothing is fused, counted tensor by tensor for rows of one length: norms 6h; 5q + 5k of attention, and
    4d for rotations; 2q + k more with query and key norms; 2q - 2k more with repeated keys; 5f.
    In FP8 training what a matrix is multiplied by is kept in one byte: both norms' outputs, the product, and what is
    sent to experts; attention's output stays in two.
    The selective mode computes the MLP again, and so keeps no f.
    Split over tensor parallel ranks, but the norms' part only with sequence parallelism.
    """
    layout = Layout.of(learner)
    size = learner.parameter_bytes
    if learner.recompute == "full":
        return size * config.hidden_size / _residual_split(layout)
    return _kept(config, learner, work, size)


def _kept(config: ModelConfig, learner: LearnerSection, work: Workload, size: int) -> float:
    layout = Layout.of(learner)
    h, (q, k, _) = config.hidden_size, config.qkv_rows
    if work.kernels == "fused":
        norms, attention, whole = (
            (3 if is_fp8(learner.precision) else 4) * h,
            2 * q + 2 * k + (q + k if config.qk_norm else 0),
            0,
        )
    else:
        norms, attention, whole = 6 * h, 5 * q + 5 * k + (2 * q + k if config.qk_norm else 0), 4 * config.head_dim
        attention += 2 * (q - k) if work.repeated_keys else 0
    own = norms / _residual_split(layout) + attention / layout.tensor + whole
    return size * own + (0 if learner.recompute == "selective" else _mlp_kept(config, learner, work, size))


def _mlp_kept(config: ModelConfig, learner: LearnerSection, work: Workload, size: int) -> float:
    layout = Layout.of(learner)
    multiplied = 0.5 if is_fp8(learner.precision) else 1.0  # of `size`: inputs of products
    copies = 2 + multiplied if work.kernels == "fused" else 5
    if config.experts is None:
        return size * copies * config.ffn_size / layout.tensor
    experts = config.experts
    sent = multiplied * config.hidden_size * layout.expert_tensor
    routed = size * experts.per_token * (sent + copies * experts.ffn_size)
    return (routed + 2 * 4 * experts.count) / _residual_split(layout)  # float32 router logits and weights


def _residual_split(layout: Layout) -> int:
    return layout.tensor if layout.sequence else 1


def _tokens(layout: Layout, work: Workload) -> int:
    return -(-work.micro_batches.tokens // layout.context)


def _head_bytes(config: ModelConfig, layout: Layout, work: Workload, size: int) -> int:
    """Final norm, gathered hidden states, logits (their gradient is written over them), and the larger of: scratch of
    their logarithms, the gradient of the matrix."""
    tokens, width = _tokens(layout, work), config.vocabulary_rows(layout.tensor) // layout.tensor
    matrix = width * config.hidden_size
    hidden = (2 if work.kernels == "fused" else 3) * size * config.hidden_size / _residual_split(layout)
    gathered = size * config.hidden_size if layout.sequence else 0
    converted = 0
    if work.fp32_lm_head and size != 4:  # hidden states and the matrix in float32 beside the stored ones
        gathered += 4 * config.hidden_size
        converted = 4 * matrix
    precise = 4 if work.fp32_lm_head else size
    logits = precise * width
    gradient = matrix * precise + tokens * precise * config.hidden_size
    return int(tokens * (hidden + gathered + logits)) + converted + max(CHUNK_BYTES, gradient)


def _working_bytes(config: ModelConfig, learner: LearnerSection, work: Workload, own: HeldParameters) -> int:
    """While a layer is differentiated: what it computed again, gradients around its MLP and of a matrix; or, where
    other micro-batches are in flight, the gradient of the embedding."""
    layout, tokens = Layout.of(learner), _tokens(Layout.of(learner), work)
    size = learner.parameter_bytes
    layer = tokens * size * _widest(config, layout) + own.largest * size
    if learner.recompute == "full":
        layer += int(tokens * _kept(config, learner, work, size))
    if learner.recompute == "selective":
        layer += int(tokens * _mlp_kept(config, learner, work, size))
    return max(layer, own.outer * size if layout.pipeline > 1 else 0)


def _widest(config: ModelConfig, layout: Layout) -> int:
    """Numbers a position around an MLP: gate and up, and the hidden states before and after, gathered."""
    if config.experts is None:
        inner = 2 * config.ffn_size // layout.tensor
    else:
        inner = config.experts.per_token * (2 * config.hidden_size + 2 * config.experts.ffn_size) // layout.tensor
    return inner + 2 * config.hidden_size


@lru_cache(maxsize=32)
def _largest_tensor(config: ModelConfig) -> int:
    return max(math.prod(size) for size in config.tensors().values())
