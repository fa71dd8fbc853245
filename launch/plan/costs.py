"""Estimate the seconds of each phase by roofline, and play the two loops with them. Loads no torch.

    learner    matrix work ÷ (peak · MFU) · (1 + pipeline bubble) + communication that nothing hides
    rollout    tokens ÷ (engine GPUs · tokens a second of each)
    publish    bytes ÷ bandwidth of the channel

Every speed is an assumption, printed with the plan and to be replaced by what was measured on the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import simpy

from launch.build.components import scoring_passes
from launch.build.sizes import active_parameters
from launch.plan.footprint import HeldParameters, held_parameters
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.parallel.layout import Layout
from pipeline.config.recipe import LearnerSection, Recipe
from pipeline.schedule import Schedule
from rollout_sglang.server.capacity import Capacity, EngineModel, weight_bytes

GPUS_PER_NODE = 8
NVLINK_BYTES_S = 300e9
"""Reached by collectives between GPUs of a node; NVLink 4 is 450 GB/s each way on paper."""
NETWORK_BYTES_S = 40e9
"""Reached by each GPU between nodes, with a 400 Gbit/s port of its own."""
HBM_BYTES_S = 3.35e12
"""H100 SXM on paper."""
DECODE_EFFICIENCY = 0.2
"""Of HBM bandwidth, over a whole batch with its long tail. Set so that Qwen3-32B's published one-step-off run (NeMo RL
v0.4: 2048 samples of 3,206 tokens on 32 H100 in 215 s a step) comes out; a fit to one number, not a law."""


HOST_COPY_BYTES_S = 20e9
"""Reached between a GPU and pinned host memory over PCIe 5; 64 GB/s each way on paper."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the caller may replace."""

    mean_response_tokens: float
    mean_prompt_tokens: float
    mfu: float = 0.4
    """Of peak, in the learner's matrix work, without bubbles and communication."""
    peak_tflops: float = 989.0
    """Dense bfloat16 of one GPU: H100 SXM."""
    rollout_tokens_per_gpu_s: float | None = None
    """Response tokens a second of one engine GPU; None: by roofline."""
    disk_gb_s: float = 2.0
    """Shared file system, for writing and for each engine's reading."""
    delta_share: float = 0.05
    """Bytes of what one version changes ÷ all of its bytes: docs/precision.md has measured ones."""
    local_gb_s: float = 4.0
    """What an engine reads of its own host's files."""
    broadcast_gb_s: float = 3.6
    """Learner to engines, gathering included: Qwen2.5-32B in bfloat16 over NCCL took verl 18 s."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Samples of a step and how they are cut up."""

    samples: int
    prompt_tokens: float
    response_tokens: float
    micro_batch_tokens: int

    @staticmethod
    def of(recipe: Recipe, assumed: Assumptions) -> Traffic:
        return Traffic(
            samples=recipe.rollout.prompts_per_batch * recipe.rollout.group_size,
            prompt_tokens=assumed.mean_prompt_tokens,
            response_tokens=assumed.mean_response_tokens,
            micro_batch_tokens=recipe.learner.micro_batch_tokens,
        )

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens

    def num_micro_batches(self, data_parallel: int) -> int:
        """Of one data parallel rank: rows are packed without padding."""
        return max(1, math.ceil(self.samples * self.sample_tokens / (data_parallel * self.micro_batch_tokens)))


@dataclass(frozen=True, kw_only=True)
class LearnerTime:
    """Seconds of one step."""

    compute_s: float
    """Forward and backward, and what is computed again."""
    bubble_s: float
    tensor_s: float
    pipeline_s: float
    context_s: float
    expert_s: float
    data_s: float
    """Not hidden behind the backward pass."""
    score_s: float
    """A log-probability pass over the batch, all of it."""

    @property
    def update_s(self) -> float:
        own = (self.compute_s, self.bubble_s, self.tensor_s, self.pipeline_s, self.context_s, self.expert_s)
        return sum(own) + self.data_s


def mlp_share(config: ModelConfig) -> float:
    """Of the forward pass, the part that selective recomputation does twice."""
    ffn = config.ffn_size if config.experts is None else config.experts.ffn_size * config.experts.per_token
    return config.num_layers * 3 * config.hidden_size * ffn / active_parameters(config)


def forward_flops(config: ModelConfig, context: float) -> float:
    """FLOPs of one position in a sequence of `context` tokens: 2 for each parameter, and 4·q·context/2 of causal
    attention."""
    attention = 2.0 * config.num_layers * config.num_heads * config.head_dim * context
    return 2.0 * active_parameters(config) + attention


