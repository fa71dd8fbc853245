"""Plan a recipe on some GPUs: whether it fits, which learner layouts would fit, and how long a step takes.

    recipe + config.json ──▶ footprint (learner) · capacity (engines) · roofline ──▶ simulated schedule ──▶ plan

Layouts are ranked by seconds per step under the recipe's schedule, then by the learner's seconds (launch.plan.costs).
Planning loads no torch, Megatron or SGLang, and reads no weights: config.json is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launch.build.engines import check_nccl
from launch.build.sizes import active_parameters, layer_sizes, refusals
from launch.plan.costs import (
    DECODE_EFFICIENCY,
    GPUS_PER_NODE,
    HBM_BYTES_S,
    NETWORK_BYTES_S,
    NVLINK_BYTES_S,
    Assumptions,
    Durations,
    durations,
    num_micro_batches,
    rollout_tokens_per_gpu_s,
    sent_by_one,
    simulate,
    steady_seconds_per_step,
)
from launch.plan.disk import disk_use
from launch.plan.footprint import (
    FRAGMENTATION,
    GIB,
    RUNTIME_BYTES,
    Footprint,
    Workload,
    footprints,
    worst_footprint,
)
from megatron_bridge.hf.model_config import ModelConfig, read_config
from megatron_bridge.parallel.layout import check_layout, check_longest_sample
from pipeline.config.algorithm import check_gpu_serves
from pipeline.config.loader import SHIPPED, find_recipe, load_recipe
from pipeline.config.recipe import LearnerSection, Recipe, layout_name
from pipeline.errors import LayoutError, ModelError, RecipeError
from pipeline.schedule import Schedule
from rollout_sglang.server.capacity import Capacity, EngineModel, engine_capacity, weight_bytes

STAGED_EXAMPLE = 8
"""µ of the staged schedule that is shown for comparison."""
LEAST, MOST = 1e-6, 1e9
"""Bounds of a user's numbers, wider than any machine or run: with an infinite or tiny number, arithmetic would fail."""
MIN_CONTEXT_SHARE = 8192
"""Tokens of the longest sample that each rank must keep for context parallelism to be tried."""
VIRTUAL = (1, 2, 4)
# No formula gives these: assumed, not measured.
PROCESS_BYTES = 6 * GIB
"""Host memory of each process with a GPU: Python, pinned memory of CUDA and NCCL, unused ends of our pinned blocks."""
CONTEXT_BYTES = int(0.4 * GIB)
"""GPU memory of the context with which a rank of an engine opens memory on the GPU of another rank (ipc)."""
SHM_BYTES_PER_PROCESS = 2 * GIB
"""Buffers of NCCL and SGLang between the processes of a host."""


def gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)


def check_given(numbers: Mapping[str, float | None]) -> None:
    """Raise RecipeError for a number outside the bounds or NaN; the names are option names."""
    for name, value in numbers.items():
        if value is not None and not LEAST <= value <= MOST:
            option = f"--{name.replace('_', '-')}"
            raise RecipeError(f"{option} is {value}, expected a number from {LEAST:g} to {MOST:g}; say what there is")


def config_for(recipe_path: Path, model_path: Path) -> dict[str, Any]:
    """Read config.json at `model_path`, or else beside the recipe or the shipped recipes. Raises ModelError."""
    places = [model_path]
    if not model_path.is_absolute():
        for folder in (recipe_path.parent, SHIPPED):
            places += [folder / model_path, folder / "models" / model_path.name]
    for place in places:
        if (place / "config.json").is_file():
            return read_config(place)
    tried = " or ".join(str(place / "config.json") for place in dict.fromkeys(places))
    raise ModelError(f"no config.json at {tried}; give a model folder: --set model.path=… (no weights are needed)")


def engine_model(config: ModelConfig) -> EngineModel:
    """Return the sizes that an engine's memory depends on: FP8 rollouts quantize the projections of the layers."""
    linear = config.num_layers * sum(size for name, size in layer_sizes(config).items() if name.endswith("proj.weight"))
    return EngineModel(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        linear=linear,
        other=config.num_parameters - linear,
    )


