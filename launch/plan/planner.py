"""Plan a recipe on some GPUs: does it fit, which learner layouts would, and how long will a step take?

    recipe + config.json ──▶ footprint (learner) · capacity (engines) · roofline ──▶ simulated schedule ──▶ plan

Layouts are ranked by seconds a step under the recipe's schedule, then by the learner's seconds, both by roofline
(launch.plan.costs). Nothing here loads torch, Megatron or SGLang, and no weights are read: config.json is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from launch.build.sizes import active_parameters, layer_sizes, refusals
from launch.plan.costs import (
    DECODE_EFFICIENCY,
    GPUS_PER_NODE,
    HBM_BYTES_S,
    NETWORK_BYTES_S,
    NVLINK_BYTES_S,
    Assumptions,
    Durations,
    Traffic,
    durations,
    rollout_tokens_per_gpu_s,
    simulate,
    steady_seconds_per_step,
)
from launch.plan.footprint import GIB, Allowance, Footprint, MicroBatches, Workload, footprints, worst_footprint
from megatron_bridge.hf.model_config import ModelConfig, read_config
from megatron_bridge.parallel.layout import check_layout, check_longest_sample
from pipeline.config.algorithm import check_gpu_serves
from pipeline.config.loader import SHIPPED, find_recipe, load_recipe
from pipeline.config.recipe import LearnerSection, Recipe, layout_name
from pipeline.errors import LayoutError, ModelError, RecipeError
from pipeline.schedule import Schedule
from rollout_sglang.server.capacity import Capacity, EngineModel, engine_capacity, weight_bytes

STAGED_EXAMPLE = 8
"""mu of the staged schedule that is shown for comparison when the recipe has another."""
LEAST, MOST = 1e-6, 1e9
"""Of a number that a user gives, wider than anything that a machine or a run could have: a plan multiplies and divides
by them, and an infinite one, or one next to nothing, would end it amid its arithmetic."""
MIN_CONTEXT_SHARE = 8192
"""Tokens: context parallelism is tried only while each rank keeps that many of the longest sample."""
VIRTUAL = (1, 2, 4)
Recompute = Literal["none", "selective", "full"]


def gib(num_bytes: float) -> float:
    """Convert bytes to GiB, rounded."""
    return round(num_bytes / GIB, 3)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to run on."""

    gpus: int
    gpu_gib: float

    def __post_init__(self) -> None:
        check_given("--gpus", self.gpus)
        check_given("--gpu-gib", self.gpu_gib)


def check_given(option: str, value: float) -> None:
    """Raises RecipeError for a number outside the bounds, or for none (NaN)."""
    if not LEAST <= value <= MOST:
        raise RecipeError(f"{option} is {value}, expected a number from {LEAST:g} to {MOST:g}; say what there is")


def config_for(recipe_path: Path, model_path: Path) -> dict[str, Any]:
    """config.json of the model: `model_path` as training would find it, or else the sizes that lie beside the recipe or
    the shipped ones, for a model that has yet to be made or fetched. Raises ModelError."""
    places = [model_path]
    if not model_path.is_absolute():
        for folder in (recipe_path.parent, SHIPPED):
            places += [folder / model_path, folder / "models" / model_path.name]
    for place in places:
        if (place / "config.json").is_file():
            return read_config(place)
    tried = " or ".join(str(place / "config.json") for place in {place.resolve(): place for place in places}.values())
    raise ModelError(f"no config.json at {tried}; give a model folder: --set model.path=… (no weights are needed)")


def engine_model(config: ModelConfig) -> EngineModel:
    """What an engine's memory depends on: the projections of the layers are what FP8 rollouts quantize."""
    linear = config.num_layers * sum(size for name, size in layer_sizes(config).items() if name.endswith("proj.weight"))
    return EngineModel(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        linear=linear,
        other=config.num_parameters - linear,
    )