def learner_time(config: ModelConfig, learner: LearnerSection, traffic: Traffic, assumed: Assumptions) -> LearnerTime:
    """Of the busiest stage, for all optimizer steps of a batch; padding and uneven loads are left out.

    Each optimizer step fills and drains the pipeline and reduces gradients anew.
    """
    layout = Layout.of(learner)
    tokens = traffic.samples / layout.data * traffic.sample_tokens
    ranks = layout.tensor * layout.context * layout.pipeline
    speed = assumed.peak_tflops * 1e12 * assumed.mfu
    forward = tokens * forward_flops(config, traffic.sample_tokens) / ranks / speed
    passes = 3.0 + dict(none=0.0, selective=mlp_share(config), full=1.0)[learner.recompute]
    updates, count = learner.updates_per_batch, traffic.num_micro_batches(layout.data)
    sent = _sent_forward(config, learner, layout, tokens)
    compute = passes * forward
    return LearnerTime(
        compute_s=compute,
        bubble_s=bubble_share(layout, math.ceil(count / updates)) * compute,
        data_s=updates * _gradient_reduction(config, learner, layout, hidden_s=2 / 3 * compute / updates),
        score_s=forward * (1 + bubble_share(layout, count)) + sum(sent.values()),
        **{f"{name}_s": seconds * (2.0 if name == "pipeline" else passes - 1.0) for name, seconds in sent.items()},
    )


def bubble_share(layout: Layout, num_micro_batches: int) -> float:
    """Idle over busy time of a pipeline: (PP - 1) / (VPP · micro-batches)."""
    return (layout.pipeline - 1) / (layout.virtual * num_micro_batches)


def _sent_forward(config: ModelConfig, learner: LearnerSection, layout: Layout, tokens: float) -> dict[str, float]:
    """Seconds of communication of a forward pass over `tokens` positions, by dimension; backward sends as much."""
    size = learner.parameter_bytes
    own = tokens / layout.context
    layers = config.num_layers / layout.pipeline
    row = own * size * config.hidden_size
    # An all-reduce (or all-gather and reduce-scatter) after attention and one after a dense MLP.
    reductions = 2 if config.experts is None else 1
    tensor = reductions * layers * 2 * row * _others(layout.tensor) / _link(layout.tensor)
    keys_values = own * size * 2 * config.num_kv_heads * config.head_dim / layout.tensor
    context = layers * keys_values * (layout.context - 1) / _link(layout.tensor * layout.context)
    split = layout.tensor if layout.sequence else 1
    stages = layout.virtual if layout.pipeline > 1 else 0
    expert = 0.0
    if config.experts is not None:  # dispatch and combine
        span = layout.expert * layout.expert_tensor
        expert = layers * 2 * row / split * config.experts.per_token * _others(layout.expert) / _link(span)
    return dict(tensor=tensor, context=context, expert=expert, pipeline=stages * row / split / NETWORK_BYTES_S)