def shortage(footprint: Footprint, gpu_bytes: float) -> str:
    """Return in one line why a rank does not fit, or "" if it does."""
    over = footprint.total - gpu_bytes
    if over <= 0:
        return ""
    name, size = max(footprint.items().items(), key=lambda item: item[1])
    return (
        f"{over / GIB:.1f} GiB over: needs {footprint.total / GIB:.1f}, the most of it {name} ({size / GIB:.1f}), "
        f"on stage {footprint.stage}"
    )


class Planner:
    def __init__(
        self,
        recipe_path: Path,
        recipe: Recipe,
        assumed: Assumptions,
        *,
        gpus: int,
        gpu_gib: float,
        host_gib: float | None = None,
        sizes: Path | None = None,
    ) -> None:
        """`host_gib` is the memory of a learner's host (None: enough). `sizes` is a folder whose config.json replaces
        the model's. Raises ModelError, LayoutError or RecipeError."""
        check_given(dict(gpus=gpus, gpu_gib=gpu_gib, host_gib=host_gib))
        self.host_gib = host_gib
        self.recipe, self.assumed, self.gpus, self.gpu_gib = recipe, assumed, gpus, gpu_gib
        self.hf_config = read_config(sizes) if sizes else config_for(recipe_path, recipe.model.path)
        check_layout(self.hf_config, recipe.learner)
        self.config = ModelConfig.from_hf(self.hf_config)
        self.schedule: Schedule = recipe.build_schedule()
        rollout, served = recipe.rollout, recipe.started_teacher
        self.engine_model = engine_model(self.config)
        self.engine_model_bytes = weight_bytes(self.engine_model, rollout)
        """Bytes of a published version: all weights as engines hold them."""
        self.capacity: Capacity = engine_capacity(self.engine_model, rollout, gpu_gib * GIB)
        self.teacher: Capacity | None = None
        """The teacher's server, where the run starts one and its model's sizes are known."""
        if served is not None:
            assert served.path is not None  # else it would not be started
            changes = dict(precision="bf16", tensor_parallel=served.tensor_parallel, extra_args=served.extra_args)
            with suppress(ModelError):
                teacher = engine_model(ModelConfig.from_hf(config_for(recipe_path, served.path)))
                self.teacher = engine_capacity(teacher, rollout.model_copy(update=changes), gpu_gib * GIB)
        self.teacher_gpus = 0 if served is None else served.tensor_parallel
        self.engine_gpus = rollout.engines * rollout.tensor_parallel
        self.shared = recipe.weights.channel == "ipc"
        both = recipe.learner.num_processes, self.engine_gpus
        self.needed_gpus = (max(both) if self.shared else sum(both)) + self.teacher_gpus
        self.takes_turns = rollout.colocated
        opened = (rollout.tensor_parallel - 1) * CONTEXT_BYTES  # a bucket lies on one GPU (weight_sync.ipc_transport)
        processes = RUNTIME_BYTES + opened
        awake = self.capacity.gpu_bytes + processes if self.shared else 0.0
        self.learner_bytes = gpu_gib * GIB - (processes if self.takes_turns else awake)
        """Memory of each GPU that engines on the same GPU leave a learner that trains: an engine that sleeps leaves all
        but its process's."""
        self.resting_bytes = gpu_gib * GIB - awake
        """Memory that they leave a learner that waits for a batch."""

    def workload(self, learner: LearnerSection) -> Workload:
        """Describe the learner's work on GPUs. Micro-batches are full: memory is planned for the longest samples."""
        recipe, channel = self.recipe, self.recipe.weights.channel
        # Emulation and float32 run in Megatron's own layers, on a GPU too (megatron_bridge.model.build).
        local = learner.fp8_emulation or learner.precision == "fp32"
        return Workload(
            tokens=learner.micro_batch_tokens,
            count=num_micro_batches(recipe, learner, self.assumed),
            kernels="local" if local else "fused",
            repeated_keys=learner.precision == "fp32",
            fp32_lm_head=recipe.model.fp32_lm_head,
            bucket_bytes=recipe.weights.bucket_mib << 20 if channel in ("broadcast", "ipc") else 0,
            buckets_stay=channel == "ipc" or (channel == "broadcast" and self.schedule.overlaps),
            emulates_at_publish=local and not learner.fp8_emulation and recipe.rollout.quantized_format is not None,
        )

    def learner_host(self, ranks: int) -> dict[str, int]:
        """Count the bytes of host memory, by use, that `ranks` learner ranks of one host need together."""
        learner, recipe = self.recipe.learner, self.recipe
        stages = footprints(self.config, learner, self.workload(learner))
        # The reference and older versions, each with memory for one more parameter of every shape.
        copies = (recipe.reference is not None) + recipe.num_kept_versions
        layers = self.config.num_layers // learner.pipeline_parallel
        spare = max(one.held.total // layers + one.held.outer for one in stages) * learner.parameter_bytes
        # A version, once for the ranks of a host: those of as many stages as the host has. Without a stream, the whole.
        stages_here, channel = 1.0, recipe.weights.channel
        if channel in ("broadcast", "ipc"):
            spread = learner.num_processes // learner.pipeline_parallel
            stages_here = min(1.0, -(-ranks // spread) / learner.pipeline_parallel)
        return dict(
            checkpoint=ranks * max(one.parameters + one.optimizer for one in stages),
            older_versions=ranks * copies * (max(one.parameters for one in stages) + spare),
            resting_optimizer=ranks * max(one.optimizer for one in stages) if self.takes_turns else 0,
            published_version=int(self.engine_model_bytes * stages_here),
            processes=ranks * (PROCESS_BYTES + SHM_BYTES_PER_PROCESS),
        )

    def durations(self, learner: LearnerSection) -> Durations:
        return durations(self.config, self.engine_model, self.capacity, self.recipe, self.assumed, learner)

    def plan(self) -> dict[str, Any]:
        recipe, capacity, assumed = self.recipe, self.capacity, self.assumed
        learner, rollout, channel = recipe.learner, recipe.rollout, recipe.weights.channel
        stages = footprints(self.config, learner, self.workload(learner))
        worst = max(stages, key=lambda one: one.total)
        reasons = self.misfit()
        ranks = min(GPUS_PER_NODE, learner.num_processes)
        host = self.learner_host(ranks)
        timed = self.durations(learner)
        gigabytes, replicas = round(self.engine_model_bytes / 1e9, 3), {}
        if channel == "delta":
            gigabytes, replicas = round(assumed.delta_share * gigabytes, 3), dict(replica_gigabytes=2 * gigabytes)
        played = simulate(replace(self.schedule, steps=max(16, 4 * self.schedule.batches_in_flight)), timed)
        busy, waits, total = played.engines_busy_s, played.learner_waited_s, played.finished_s[-1]
        rate = rollout_tokens_per_gpu_s(self.config, capacity, recipe, assumed)
        return dict(
            recipe=recipe.run.name,
            model=dict(
                path=str(recipe.model.path),
                architecture=self.config.architecture,
                parameters=self.config.num_parameters,
                active_parameters=active_parameters(self.config),
            ),
            layout=layout_name(learner),
            static_gib_per_rank=gib(worst.static),
            total_gib_per_rank=gib(worst.total),
            host=dict(ranks=ranks, given_gib=self.host_gib, **{f"{use}_gib": gib(size) for use, size in host.items()}),
            fits=not reasons,
            fits_memory=worst.total <= self.learner_bytes,
            fits_gpus=self.needed_gpus <= self.gpus,
            reasons=reasons,
            gpus=dict(
                given=self.gpus,
                needed=self.needed_gpus,
                learner=learner.num_processes,
                engines=self.engine_gpus,
                teacher=self.teacher_gpus,
                teacher_judged=self.teacher is not None,
                gib_each=self.gpu_gib,
            ),
            memory=_memory(worst),
            stages=[_memory(one) for one in stages],
            engines=dict(
                engines=rollout.engines,
                tensor_parallel=rollout.tensor_parallel,
                precision=rollout.precision,
                mem_fraction=capacity.mem_fraction,
                weights_gib_per_gpu=gib(capacity.weight_bytes),
                cuda_graphs_gib_per_gpu=gib(capacity.graph_bytes),
                kv_bytes_per_token_and_gpu=capacity.kv_bytes_per_token,
                kv_tokens_per_engine=capacity.kv_tokens,
                mean_samples_per_engine=int(capacity.kv_tokens / assumed.mean_tokens),
                longest_samples_per_engine=capacity.kv_tokens // rollout.context_tokens,
            ),
            episodes=self._episodes(),
            publish=dict(
                channel=channel,
                gigabytes=gigabytes,
                seconds=round(timed.publish_s, 3),
                sender_gigabytes=round(sent_by_one(recipe, self.engine_model_bytes) / 1e9, 3),
                **replicas,
            ),
            disk=disk_use(self.config, recipe, assumed, self.engine_model_bytes),
            step=dict(
                schedule=str(self.schedule),
                seconds=round(steady_seconds_per_step(self.schedule, timed), 2),
                **{name: round(seconds, 2) for name, seconds in asdict(timed).items()},
                engines_busy=round(busy / total, 3) if total else 0.0,
                learner_waits=round(waits / total, 3) if total else 0.0,
            ),
            schedules=self._schedules(timed),
            **self._layouts(),
            assumptions=asdict(assumed)
            | dict(
                rollout_tokens_per_gpu_s=round(rate, 1),
                nvlink_gb_s=NVLINK_BYTES_S / 1e9,
                network_gb_s=NETWORK_BYTES_S / 1e9,
                hbm_gb_s=HBM_BYTES_S / 1e9,
                decode_efficiency=DECODE_EFFICIENCY,
                gpus_per_node=GPUS_PER_NODE,
                runtime_gib_per_rank=RUNTIME_BYTES / GIB,
                fragmentation=FRAGMENTATION,
            ),
        )

    def _episodes(self) -> dict[str, Any] | None:
        """Return the sizes of the recipe's episodes; None where it samples single answers."""
        episode, rollout, assumed = self.recipe.episode, self.recipe.rollout, self.assumed
        if episode is None:
            return None
        return dict(
            turns=episode.turns,
            longest_tokens=rollout.context_tokens,
            mean_tokens=assumed.mean_tokens,
            under_way_per_engine=math.ceil(rollout.samples_under_way / rollout.engines),
        )

    def misfit(self) -> list[str]:
        """Return the reasons why the recipe cannot run on the GPUs."""
        learner, rollout, needed = self.recipe.learner, self.recipe.rollout, self.needed_gpus
        reasons = [*map(str, refusals(self.hf_config, self.recipe))]
        worst = worst_footprint(self.config, learner, self.workload(learner))
        if short := shortage(worst, self.learner_bytes):
            beside = " beside an engine that sleeps" if self.takes_turns else " beside an engine" if self.shared else ""
            reasons.append(f"a learner rank{beside} is {short}")
        resting = worst.parameters + worst.quantized + worst.buckets + RUNTIME_BYTES
        if self.takes_turns and resting > self.resting_bytes:
            reasons.append(
                f"a resting learner rank beside an engine is {(resting - self.resting_bytes) / GIB:.1f} GiB over: "
                f"parameters and buckets stay, {resting / GIB:.1f} with its process; lower --mem-fraction-static or "
                "--max-total-tokens (rollout.extra_args)"
            )
        host = self.learner_host(min(GPUS_PER_NODE, learner.num_processes))
        if self.host_gib is not None and sum(host.values()) > self.host_gib * GIB:
            use, size = max(host.items(), key=lambda item: item[1])
            reasons.append(
                f"a learner's host needs {gib(sum(host.values())):.0f} GiB of its own memory, the most of it for "
                f"{use.replace('_', ' ')} ({gib(size):.0f}), and has {self.host_gib:g}; spread the ranks over more "
                "hosts, or raise learner.data_parallel (each rank then holds less of the optimizer)"
            )
        if needed > self.gpus:
            teacher = f" and a teacher × {self.teacher_gpus}" if self.teacher_gpus else ""
            reasons.append(
                f"{learner.num_processes} learner processes and {rollout.engines} engines × "
                f"{rollout.tensor_parallel}{teacher} need {needed} GPUs, {self.gpus} are given"
            )
        if self.teacher is not None and self.teacher.kv_tokens < rollout.context_tokens:
            reasons.append(
                f"the teacher's weights are {gib(self.teacher.weight_bytes):.1f} GiB a GPU, which leaves room for "
                f"{self.teacher.kv_tokens} tokens of keys and values where one sample may need "
                f"{rollout.context_tokens} (rollout.context_tokens); raise distillation.tensor_parallel"
            )
        # The ESS controller may at most give engines a quant map that quantizes nothing.
        unquantized = rollout
        if self.recipe.controller is not None and rollout.quantized_format is not None and not rollout.urls:
            unquantized = rollout.model_copy(update=dict(precision="bf16"))
        kv_tokens = engine_capacity(self.engine_model, unquantized, self.gpu_gib * GIB).kv_tokens
        if self.capacity.kv_tokens < rollout.context_tokens:
            reasons.append(
                f"an engine has room for {self.capacity.kv_tokens} tokens of keys and values, one sample may need "
                f"{rollout.context_tokens} (rollout.context_tokens); raise rollout.tensor_parallel"
            )
        elif kv_tokens < rollout.context_tokens:
            reasons.append(
                f"an engine has room for {kv_tokens} tokens of keys and values once the ESS controller has all layers "
                f"served unquantized, one sample may need {rollout.context_tokens} "
                "(rollout.context_tokens); raise rollout.tensor_parallel, or leave out the section controller"
            )
        return reasons

    def _schedules(self, timed: Durations) -> list[dict[str, Any]]:
        """Compare the recipe's schedule with others, at the same durations."""
        others = [
            Schedule(kind="sync", steps=1),
            Schedule(kind="async", lag=1, steps=1),
            Schedule(kind="staged", updates_per_stage=STAGED_EXAMPLE, steps=STAGED_EXAMPLE),
        ]
        rows = []
        for name, schedule in {str(one): one for one in [*others, self.schedule]}.items():
            steps = 4 * schedule.batches_in_flight
            bound = replace(schedule, steps=steps)
            rows.append(
                dict(
                    schedule=name,
                    seconds=round(steady_seconds_per_step(schedule, timed), 2),
                    largest_lag=max(batch - bound.required_version(batch) for batch in range(steps)),
                    recipe=name == str(self.schedule),
                )
            )
        return rows

    def _layouts(self) -> dict[str, Any]:
        """Rate every layout of the learner on the GPUs left for it, each with the least recomputation that fits: those
        that fit, fastest first, and the misfits. Where the engines set the pace, the learner's seconds decide."""
        gpus, teacher, engines = self.gpus, self.teacher_gpus, self.engine_gpus
        beside = f" and {teacher} for its teacher" if teacher else ""
        share, counted = gpus - engines - teacher, f"{gpus} GPUs less {engines} for the recipe's engines{beside}"
        if self.shared and gpus > teacher:
            less = beside and f", less {teacher} for its teacher"
            share, counted = gpus - teacher, f"shared with the recipe's engines{less}"
        elif share <= 0:
            share = max(1, gpus // 2)
            counted = f"half of {gpus} GPUs: the recipe's engines alone would take {engines}{beside}"
        own, fitting, misfits = self.recipe.learner, [], []
        for candidate in self._candidates(share):
            for mode in ("none", "selective", "full"):
                learner = candidate.model_copy(update=dict(recompute=mode))
                row: dict[str, Any] = dict(layout=layout_name(learner))
                reason, timed = self._refused(learner), None
                if not reason:
                    footprint = worst_footprint(self.config, learner, self.workload(learner))
                    row |= dict(
                        static_gib_per_rank=gib(footprint.static),
                        activations_gib=gib(footprint.activations),
                        total_gib=gib(footprint.total),
                    )
                    reason = shortage(footprint, self.learner_bytes)
                if not reason:
                    timed = self.durations(learner)
                    break
            if timed is None:
                misfits.append(row | dict(reason=reason))
                continue
            step_s, learner_s = steady_seconds_per_step(self.schedule, timed), timed.score_s + timed.update_s
            row |= dict(step_s=round(step_s, 2), learner_s=round(learner_s, 2))
            row["recipe"] = learner.model_copy(update=dict(recompute=own.recompute)) == own
            fitting.append((round(step_s, 3), learner_s, row))
        fitting.sort(key=lambda one: one[:2])
        return dict(
            layouts_for=dict(gpus=share, counted=counted), layouts=[row for _, _, row in fitting], misfits=misfits
        )

    def _refused(self, learner: LearnerSection) -> str:
        try:
            check_layout(self.hf_config, learner)
            check_longest_sample(learner, self.recipe.rollout.context_tokens)
        except (LayoutError, RecipeError) as error:
            return str(error).partition(";")[0]
        samples = self.recipe.rollout.prompts_per_batch * self.recipe.rollout.group_size
        if samples < learner.data_parallel:
            return f"{samples} samples a step are too few for data_parallel {learner.data_parallel}"
        return ""

    def _candidates(self, num_gpus: int) -> Iterator[LearnerSection]:
        """Yield the layouts of exactly `num_gpus`, with tensor (and sequence) parallelism within a node only."""
        longest, layers, experts = self.recipe.rollout.context_tokens, self.config.num_layers, self.config.experts
        uneven = bool(self.recipe.learner.megatron.transformer)  # then `_refused` judges
        for tensor in (size for size in _powers(GPUS_PER_NODE) if num_gpus % size == 0):
            for context in _powers(num_gpus // tensor):
                if num_gpus % (tensor * context) or (context > 1 and longest < context * MIN_CONTEXT_SHARE):
                    continue
                left = num_gpus // (tensor * context)
                for stages in (size for size in range(1, min(left, layers) + 1) if left % size == 0):
                    ranks = tensor * context * (left // stages)
                    for virtual in VIRTUAL if stages > 1 else (1,):
                        if virtual > 1 and layers % (stages * virtual) and not uneven:
                            continue
                        for spread in _powers(1 if experts is None else min(experts.count, ranks)):
                            if ranks % spread == 0:
                                sizes = dict(
                                    tensor_parallel=tensor,
                                    sequence_parallel=tensor > 1,
                                    context_parallel=context,
                                    pipeline_parallel=stages,
                                    data_parallel=left // stages,
                                    virtual_pipeline=virtual,
                                    expert_parallel=spread,
                                    expert_tensor_parallel=1,
                                )
                                yield self.recipe.learner.model_copy(update=sizes)


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]


def _memory(one: Footprint) -> dict[str, Any]:
    return dict(
        stage=one.stage,
        parameters_per_rank=one.held.total,
        static_gib=gib(one.static),
        **{f"{name}_gib": gib(size) for name, size in one.items().items()},
        scoring_peak_gib=gib(one.static + one.buckets + one.scoring + one.allowance),
        publishing_peak_gib=gib(one.static + one.buckets + one.publishing + one.allowance),
        total_gib=gib(one.total),
    )


def make_plan(
    recipe_path: Path,
    overrides: list[str],
    chosen: Mapping[str, float | None],
    *,
    gpus: int,
    gpu_gib: float,
    host_gib: float | None = None,
) -> dict[str, Any]:
    """Read a recipe and plan it; `chosen` holds Assumptions by name, None for the default."""
    recipe_path = find_recipe(recipe_path)
    recipe = load_recipe(recipe_path, overrides)
    check_gpu_serves(recipe.rollout.quantized_format)
    check_nccl(recipe)
    assumed = default_assumptions(recipe, chosen)
    return Planner(recipe_path, recipe, assumed, gpus=gpus, gpu_gib=gpu_gib, host_gib=host_gib).plan()


def default_assumptions(recipe: Recipe, chosen: Mapping[str, float | None]) -> Assumptions:
    """Build Assumptions from `chosen`, with defaults for the others: half of the most. Raises RecipeError."""
    check_given(chosen)
    rollout, episode, sampled = recipe.rollout, recipe.episode, float(recipe.most_sampled_tokens)
    if episode is not None:  # every second message is the policy's
        sampled = min(sampled, episode.turns * rollout.max_new_tokens, rollout.context_tokens / 2)
    given, observed = (rollout.context_tokens - sampled) / 2, 0.0
    if episode is not None:  # the others are the prompt and what is read after each turn but the last
        given /= episode.turns
        observed = (episode.turns - 1) * min(given, episode.observation_bytes / 2)  # a token has a byte at least
    guesses: dict[str, Any] = dict(
        mean_response_tokens=sampled / 2, mean_prompt_tokens=given, mean_observed_tokens=observed
    )
    return Assumptions(**(guesses | {name: value for name, value in chosen.items() if value is not None}))
