"""Estimate each phase's seconds by roofline, and simulate the loops of collector and learner. Loads no torch.

    learner    matrix work ÷ (peak · MFU) · (1 + pipeline bubble) + exposed communication
    rollout    tokens ÷ (engine GPUs · tokens per second of each)
    publish    bytes ÷ bandwidth of the channel

Every speed is an assumption, printed with the plan, to be replaced by measurements on the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import simpy

from launch.build.components import scoring_passes
from launch.build.sizes import active_parameters
from launch.plan.footprint import held_parameters, recomputed
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.parallel.layout import Layout, layers_of_chunks
from pipeline.config.recipe import LearnerSection, Recipe
from pipeline.schedule import Schedule
from rollout_sglang.server.capacity import Capacity, EngineModel, weight_bytes

GPUS_PER_NODE = 8
NVLINK_BYTES_S = 300e9
"""Bandwidth that collectives reach within a node; NVLink 4 is 450 GB/s each way on paper."""
NETWORK_BYTES_S = 40e9
"""Bandwidth that each GPU reaches between nodes, with its 400 Gbit/s port."""
HBM_BYTES_S = 3.35e12
"""HBM bandwidth of an H100 SXM on paper."""
DECODE_EFFICIENCY = 0.2
"""Share of HBM bandwidth that decoding reaches, over a whole batch with its long tail. Fitted to one published run:
Qwen3-32B, one step off (NeMo RL v0.4: 2048 samples of 3,206 tokens on 32 H100 in 215 s a step)."""


PIPELINE_PADDING = 0.1, 0.035
"""With pipeline stages all micro-batches of a rank are as long as its longest. Padding is this share of (mean length ÷
micro_batch_tokens), at most the second number. Fitted to 2048 samples of lognormal lengths: 3.1 % where a micro-batch
has room for 2 of mean length, 2.7 % for 4, 1.1 % for 8, .2 % for 17."""
HOST_COPY_BYTES_S = 20e9
"""Bandwidth reached between a GPU and pinned host memory over PCIe 5; 64 GB/s each way on paper."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The speeds, lengths and shares that a plan assumes."""

    mean_response_tokens: float
    """Sampled tokens of an attempt: an answer, or an episode."""
    mean_prompt_tokens: float
    mean_observed_tokens: float = 0.0
    """Tokens that tools, environments and users say between the turns of an episode."""
    mfu: float = 0.4
    """Share of the peak that the learner's matrix work reaches, without bubbles and communication."""
    peak_tflops: float = 989.0
    """Dense bfloat16 peak of one GPU: H100 SXM."""
    rollout_tokens_per_gpu_s: float | None = None
    """Response tokens per second of one engine GPU; None: by roofline."""
    disk_gb_s: float = 2.0
    """Bandwidth of the shared file system, for writing and for each engine's reads."""
    delta_share: float = 0.05
    """Share of the published bytes that one version changes; docs/precision.md has measurements."""
    local_gb_s: float = 4.0
    """Bandwidth at which an engine reads files of its host."""
    broadcast_gb_s: float = 3.6
    """Bandwidth from learner to engines, gathering included: Qwen2.5-32B in bfloat16 over NCCL took verl 18 s."""

    @property
    def mean_tokens(self) -> float:
        """Tokens of an attempt, as engines hold them and the learner reads them: a row."""
        return self.mean_prompt_tokens + self.mean_response_tokens + self.mean_observed_tokens


@dataclass(frozen=True, kw_only=True)
class LearnerTime:
    """The learner's seconds for one batch."""

    compute_s: float
    """Forward and backward, with recomputation."""
    bubble_s: float
    tensor_s: float
    pipeline_s: float
    context_s: float
    expert_s: float
    data_s: float
    """Gradient communication that the backward pass does not hide."""
    score_s: float
    """One log-probability pass over the batch, with bubble and communication."""


def forward_flops(config: ModelConfig, context: float) -> float:
    """Return the FLOPs per position of `context` tokens: 2 per parameter, and 4·q·context/2 of causal attention."""
    attention = 2.0 * config.num_layers * config.num_heads * config.head_dim * context
    return 2.0 * active_parameters(config) + attention