def _link(span: int) -> float:
    """Bytes a second between ranks of a group that spans `span` adjacent ranks."""
    return NVLINK_BYTES_S if span <= GPUS_PER_NODE else NETWORK_BYTES_S


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _gradient_reduction(config: ModelConfig, learner: LearnerSection, layout: Layout, *, hidden_s: float) -> float:
    """Seconds in which float32 gradients go to their owners and parameters come back, less those that are hidden."""
    own = max((held_parameters(config, layout, stage) for stage in (0, layout.pipeline - 1)), key=lambda one: one.total)
    spread = layout.expert * layout.expert_tensor
    stage_ranks = layout.tensor * layout.context * layout.data
    seconds = _reduced(own, learner, layout.data * layout.context, stage_ranks // spread) / NETWORK_BYTES_S
    return max(0.0, seconds - hidden_s) if learner.overlap_grad_reduce else seconds


def _reduced(own: HeldParameters, learner: LearnerSection, dense_ranks: int, expert_ranks: int) -> float:
    """Bytes that a rank sends: scatter 4 and gather back the parameters, or all-reduce 4 twice."""
    each = 4 + learner.parameter_bytes if learner.distributed_optimizer else 8
    return each * (own.dense * _others(dense_ranks) + own.expert * _others(expert_ranks))


def rollout_tokens_per_gpu_s(config: ModelConfig, capacity: Capacity, recipe: Recipe, assumed: Assumptions) -> float:
    """Response tokens a second of one engine GPU: as given, or memory traffic of decoding at assumed efficiency.

    A decoding step reads the weights (of experts, those that some sample takes) and the keys and values of every
    sample under way, half of its response there on average.
    """
    if assumed.rollout_tokens_per_gpu_s is not None:
        return assumed.rollout_tokens_per_gpu_s
    rollout = recipe.rollout
    context = assumed.mean_prompt_tokens + assumed.mean_response_tokens / 2
    samples = min(rollout.prompts_per_batch, rollout.concurrent_prompts) * rollout.group_size
    running = max(1.0, min(samples / rollout.engines, capacity.kv_tokens / context))
    weights = capacity.weight_bytes
    if config.experts is not None:
        weights *= 1 - (1 - config.experts.per_token / config.experts.count) ** running
    read = (weights + running * context * capacity.kv_bytes_per_token) / (HBM_BYTES_S * DECODE_EFFICIENCY)
    compute = (
        2 * active_parameters(config) * running / rollout.tensor_parallel / (assumed.peak_tflops * 1e12 * assumed.mfu)
    )
    return running / max(read, compute) / rollout.tensor_parallel


def publish_seconds(recipe: Recipe, num_bytes: float, assumed: Assumptions) -> float:
    """Seconds of a publish. disk: the folder is written once, then read by all engines at once. delta: so is what
    changed, and each engine loads its replica. broadcast: one stream goes to all of them. ipc is assumed to be as fast
    as broadcast, since most of either is gathering the weights."""
    by_disk = 2 * num_bytes / (assumed.disk_gb_s * 1e9)
    if recipe.weights.channel == "disk":
        return by_disk
    if recipe.weights.channel == "delta":
        return assumed.delta_share * by_disk + num_bytes / (assumed.local_gb_s * 1e9)
    return num_bytes / (assumed.broadcast_gb_s * 1e9)


def take_seconds(recipe: Recipe, num_bytes: float, assumed: Assumptions) -> float:
    """Of `publish_seconds`, those until the learner may change its weights. disk: the folder is written. Else they are
    copied into host memory, by all pipeline stages at once."""
    if recipe.weights.channel == "disk":
        return num_bytes / (assumed.disk_gb_s * 1e9)
    copied_s = num_bytes / recipe.learner.pipeline_parallel / HOST_COPY_BYTES_S
    return min(copied_s, publish_seconds(recipe, num_bytes, assumed))


def durations(
    config: ModelConfig,
    model: EngineModel,
    capacity: Capacity,
    recipe: Recipe,
    assumed: Assumptions,
    learner: LearnerSection | None = None,
) -> Durations:
    """Phases of the recipe, or of it with another learner layout."""
    traffic = Traffic.of(recipe, assumed)
    time = learner_time(config, learner or recipe.learner, traffic, assumed)
    rate = rollout_tokens_per_gpu_s(config, capacity, recipe, assumed)
    gpus = recipe.rollout.engines * recipe.rollout.tensor_parallel
    moved = weight_bytes(model, recipe.rollout)
    return Durations(
        rollout_s=traffic.samples * traffic.response_tokens / (rate * gpus),
        score_s=time.score_s * scoring_passes(recipe),
        update_s=time.update_s,
        publish_s=publish_seconds(recipe, moved, assumed),
        take_s=take_seconds(recipe, moved, assumed),
    )


_PUBLISH_PRIORITY = -1
"""Before every batch: batch b asks for the engines with priority b."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of the phases of a step."""

    rollout_s: float
    """All samples of one batch, by all engines."""
    score_s: float
    """Log-probabilities before the update; 0 when the objective needs none."""
    update_s: float
    publish_s: float
    """Export, transfer and load; in sync, engines are paused and the learner waits."""
    take_s: float = 0.0
    """Of these, the first ones: the weights are taken from the learner, which waits under every schedule. Engines
    generate meanwhile, if they have a batch."""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not 0.0 <= seconds < float("inf"):
                raise ValueError(f"{name} is {seconds}, expected seconds of 0 or more")
        if self.take_s > self.publish_s:
            raise ValueError(f"take_s is {self.take_s}, expected at most publish_s, {self.publish_s}")


@dataclass(kw_only=True)
class Simulated:
    """What happened; lists are by batch = step."""

    schedule: Schedule
    started_versions: list[int] = field(default_factory=list)
    """Version that the engines served when the batch was started."""
    trained_s: list[float] = field(default_factory=list)
    """When the step was trained, and nothing of it published."""
    finished_s: list[float] = field(default_factory=list)
    """When the learner was done with the step, and with what it waits for of the step's publish."""
    engines_busy_s: float = 0.0
    learner_waited_s: float = 0.0
    """For batches."""
    learner_publishing_s: float = 0.0
    """For weights to be taken, and for publishes to end."""
    num_publishes: int = 0

    @property
    def lags(self) -> list[int]:
        """For each batch, by how many versions its oldest tokens are behind the weights that they train."""
        return [batch - version for batch, version in enumerate(self.started_versions)]

    @property
    def total_s(self) -> float:
        return self.finished_s[-1]

    @property
    def seconds_per_step(self) -> float:
        """In the second half of the run, over whole stages."""
        stage = self.schedule.updates_per_stage if self.schedule.kind == "staged" else 1
        steps = self.schedule.steps
        first = steps // 2 // stage * stage
        last = steps // stage * stage
        if last <= first:
            first, last = 0, steps
        if first == 0:
            return self.finished_s[last - 1] / last
        # From step to like step: only the last publish of a run is waited for under every schedule.
        return (self.trained_s[last - 1] - self.trained_s[first - 1]) / (last - first)


def simulate(schedule: Schedule, durations: Durations) -> Simulated:
    """Play the whole run."""
    return _Loops(schedule, durations).play()


def steady_seconds_per_step(schedule: Schedule, durations: Durations, *, stages: int = 6) -> float:
    """Seconds a step when the run is long enough, whatever the schedule's own number of steps."""
    stage = max(8, 2 * schedule.batches_in_flight)
    if schedule.kind == "staged":
        stage = schedule.updates_per_stage
    return simulate(replace(schedule, steps=stages * stage), durations).seconds_per_step


class _Loops:
    def __init__(self, schedule: Schedule, durations: Durations) -> None:
        self._schedule, self._durations = schedule, durations
        self._world = simpy.Environment()
        self._engines = simpy.PreemptiveResource(self._world)
        self._under_way = simpy.Container(self._world, schedule.batches_in_flight, schedule.batches_in_flight)
        self._committed = [self._world.event() for _ in range(schedule.steps)]
        self._published = 0
        self._delivered = self._world.event().succeed()
        """That the publish under way has ended."""
        self._next_version = self._world.event()
        self._result = Simulated(schedule=schedule)

    def play(self) -> Simulated:
        self._world.process(self._collect())
        self._world.run(self._world.process(self._learn()))
        return self._result

    def _collect(self) -> Generator[Any, Any, None]:
        for batch in range(self._schedule.steps):
            yield self._under_way.get(1)
            self._world.process(self._produce(batch))

    def _produce(self, batch: int) -> Generator[Any, Any, None]:
        while self._published < self._schedule.required_version(batch):
            yield self._next_version
        self._result.started_versions.append(self._published)
        yield from self._generate(batch)
        if batch > 0:
            yield self._committed[batch - 1]
        self._committed[batch].succeed()
        yield self._under_way.put(1)

    def _generate(self, batch: int) -> Generator[Any, Any, None]:
        """Hold the engines for rollout_s in all. A publish interrupts it, and it goes on afterwards."""
        left = self._durations.rollout_s
        while True:
            with self._engines.request(priority=batch) as turn:
                begin: float | None = None
                try:
                    yield turn
                    begin = self._world.now
                    yield self._world.timeout(left)
                    self._result.engines_busy_s += left
                    return
                except simpy.Interrupt:
                    # A turn can be taken away in the very moment in which it is given: then nothing was done.
                    done = 0.0 if begin is None else self._world.now - begin
                    self._result.engines_busy_s += done
                    left -= done
                    if left <= 0.0:  # interrupted at the very end
                        return

    def _learn(self) -> Generator[Any, Any, None]:
        for step in range(self._schedule.steps):
            if not self._committed[step].triggered:
                yield from self._publishing(self._delivered)
            asked = self._world.now
            yield self._committed[step]
            self._result.learner_waited_s += self._world.now - asked
            yield self._world.timeout(self._durations.score_s + self._durations.update_s)
            self._result.trained_s.append(self._world.now)
            if self._schedule.publishes_after(step):
                yield from self._publishing(self._delivered)
                yield from self._publishing(self._world.process(self._begin(step + 1)))
            self._result.finished_s.append(self._world.now)

    def _publishing(self, event: simpy.Event) -> Generator[Any, Any, None]:
        asked = self._world.now
        yield event
        self._result.learner_publishing_s += self._world.now - asked

    def _begin(self, version: int) -> Generator[Any, Any, None]:
        """Until the learner goes on."""
        if self._schedule.overlaps and version < self._schedule.steps:
            yield self._world.timeout(self._durations.take_s)
            self._delivered = self._world.process(self._deliver(version, self._durations.take_s))
        else:
            yield self._world.process(self._deliver(version, 0.0))

    def _deliver(self, version: int, taken_s: float) -> Generator[Any, Any, None]:
        with self._engines.request(priority=_PUBLISH_PRIORITY) as turn:
            yield turn
            yield self._world.timeout(self._durations.publish_s - taken_s)
        self._result.num_publishes += 1
        self._published = version
        self._next_version.succeed()
        self._next_version = self._world.event()
