"""Build the ESS controller of a run, and measure quantization for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launch.build.api_key import read_api_key
from launch.build.components import build_quant_map, quant_map_of
from launch.build.engines import shares_gpus
from pipeline.config.recipe import Recipe
from pipeline.config.sections import AsyncSchedule, StagedSchedule
from pipeline.control.files import ControlFiles
from pipeline.control.step_controller import StepController
from pipeline.data.batch import Batch
from pipeline.data.event_log import EventLog
from pipeline.data.files import remove_leftovers
from pipeline.data.membership import Member
from pipeline.data.quant_maps import NumberedMaps, digest_of
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import NonFiniteError
from precision.controller.policy import Ladder
from precision.formats.quant_map import QuantMapFile
from precision.ratios import MAX_LOG_RATIO, loss_of, token_ess
from precision.torch_on_use import Tensor
from rollout_sglang.server.liveness import Presence, look_with

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner
    from megatron_bridge.step.micro_batches import TokenRows
    from megatron_bridge.weight_sync.streaming import MapTransition
    from precision.formats.quant_map import QuantMap

MIN_SAMPLES = 16
"""Fewest samples that measure a quantization term, if a batch has as many: one prompt says little about all."""


def build_ladder(recipe: Recipe) -> Ladder:
    """Return what the controller may change. Engines keep their formats if the run does not start them, the learner
    emulates them (learner.fp8_emulation), or they share its GPUs; the last are not restarted either, since the learner
    may have taken their memory."""
    schedule, section = recipe.schedule, recipe.learner
    quant = build_quant_map(recipe)
    fixed = bool(recipe.rollout.urls) or section.fp8_emulation or shares_gpus(recipe)
    groups = {} if quant is None or fixed else {n: of for n, of in quant.groups.items() if of[0] in quant.formats}
    stage = schedule.updates_per_stage if isinstance(schedule, StagedSchedule) else 1
    lag = schedule.lag if isinstance(schedule, AsyncSchedule) else stage - 1
    return Ladder(
        lag=lag,
        stage=stage,
        lag_may_change=isinstance(schedule, AsyncSchedule),
        has_age=lag > 0 or section.updates_per_batch > 1,
        lr_may_change=section.optimizer.lr_by_lag != "sqrt",
        engines_may_restart=not shares_gpus(recipe),
        groups=tuple(groups),
    )


def build_controller(
    run: RunDirectory,
    recipe: Recipe,
    learner: MegatronLearner,
    channel: MapTransition | None,
    event_log: EventLog,
    replayed: RunDirectory | None = None,
) -> StepController | None:
    """Return the run's controller; None if the recipe has none. It repeats the decisions of `replayed`."""
    if recipe.controller is None:
        return None
    base = build_quant_map(recipe)
    maps = NumberedMaps(run.quant_maps, run.fence)
    for folder in (run.control, run.quant_maps):
        learner.tell(functools.partial(remove_leftovers, folder, run.fence))

    def use_map(number: int, modules: Sequence[str]) -> None:
        quant = None if base is None else base.promoted(modules)
        if quant is not None:
            learner.tell(functools.partial(maps.write, number, quant.to_file()))
        if channel is not None:
            channel.use_map(quant)

    def members() -> Sequence[Member]:
        own = digest(())
        found = run.membership(recipe.rollout.urls).engines()
        return [replace(member, quant_map=own) for member in found] if recipe.rollout.urls else found

    def digest(names: Sequence[str]) -> str:
        return digest_of(None if base is None else base.promoted(names).to_file())

    presence = Presence(run, recipe.rollout.start_deadline_s, look_with(read_api_key()))
    return StepController(
        settings=recipe.controller,
        ladder=build_ladder(recipe),
        learner=learner,
        files=ControlFiles(run.control, run.fence),
        measure=EmulationMeter(learner, base, recipe.controller.evidence_tokens),
        members=members,
        is_lost=lambda member: presence.is_lost(member.index, member),
        digest=digest,
        use_map=use_map,
        modules_of=lambda names: () if base is None else tuple(m for name in names for m in base.groups[name]),
        updates_per_batch=recipe.learner.updates_per_batch,
        event_log=event_log,
        decided_before=None if replayed is None else ControlFiles(replayed.control, run.fence),
    )