def num_micro_batches(recipe: Recipe, learner: LearnerSection, assumed: Assumptions) -> int:
    """Count the micro-batches of one data parallel rank in a step: rows are packed without padding."""
    samples = recipe.rollout.prompts_per_batch * recipe.rollout.group_size
    tokens = samples * assumed.mean_tokens
    return max(1, math.ceil(tokens / (learner.data_parallel * learner.micro_batch_tokens)))


def learner_time(config: ModelConfig, recipe: Recipe, learner: LearnerSection, assumed: Assumptions) -> LearnerTime:
    """Estimate the busiest stage's seconds for all optimizer steps of a batch, with the layout of `learner`. Each
    optimizer step fills and drains the pipeline and reduces gradients. Uneven loads are left out, as is padding
    without pipeline stages."""
    layout, size = Layout.of(learner), learner.parameter_bytes
    length = assumed.mean_tokens
    tokens = recipe.rollout.prompts_per_batch * recipe.rollout.group_size / layout.data * length
    if layout.pipeline > 1:
        share, most = PIPELINE_PADDING
        tokens *= 1 + min(most, share * length / learner.micro_batch_tokens)
    ranks = layout.tensor * layout.context * layout.pipeline
    layers = max(map(sum, layers_of_chunks(config.num_layers, learner)))
    fullest = layers * layout.pipeline / config.num_layers  # 1 where stages are even
    forward = fullest * tokens * forward_flops(config, length) / ranks / (assumed.peak_tflops * 1e12 * assumed.mfu)
    experts = config.experts
    # Selective recomputation does the MLPs' part of a forward pass twice.
    ffn = config.ffn_size if experts is None else experts.ffn_size * experts.per_token
    mlp_share = config.num_layers * 3 * config.hidden_size * ffn / active_parameters(config)
    passes = 3.0 + dict(none=0.0, selective=mlp_share, full=1.0)[recomputed(learner)]
    compute = passes * forward
    if recipe.model.fp32_lm_head and size != 4:
        # Both parts of the logits' gradient are multiplied (megatron_bridge.model.fp32_head): 2 forward passes more.
        compute += 2.0 * forward * 2.0 * config.vocab_size * config.hidden_size / forward_flops(config, length)

    # Communication of a forward pass; the backward pass sends as much.
    here = tokens / layout.context
    row = here * size * config.hidden_size
    # An all-reduce (or all-gather and reduce-scatter) after attention and one after a dense MLP.
    reductions = 2 if experts is None else 1
    tensor = reductions * layers * 2 * row * _others(layout.tensor) / _link(layout.tensor)
    keys_values = here * size * 2 * config.num_kv_heads * config.head_dim / layout.tensor
    context = layers * keys_values * (layout.context - 1) / _link(layout.tensor * layout.context)
    split = layout.tensor if layout.sequence else 1
    expert = 0.0
    if experts is not None:  # dispatch and combine
        span = layout.expert * layout.expert_tensor
        expert = layers * 2 * row / split * experts.per_token * _others(layout.expert) / _link(span)
    pipeline = (layout.virtual if layout.pipeline > 1 else 0) * row / split / NETWORK_BYTES_S

    # Float32 gradients go to their owners (4 bytes) and parameters come back, or gradients are all-reduced (4 twice).
    held = max(
        (held_parameters(config, learner, stage) for stage in (0, layout.pipeline - 1)), key=lambda one: one.total
    )
    sharing = layout.tensor * layout.context * layout.data // (layout.expert * layout.expert_tensor)
    sent = (4 + size if learner.distributed_optimizer else 8) * (
        held.dense * _others(layout.data * layout.context) + held.expert * _others(sharing)
    )
    updates, count = learner.updates_per_batch, num_micro_batches(recipe, learner, assumed)
    reduced = sent / NETWORK_BYTES_S
    if learner.overlap_grad_reduce:  # behind the backward pass
        reduced = max(0.0, reduced - 2 / 3 * compute / updates)
    return LearnerTime(
        compute_s=compute,
        bubble_s=bubble_share(layout, math.ceil(count / updates)) * compute,
        tensor_s=tensor * (passes - 1.0),
        pipeline_s=pipeline * 2.0,
        context_s=context * (passes - 1.0),
        expert_s=expert * (passes - 1.0),
        data_s=updates * reduced,
        score_s=forward * (1 + bubble_share(layout, count)) + (tensor + context + expert + pipeline),
    )


