"""`evenkeel plan`: will the recipe fit these GPUs, which layouts would, and how long will a step take?

    recipe + config.json ──▶ footprint (learner) · capacity (engines) · roofline ──▶ simulated schedule ──▶ plan

Nothing here loads torch, Megatron or SGLang, and no weights are read: config.json is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from launch.plan.costs import (
    DECODE_EFFICIENCY,
    GPUS_PER_NODE,
    HBM_BYTES_S,
    NETWORK_BYTES_S,
    NVLINK_BYTES_S,
    Assumptions,
    Traffic,
    active_parameters,
    durations,
    rollout_tokens_per_gpu_s,
)
from launch.plan.fitting import refusals
from launch.plan.footprint import GIB, Allowance, Footprint, MicroBatches, Workload, footprints
from launch.plan.given import check_given
from launch.plan.layouts import Search, Verdict, shortage
from launch.plan.models import config_for, engine_model
from launch.plan.simulation import Durations, Simulated, simulate, steady_seconds_per_step
from megatron_bridge.hf.model_config import ModelConfig, read_config
from megatron_bridge.parallel.layout_checks import check_layout
from pipeline.config.formats import check_gpu_serves
from pipeline.config.layout_names import layout_name
from pipeline.config.loader import find_recipe, load_recipe
from pipeline.config.recipe import LearnerSection, Recipe
from pipeline.errors import ModelError
from pipeline.schedule import Schedule
from rollout_sglang.server.capacity import Capacity, engine_capacity, weight_bytes

STAGED_EXAMPLE = 8
"""mu of the staged schedule that is shown for comparison when the recipe has another."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to run on."""

    gpus: int
    gpu_gib: float

    def __post_init__(self) -> None:
        check_given("--gpus", self.gpus)
        check_given("--gpu-gib", self.gpu_gib)


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
            model=self._model(),
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

    def _model(self) -> dict[str, Any]:
        config = self.config
        return dict(
            path=str(self.recipe.model.path),
            architecture=config.architecture,
            parameters=config.num_parameters,
            active_parameters=active_parameters(config),
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
        return dict(
            schedule=str(self.schedule),
            seconds=round(steady_seconds_per_step(self.schedule, timed), 2),
            **{name: round(seconds, 2) for name, seconds in asdict(timed).items()},
            **_shares(played),
        )

    def _schedules(self, timed: Durations) -> list[dict[str, Any]]:
        """The recipe's schedule beside the others, same durations."""
        others = [
            Schedule(kind="sync", steps=1),
            Schedule(kind="async", lag=1, steps=1),
            Schedule(kind="staged", updates_per_stage=STAGED_EXAMPLE, steps=STAGED_EXAMPLE),
        ]
        names = {str(one): one for one in [*others, self.schedule]}
        return [
            dict(
                schedule=name,
                seconds=round(steady_seconds_per_step(one, timed), 2),
                largest_lag=_largest_lag(one),
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
        fitting, others = search.all(self.recipe.learner, share)
        return dict(
            layouts_for=dict(gpus=share, counted=counted),
            layouts=[_row(one) | dict(recipe=self._is_recipes(one.learner)) for one in fitting],
            misfits=[_row(one) for one in others],
        )

    def _is_recipes(self, learner: LearnerSection) -> bool:
        """Whatever is computed again."""
        own = self.recipe.learner
        return learner.model_copy(update=dict(recompute=own.recompute)) == own

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


def gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)


def _largest_lag(schedule: Schedule) -> int:
    steps = 4 * schedule.batches_in_flight
    bound = replace(schedule, steps=steps)
    return max(batch - bound.required_version(batch) for batch in range(steps))


def _shares(played: Simulated) -> dict[str, float]:
    """How busy both sides are over the simulated run."""
    return dict(
        engines_busy=round(played.engines_busy_s / played.total_s, 3) if played.total_s else 0.0,
        learner_waits=round(played.learner_waited_s / played.total_s, 3) if played.total_s else 0.0,
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


def _row(one: Verdict) -> dict[str, Any]:
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