@dataclass(frozen=True, kw_only=True)
class LayoutVerdict:
    """One layout. `seconds` and `footprint` are None when the sizes refuse it; `reason` is empty when it fits."""

    learner: LearnerSection
    footprint: Footprint | None
    reason: str
    step_s: float | None = None
    """Seconds a step under the recipe's schedule."""
    durations: Durations | None = None

    @property
    def fits(self) -> bool:
        return not self.reason


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a layout is judged by."""

    hf_config: Mapping[str, Any]
    config: ModelConfig
    gpu_bytes: float
    samples: int
    context_tokens: int
    work: Callable[[LearnerSection], Workload]
    """Layout → footprint.Workload."""
    durations: Callable[[LearnerSection], Durations]
    step_s: Callable[[Durations], float]

    def judge(self, learner: LearnerSection) -> LayoutVerdict:
        """Fits or not, and why; with the seconds when it does."""
        reason = self._refused(learner)
        if reason:
            return LayoutVerdict(learner=learner, footprint=None, reason=reason)
        footprint = worst_footprint(self.config, learner, self.work(learner))
        reason = shortage(footprint, self.gpu_bytes)
        if reason:
            return LayoutVerdict(learner=learner, footprint=footprint, reason=reason)
        durations = self.durations(learner)
        return LayoutVerdict(
            learner=learner, footprint=footprint, reason="", durations=durations, step_s=self.step_s(durations)
        )

    def _refused(self, learner: LearnerSection) -> str:
        try:
            check_layout(self.hf_config, learner)
            check_longest_sample(learner, self.context_tokens)
        except LayoutError as error:
            return str(error).partition(";")[0]
        if self.samples < learner.data_parallel:
            return f"{self.samples} samples a step are too few for data_parallel {learner.data_parallel}"
        return ""

    def best_recompute(self, learner: LearnerSection) -> LayoutVerdict:
        """The layout with the least recomputation that fits; when none does, the verdict on full recomputation."""
        verdict = self.judge(learner)
        for mode in get_args(Recompute):
            verdict = self.judge(learner.model_copy(update=dict(recompute=mode)))
            if verdict.fits:
                break
        return verdict

    def all(self, learner: LearnerSection, num_gpus: int) -> tuple[list[LayoutVerdict], list[LayoutVerdict]]:
        """(those that fit, fastest first; the others) of every layout that uses exactly `num_gpus`."""
        verdicts = [self.best_recompute(one) for one in self.candidates(learner, num_gpus)]
        fitting = [one for one in verdicts if one.step_s is not None]
        fitting.sort(key=_speed)
        return fitting, [one for one in verdicts if not one.fits]

    def candidates(self, learner: LearnerSection, num_gpus: int) -> Iterator[LearnerSection]:
        """Tensor parallel within a node and always with sequence parallelism; what `learner` says elsewhere stays."""
        for tensor in (size for size in _powers(GPUS_PER_NODE) if num_gpus % size == 0):
            for context in _powers(num_gpus // tensor):
                if num_gpus % (tensor * context) or (context > 1 and self.context_tokens < context * MIN_CONTEXT_SHARE):
                    continue
                left = num_gpus // (tensor * context)
                for stages in range(1, min(left, self.config.num_layers) + 1):
                    if left % stages:
                        continue
                    base = dict(
                        tensor_parallel=tensor,
                        sequence_parallel=tensor > 1,
                        context_parallel=context,
                        pipeline_parallel=stages,
                        data_parallel=left // stages,
                    )
                    for virtual, experts in self._finer(tensor, context, stages, base["data_parallel"]):
                        finer = dict(virtual_pipeline=virtual, expert_parallel=experts, expert_tensor_parallel=1)
                        yield learner.model_copy(update=base | finer)

    def _finer(self, tensor: int, context: int, stages: int, data: int) -> Iterator[tuple[int, int]]:
        for virtual in VIRTUAL if stages > 1 else (1,):
            if virtual > 1 and self.config.num_layers % (stages * virtual):
                continue
            ranks = tensor * context * data
            most = 1 if self.config.experts is None else min(self.config.experts.count, ranks)
            yield from ((virtual, experts) for experts in _powers(most) if ranks % experts == 0)


def _speed(one: LayoutVerdict) -> tuple[float, float]:
    """Sorts by seconds a step. Where the engines set the pace these are equal: then by seconds of the learner."""
    assert one.step_s is not None
    assert one.durations is not None
    return round(one.step_s, 3), one.durations.score_s + one.durations.update_s


def shortage(footprint: Footprint, gpu_bytes: float) -> str:
    """Why a rank does not fit, in one line; empty when it does."""
    over = footprint.total - gpu_bytes
    if over <= 0:
        return ""
    name, size = max(footprint.items().items(), key=lambda item: item[1])
    return (
        f"{over / GIB:.1f} GiB over: needs {footprint.total / GIB:.1f}, the most of it {name} ({size / GIB:.1f}), "
        f"on stage {footprint.stage}"
    )


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]


class Planner:
    """One recipe on one machine."""

    def __init__(
        self, recipe_path: Path, recipe: Recipe, machine: Machine, assumed: Assumptions, sizes: Path | None = None
    ) -> None:
        """`sizes`: a folder whose config.json is read instead of the model's.

        Raises ModelError, LayoutError (the recipe's own layout does not divide the model) or RecipeError.
        """
        self.recipe, self.machine, self.assumed = recipe, machine, assumed
        self.hf_config = read_config(sizes) if sizes else config_for(recipe_path, recipe.model.path)
        check_layout(self.hf_config, recipe.learner)
        self.config = ModelConfig.from_hf(self.hf_config)
        self.engine_model = engine_model(self.config)
        self.capacity: Capacity = engine_capacity(self.engine_model, recipe.rollout, machine.gpu_gib * GIB)
        self.teacher: Capacity | None = self._teacher(recipe_path)
        self.schedule: Schedule = recipe.build_schedule()

    def _teacher(self, recipe_path: Path) -> Capacity | None:
        """Of the teacher's server, where the run starts one, and the sizes of its model are on this machine."""
        section = self.recipe.started_teacher
        if section is None:
            return None
        assert section.path is not None  # else it would not be started
        try:
            model = engine_model(ModelConfig.from_hf(config_for(recipe_path, section.path)))
        except ModelError:
            return None
        served = dict(precision="bf16", tensor_parallel=section.tensor_parallel, extra_args=section.extra_args)
        return engine_capacity(model, self.recipe.rollout.model_copy(update=served), self.machine.gpu_gib * GIB)

    @property
    def engine_gpus(self) -> int:
        return self.recipe.rollout.engines * self.recipe.rollout.tensor_parallel

    @property
    def teacher_gpus(self) -> int:
        section = self.recipe.started_teacher
        return 0 if section is None else section.tensor_parallel

    @property
    def shared(self) -> bool:
        """Whether learner and engines run on the same GPUs."""
        return self.recipe.weights.channel == "ipc"

    @property
    def learner_bytes(self) -> float:
        """Of each GPU: what engines on the same one leave."""
        engine = self.capacity.gpu_bytes + Allowance().runtime_bytes if self.shared else 0.0
        return self.machine.gpu_gib * GIB - engine

    @property
    def engine_model_bytes(self) -> float:
        """All weights as engines hold them: a published version."""
        return weight_bytes(self.engine_model, self.recipe.rollout)

    def traffic(self) -> Traffic:
        return Traffic.of(self.recipe, self.assumed)

    def workload(self, learner: LearnerSection) -> Workload:
        """Micro-batches are as full as they can get: memory is planned for the longest samples."""
        count = self.traffic().num_micro_batches(learner.data_parallel)
        return Workload.of(self.recipe, learner, MicroBatches(tokens=learner.micro_batch_tokens, count=count))

    def durations(self, learner: LearnerSection) -> Durations:
        return durations(self.config, self.engine_model, self.capacity, self.recipe, self.assumed, learner)

    def plan(self) -> dict[str, Any]:
        """Everything, as plain data."""
        learner = self.recipe.learner
        stages = footprints(self.config, learner, self.workload(learner))
        worst = max(stages, key=lambda one: one.total)
        timed = self.durations(learner)
        return dict(
            recipe=self.recipe.run.name,
            model=dict(
                path=str(self.recipe.model.path),
                architecture=self.config.architecture,
                parameters=self.config.num_parameters,
                active_parameters=active_parameters(self.config),
            ),
            layout=layout_name(learner),
            static_gib_per_rank=gib(worst.static),
            total_gib_per_rank=gib(worst.total),
            save_copy_gib_per_rank=gib(max(one.parameters + one.optimizer for one in stages)),
            **self._verdict(worst),
            memory=_memory(worst),
            stages=[_memory(one) for one in stages],
            engines=self._engines(),
            publish=self._publish(timed),
            step=self._step(timed),
            schedules=self._schedules(timed),
            **self._layouts(),
            assumptions=self._assumptions(),
        )

    @property
    def needed_gpus(self) -> int:
        """Of learner, engines and teacher together."""
        both = self.recipe.learner.num_processes, self.engine_gpus
        return (max(both) if self.shared else sum(both)) + self.teacher_gpus

    def misfit(self) -> list[str]:
        """Why the recipe cannot run on the machine; empty when it can."""
        stages = footprints(self.config, self.recipe.learner, self.workload(self.recipe.learner))
        return self._misfit(max(stages, key=lambda one: one.total))

    def _misfit(self, worst: Footprint) -> list[str]:
        needed, reasons = self.needed_gpus, [*map(str, refusals(self.hf_config, self.recipe))]
        if short := shortage(worst, self.learner_bytes):
            reasons.append(f"a learner rank{' beside an engine' if self.shared else ''} is {short}")
        if needed > self.machine.gpus:
            teacher = f" and a teacher × {self.teacher_gpus}" if self.teacher_gpus else ""
            reasons.append(
                f"{self.recipe.learner.num_processes} learner processes and {self.recipe.rollout.engines} engines × "
                f"{self.recipe.rollout.tensor_parallel}{teacher} need {needed} GPUs, {self.machine.gpus} are given"
            )
        if self.teacher is not None and self.teacher.kv_tokens < self.recipe.rollout.context_tokens:
            reasons.append(
                f"the teacher's weights are {gib(self.teacher.weight_bytes):.1f} GiB a GPU, which leaves room for "
                f"{self.teacher.kv_tokens} tokens of keys and values where one sample may need "
                f"{self.recipe.rollout.context_tokens} (rollout.context_tokens); raise distillation.tensor_parallel"
            )
        if self.capacity.kv_tokens < self.recipe.rollout.context_tokens:
            reasons.append(
                f"an engine has room for {self.capacity.kv_tokens} tokens of keys and values, one sample may need "
                f"{self.recipe.rollout.context_tokens} (rollout.context_tokens); raise rollout.tensor_parallel"
            )
        elif (kv_tokens := self._unquantized_kv_tokens()) < self.recipe.rollout.context_tokens:
            reasons.append(
                f"an engine has room for {kv_tokens} tokens of keys and values once the ESS controller has all layers "
                f"served unquantized, one sample may need {self.recipe.rollout.context_tokens} "
                "(rollout.context_tokens); raise rollout.tensor_parallel, or leave out the section controller"
            )
        return reasons

    def _unquantized_kv_tokens(self) -> int:
        """kv_tokens of an engine with the largest quant map that the ESS controller may give it."""
        rollout = self.recipe.rollout
        if self.recipe.controller is not None and rollout.quantized_format is not None and not rollout.urls:
            rollout = rollout.model_copy(update=dict(precision="bf16"))
        return engine_capacity(self.engine_model, rollout, self.machine.gpu_gib * GIB).kv_tokens

    def _verdict(self, worst: Footprint) -> dict[str, Any]:
        """Fits, and if not every reason."""
        reasons, needed = self._misfit(worst), self.needed_gpus
        return dict(
            fits=not reasons,
            fits_memory=worst.total <= self.learner_bytes,
            fits_gpus=needed <= self.machine.gpus,
            reasons=reasons,
            gpus=dict(
                given=self.machine.gpus,
                needed=needed,
                learner=self.recipe.learner.num_processes,
                engines=self.engine_gpus,
                teacher=self.teacher_gpus,
                teacher_judged=self.teacher is not None,
                gib_each=self.machine.gpu_gib,
            ),
        )

    def _engines(self) -> dict[str, Any]:
        rollout, capacity = self.recipe.rollout, self.capacity
        context = self.assumed.mean_prompt_tokens + self.assumed.mean_response_tokens
        return dict(
            engines=rollout.engines,
            tensor_parallel=rollout.tensor_parallel,
            precision=rollout.precision,
            mem_fraction=capacity.mem_fraction,
            weights_gib_per_gpu=gib(capacity.weight_bytes),
            kv_bytes_per_token_and_gpu=capacity.kv_bytes_per_token,
            kv_tokens_per_engine=capacity.kv_tokens,
            mean_samples_per_engine=int(capacity.kv_tokens / context),
            longest_samples_per_engine=capacity.kv_tokens // rollout.context_tokens,
        )

    def _publish(self, timed: Durations) -> dict[str, Any]:
        weights = self.recipe.weights
        gigabytes, replicas = round(self.engine_model_bytes / 1e9, 3), {}
        if weights.channel == "delta":
            gigabytes, replicas = round(self.assumed.delta_share * gigabytes, 3), dict(replica_gigabytes=2 * gigabytes)
        return dict(channel=weights.channel, gigabytes=gigabytes, seconds=round(timed.publish_s, 3), **replicas)

    def _step(self, timed: Durations) -> dict[str, Any]:
        played = simulate(replace(self.schedule, steps=max(16, 4 * self.schedule.batches_in_flight)), timed)
        busy, waits, total = played.engines_busy_s, played.learner_waited_s, played.total_s
        return dict(
            schedule=str(self.schedule),
            seconds=round(steady_seconds_per_step(self.schedule, timed), 2),
            **{name: round(seconds, 2) for name, seconds in asdict(timed).items()},
            engines_busy=round(busy / total, 3) if total else 0.0,
            learner_waits=round(waits / total, 3) if total else 0.0,
        )

    def _schedules(self, timed: Durations) -> list[dict[str, Any]]:
        """The recipe's schedule beside the others, same durations."""
        others = [
            Schedule(kind="sync", steps=1),
            Schedule(kind="async", lag=1, steps=1),
            Schedule(kind="staged", updates_per_stage=STAGED_EXAMPLE, steps=STAGED_EXAMPLE),
        ]
        names = {str(one): one for one in [*others, self.schedule]}

        def largest_lag(schedule: Schedule) -> int:
            steps = 4 * schedule.batches_in_flight
            bound = replace(schedule, steps=steps)
            return max(batch - bound.required_version(batch) for batch in range(steps))

        return [
            dict(
                schedule=name,
                seconds=round(steady_seconds_per_step(one, timed), 2),
                largest_lag=largest_lag(one),
                recipe=name == str(self.schedule),
            )
            for name, one in names.items()
        ]

    def learner_share(self) -> tuple[int, str]:
        """(GPUs left for the learner, how they are counted)."""
        gpus, teacher = self.machine.gpus, self.teacher_gpus
        beside = f" and {teacher} for its teacher" if teacher else ""
        if self.shared and gpus > teacher:
            return gpus - teacher, f"shared with the recipe's engines{beside and f', less {teacher} for its teacher'}"
        left = gpus - self.engine_gpus - teacher
        if left > 0:
            return left, f"{gpus} GPUs less {self.engine_gpus} for the recipe's engines{beside}"
        half = max(1, gpus // 2)
        return half, f"half of {gpus} GPUs: the recipe's engines alone would take {self.engine_gpus}{beside}"

    def _layouts(self) -> dict[str, Any]:
        share, counted = self.learner_share()
        search = Search(
            hf_config=self.hf_config,
            config=self.config,
            gpu_bytes=self.learner_bytes,
            samples=self.recipe.rollout.prompts_per_batch * self.recipe.rollout.group_size,
            context_tokens=self.recipe.rollout.context_tokens,
            work=self.workload,
            durations=self.durations,
            step_s=lambda timed: steady_seconds_per_step(self.schedule, timed),
        )
        own = self.recipe.learner

        def is_recipes(learner: LearnerSection) -> bool:
            return learner.model_copy(update=dict(recompute=own.recompute)) == own

        fitting, others = search.all(own, share)
        return dict(
            layouts_for=dict(gpus=share, counted=counted),
            layouts=[_row(one) | dict(recipe=is_recipes(one.learner)) for one in fitting],
            misfits=[_row(one) for one in others],
        )

    def _assumptions(self) -> dict[str, Any]:
        given = {one.name: getattr(self.assumed, one.name) for one in fields(self.assumed)}
        rate = rollout_tokens_per_gpu_s(self.config, self.capacity, self.recipe, self.assumed)
        return given | dict(
            rollout_tokens_per_gpu_s=round(rate, 1),
            nvlink_gb_s=NVLINK_BYTES_S / 1e9,
            network_gb_s=NETWORK_BYTES_S / 1e9,
            hbm_gb_s=HBM_BYTES_S / 1e9,
            decode_efficiency=DECODE_EFFICIENCY,
            gpus_per_node=GPUS_PER_NODE,
            runtime_gib_per_rank=Allowance().runtime_bytes / GIB,
            fragmentation=Allowance().fragmentation,
        )


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


def _row(one: LayoutVerdict) -> dict[str, Any]:
    row: dict[str, Any] = dict(layout=layout_name(one.learner))
    if one.footprint is not None:
        row |= dict(
            static_gib_per_rank=gib(one.footprint.static),
            activations_gib=gib(one.footprint.activations),
            total_gib=gib(one.footprint.total),
        )
    if one.durations is None or one.step_s is None:
        return row | dict(reason=one.reason)
    learner_s = one.durations.score_s + one.durations.update_s
    return row | dict(step_s=round(one.step_s, 2), learner_s=round(learner_s, 2))


def make_plan(
    recipe_path: Path, overrides: list[str], machine: Machine, chosen: dict[str, float | None]
) -> dict[str, Any]:
    """Read the recipe and plan it; `chosen` holds Assumptions by name, None for the default."""
    recipe_path = find_recipe(recipe_path)
    recipe = load_recipe(recipe_path, overrides)
    check_gpu_serves(recipe.rollout.quantized_format)
    return Planner(recipe_path, recipe, machine, default_assumptions(recipe, chosen)).plan()


def default_assumptions(recipe: Recipe, chosen: Mapping[str, float | None]) -> Assumptions:
    """Those that were chosen, by name, and the defaults for the others. Raises RecipeError."""
    rollout = recipe.rollout
    for name, value in chosen.items():
        if value is not None:
            check_given(f"--{name.replace('_', '-')}", value)
    guesses: dict[str, Any] = dict(
        mean_response_tokens=rollout.max_new_tokens / 2,
        mean_prompt_tokens=(rollout.context_tokens - rollout.max_new_tokens) / 2,
    )
    return Assumptions(**(guesses | {name: value for name, value in chosen.items() if value is not None}))