def bubble_share(layout: Layout, num_micro_batches: int) -> float:
    """Return idle ÷ busy time of a pipeline: (PP - 1) / (VPP · micro-batches)."""
    return (layout.pipeline - 1) / (layout.virtual * num_micro_batches)


def _link(span: int) -> float:
    """Return the bytes per second between ranks of a group that spans `span` adjacent ranks."""
    return NVLINK_BYTES_S if span <= GPUS_PER_NODE else NETWORK_BYTES_S


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def rollout_tokens_per_gpu_s(config: ModelConfig, capacity: Capacity, recipe: Recipe, assumed: Assumptions) -> float:
    """Return the response tokens per second of one engine GPU: as assumed, or by memory traffic. A decoding step reads
    the weights (of the experts, those in use) and the keys and values of running samples, on average half complete."""
    if assumed.rollout_tokens_per_gpu_s is not None:
        return assumed.rollout_tokens_per_gpu_s
    rollout = recipe.rollout
    context = (assumed.mean_prompt_tokens + assumed.mean_tokens) / 2
    running = max(1.0, min(rollout.samples_under_way / rollout.engines, capacity.kv_tokens / context))
    weights = capacity.weight_bytes
    if config.experts is not None:
        weights *= 1 - (1 - config.experts.per_token / config.experts.count) ** running
    read = (weights + running * context * capacity.kv_bytes_per_token) / (HBM_BYTES_S * DECODE_EFFICIENCY)
    speed = assumed.peak_tflops * 1e12 * assumed.mfu
    compute = 2 * active_parameters(config) * running / rollout.tensor_parallel / speed
    return running / max(read, compute) / rollout.tensor_parallel


def durations(
    config: ModelConfig,
    model: EngineModel,
    capacity: Capacity,
    recipe: Recipe,
    assumed: Assumptions,
    learner: LearnerSection,
) -> Durations:
    """Estimate the phases of the recipe, with the layout of `learner`.

    A disk publish writes the folder once, then all engines read it at once. delta moves the changes likewise, and each
    engine loads its replica. broadcast takes as long as gathering does, or as the busiest sender's network port if it
    has several engines; ipc is assumed to take as long as gathering. The learner waits for the folder or, by other
    channels, until all stages have copied the weights to the host.
    """
    rollout, channel = recipe.rollout, recipe.weights.channel
    time = learner_time(config, recipe, learner, assumed)
    update = time.compute_s + time.bubble_s + time.tensor_s + time.pipeline_s + time.context_s + time.expert_s
    moved = weight_bytes(model, rollout)
    by_disk = 2 * moved / (assumed.disk_gb_s * 1e9)
    publish = moved / (assumed.broadcast_gb_s * 1e9)
    if channel == "broadcast":
        publish = max(publish, sent_by_one(recipe, moved) / NETWORK_BYTES_S)
    if channel == "disk":
        publish = by_disk
    if channel == "delta":
        publish = assumed.delta_share * by_disk + moved / (assumed.local_gb_s * 1e9)
    copied = min(moved / recipe.learner.pipeline_parallel / HOST_COPY_BYTES_S, publish)
    response_tokens = rollout.prompts_per_batch * rollout.group_size * assumed.mean_response_tokens
    rate = rollout_tokens_per_gpu_s(config, capacity, recipe, assumed)
    return Durations(
        rollout_s=response_tokens / (rate * (rollout.engines * rollout.tensor_parallel)),
        score_s=time.score_s * scoring_passes(recipe),
        update_s=update + time.data_s,
        publish_s=publish,
        take_s=moved / (assumed.disk_gb_s * 1e9) if channel == "disk" else copied,
    )