def older_maps(run: RunDirectory, recipe: Recipe, learner: MegatronLearner) -> Callable[[str], Sequence[QuantMap]]:
    """Return MapTransition's `older_maps`; rank 0 reads the maps of announced engines that are not lost."""
    maps = NumberedMaps(run.quant_maps, run.fence)
    presence = Presence(run, recipe.rollout.start_deadline_s, look_with(read_api_key()))

    def read(newest: str) -> list[dict[str, Any]]:
        announced = run.membership(recipe.rollout.urls).engines()
        others = [member for member in announced if member.quant_map not in (newest, "")]
        served = {member.quant_map for member in others if not presence.is_lost(member.index, member)}
        files = (maps.with_digest(digest) for digest in sorted(served))
        return [file.model_dump(mode="json") for file in files if file is not None]

    def older(newest: str) -> Sequence[QuantMap]:
        told = learner.tell(functools.partial(read, newest))
        return [quant_map_of(recipe, QuantMapFile.model_validate(data)) for data in told]

    return older


@dataclass(frozen=True)
class EmulationMeter:
    """A meter of quantization that emulates the engines' formats in the learner (StepController.measure)."""

    learner: MegatronLearner
    quant_map: QuantMap | None
    num_tokens: int

    def __call__(self, needs: str, batch: Batch, names: Sequence[str]) -> Any:
        # Transformer Engine layers use other kernels, and formats cannot be emulated twice (learner.fp8_emulation).
        if self.learner.layers != "megatron" or self.learner.emulation is not None:
            return None
        if needs == "groups":
            assert self.quant_map is not None, "a run without formats has no groups"
            losses = self._losses(batch, [self.quant_map.only([name]) for name in names])
            return dict(zip(names, losses, strict=True))
        return 0.0 if self.quant_map is None else self._losses(batch, [self.quant_map.promoted(names)])[0]

    def _losses(self, batch: Batch, quant_maps: Sequence[QuantMap]) -> list[float]:
        """Return -ln of the token ESS with each map emulated, over sampled tokens of some samples. Log-ratios are
        capped at MAX_LOG_RATIO, where one ratio decides the ESS. Raises NonFiniteError."""
        from megatron_bridge.step.host_weights import row_scorer

        rows, chosen = evidence_of(batch, self.num_tokens)
        score, losses = row_scorer(self.learner, rows), []
        plain = score(None)[chosen]
        for quant in quant_maps:
            log_ratios = plain - score(quant)[chosen]
            if not bool(log_ratios.isfinite().all()):
                raise NonFiniteError(
                    f"batch {batch.index}: scores with the engines' formats emulated are not finite, so that the "
                    "controller cannot tell what quantization does; go back to the last checkpoint, or leave the "
                    "section controller out"
                )
            losses.append(loss_of(token_ess(log_ratios.clamp(max=MAX_LOG_RATIO))))
        return losses


def evidence_of(batch: Batch, num_tokens: int) -> tuple[TokenRows, Tensor]:
    """Return samples from all parts of a batch with about `num_tokens` sampled tokens, and bool [predicted tokens] that
    marks these. Long responses are cut, so that no sample gives more than 1/MIN_SAMPLES of them; samples without a
    sampled token are left out. All ranks choose the same, though each may hold only part of the rows."""
    import numpy as np
    import torch

    from megatron_bridge.step.micro_batches import TokenRows

    starts, places = batch.response_offsets, np.flatnonzero(batch.loss_mask)
    first = np.searchsorted(places, starts)
    taken = np.minimum(np.diff(first), max(1, num_tokens // MIN_SAMPLES))
    able = np.flatnonzero(taken)
    count = max(1, round(len(able) * min(1.0, num_tokens / taken.sum())))
    samples = able[np.unique(np.linspace(0, len(able) - 1, count).round().astype(int))]
    stops = places[first[samples] + taken[samples] - 1] + 1
    chosen = [batch.loss_mask[start:stop] for start, stop in zip(starts[samples], stops, strict=True)]
    rows = TokenRows.of_batch(batch.select(np.isin(np.arange(batch.num_samples), samples)))
    return rows.beginnings(rows.starts + stops - starts[samples]), torch.from_numpy(np.concatenate(chosen))