def sent_by_one(recipe: Recipe, published: float) -> float:
    """Return the bytes that the busiest rank sends when `published` bytes are broadcast: its stage's share to each of
    its engines, which have a process group each. 0 for the other channels."""
    learner, engines = recipe.learner, recipe.rollout.engines
    senders = min(engines, learner.num_processes // learner.pipeline_parallel)
    sent = published / learner.pipeline_parallel * math.ceil(engines / senders)
    return sent if recipe.weights.channel == "broadcast" else 0.0


_PUBLISH_PRIORITY = -1
"""Ahead of all batches: batch b requests the engines with priority b."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    rollout_s: float
    """All samples of one batch, on all engines."""
    score_s: float
    """Log-probabilities before the update; 0 when the objective needs none."""
    update_s: float
    publish_s: float
    """Export, transfer and load. In a sync run, engines are paused and the learner waits."""
    take_s: float = 0.0
    """The part of publish_s in which the weights are copied and the learner always waits. Engines go on generating."""


@dataclass(kw_only=True)
class Simulated:
    """The events of a simulation; lists are indexed by batch, which is the step."""

    started_versions: list[int] = field(default_factory=list)
    """The version that engines served when each batch started."""
    trained_s: list[float] = field(default_factory=list)
    """The time when each step was trained, before its publish."""
    finished_s: list[float] = field(default_factory=list)
    """The time when the learner finished each step, with its wait for the publish."""
    engines_busy_s: float = 0.0
    learner_waited_s: float = 0.0
    """Seconds of waiting for batches."""
    num_publishes: int = 0


def steady_seconds_per_step(schedule: Schedule, durations: Durations) -> float:
    """Return the seconds per step, over the second half of six stages since a run's last publish is waited for."""
    stage = schedule.updates_per_stage if schedule.kind == "staged" else max(8, 2 * schedule.batches_in_flight)
    trained = simulate(replace(schedule, steps=6 * stage), durations).trained_s
    return (trained[-1] - trained[3 * stage - 1]) / (3 * stage)


def simulate(schedule: Schedule, durations: Durations) -> Simulated:
    """Simulate a whole run of collector and learner, which meet in committed batches and versions."""
    world = simpy.Environment()
    engines = simpy.PreemptiveResource(world)
    under_way = simpy.Container(world, schedule.batches_in_flight, schedule.batches_in_flight)
    committed = [world.event() for _ in range(schedule.steps)]
    next_version = world.event()
    delivered = world.event().succeed()  # the running publish has ended
    result = Simulated()
    published = 0

    def collect() -> Generator[Any, Any, None]:
        for batch in range(schedule.steps):
            yield under_way.get(1)
            world.process(produce(batch))

    def produce(batch: int) -> Generator[Any, Any, None]:
        """Hold the engines for rollout_s in all; a publish interrupts and resumes this."""
        while published < schedule.required_version(batch):
            yield next_version
        result.started_versions.append(published)
        left, generating = durations.rollout_s, True
        while generating:
            with engines.request(priority=batch) as turn:
                begin: float | None = None
                try:
                    yield turn
                    begin = world.now
                    yield world.timeout(left)
                    result.engines_busy_s += left
                    generating = False
                except simpy.Interrupt:
                    # A turn can be taken away at the moment it is granted: then nothing was done.
                    done = 0.0 if begin is None else world.now - begin
                    result.engines_busy_s += done
                    left -= done
                    generating = left > 0.0  # else interrupted at the very end
        if batch > 0:
            yield committed[batch - 1]
        committed[batch].succeed()
        yield under_way.put(1)

    def deliver(version: int, taken_s: float) -> Generator[Any, Any, None]:
        nonlocal published, next_version
        with engines.request(priority=_PUBLISH_PRIORITY) as turn:
            yield turn
            yield world.timeout(durations.publish_s - taken_s)
        result.num_publishes += 1
        published = version
        next_version.succeed()
        next_version = world.event()

    def publish(version: int) -> Generator[Any, Any, None]:
        """Deliver a version, and return when the learner may go on."""
        nonlocal delivered
        if schedule.overlaps and version < schedule.steps:
            yield world.timeout(durations.take_s)
            delivered = world.process(deliver(version, durations.take_s))
        else:
            yield world.process(deliver(version, 0.0))

    def learn() -> Generator[Any, Any, None]:
        for step in range(schedule.steps):
            if not committed[step].triggered:
                yield delivered
            asked = world.now
            yield committed[step]
            result.learner_waited_s += world.now - asked
            yield world.timeout(durations.score_s + durations.update_s)
            result.trained_s.append(world.now)
            if schedule.publishes_after(step):
                yield delivered
                yield world.process(publish(step + 1))
            result.finished_s.append(world.now)

    world.process(collect())
    world.run(world.process(learn()))
    return result
