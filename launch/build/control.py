"""The ESS controller of a run, from its recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launch.build.components import build_quant_map, quant_map_of
from launch.build.engines import shares_gpus
from launch.cluster.roles.api_key import read_api_key
from pipeline.config.recipe import Recipe
from pipeline.config.schedule_sections import AsyncSchedule, StagedSchedule
from pipeline.control.files import ControlFiles
from pipeline.control.loop import StepController
from pipeline.data.event_log import EventLog
from pipeline.data.files import remove_leftovers
from pipeline.data.membership import Member
from pipeline.data.quant_maps import NumberedMaps, digest_of
from pipeline.data.records import Batch
from pipeline.data.run_directory import RunDirectory
from precision.controller.ladder import Ladder
from precision.ess import loss_of, token_ess
from precision.formats.quant_map_file import QuantMapFile
from rollout_sglang.presence import Presence, look_with

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner
    from megatron_bridge.weight_sync.map_transition import MapTransition
    from precision.formats.quant_map import QuantMap


def build_ladder(recipe: Recipe) -> Ladder:
    """What the controller may do. Engines that the run does not start itself keep their formats, and so do those that a
    learner follows by emulation (learner.fp8_emulation). Engines that share GPUs with the learner keep theirs too and
    are not started again: the learner may have taken the memory meanwhile."""
    schedule, section = recipe.schedule, recipe.learner
    quant = build_quant_map(recipe)
    fixed = bool(recipe.rollout.urls) or section.fp8_emulation or quant is None or shares_gpus(recipe)
    lag = schedule.lag if isinstance(schedule, AsyncSchedule) else 0
    if isinstance(schedule, StagedSchedule):
        lag = schedule.updates_per_stage - 1
    return Ladder(
        lag=lag,
        lag_may_change=isinstance(schedule, AsyncSchedule),
        has_age=lag > 0 or section.updates_per_batch > 1,
        engines_may_restart=not shares_gpus(recipe),
        groups=() if fixed or quant is None else quantized_groups(quant),
    )


def quantized_groups(quant: QuantMap) -> tuple[str, ...]:
    """The engines' names of the modules that the map quantizes."""
    return tuple(name for name, modules in quant.groups.items() if modules[0] in quant.formats)


def build_controller(
    run: RunDirectory,
    recipe: Recipe,
    learner: MegatronLearner,
    channel: MapTransition | None,
    event_log: EventLog,
    replayed: RunDirectory | None = None,
) -> StepController | None:
    """The run's controller; None without the section. `replayed` is the run whose decisions are repeated."""
    if recipe.controller is None:
        return None
    base = build_quant_map(recipe)
    maps = NumberedMaps(run.quant_maps, run.fence)
    for folder in (run.control, run.quant_maps):
        learner.tell(functools.partial(remove_leftovers, folder, run.fence))

    def with_promoted(names: Sequence[str]) -> QuantMap | None:
        return None if base is None else base.promoted(names)

    def use_map(number: int, modules: Sequence[str]) -> None:
        quant = with_promoted(modules)
        if quant is not None:
            learner.tell(functools.partial(maps.write, number, quant.to_file()))
        if channel is not None:
            channel.use_map(quant)

    def members() -> Sequence[Member]:
        own = digest(())
        found = run.membership(recipe.rollout.urls).engines()
        return [replace(member, quant_map=own) for member in found] if recipe.rollout.urls else found

    def digest(names: Sequence[str]) -> str:
        return digest_of(None if (quant := with_promoted(names)) is None else quant.to_file())

    presence = presence_of(run, recipe)
    return StepController(
        settings=recipe.controller,
        ladder=build_ladder(recipe),
        learner=learner,
        files=ControlFiles(run.control, run.fence),
        meter=EmulationMeter(learner, base, recipe.controller.evidence_tokens),
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
    """As MapTransition asks for them: of the engines that are announced and not lost, read by rank 0."""
    maps, presence = NumberedMaps(run.quant_maps, run.fence), presence_of(run, recipe)

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


def presence_of(run: RunDirectory, recipe: Recipe) -> Presence:
    """Tells which of the run's engines are there."""
    return Presence(run, recipe.rollout.start_deadline_s, look_with(read_api_key()))


@dataclass(frozen=True)
class EmulationMeter:
    """Implements pipeline.ports.quantization.QuantizationMeter by the learner's emulation of the engines' formats."""

    learner: MegatronLearner
    quant_map: QuantMap | None
    """The recipe's."""
    num_tokens: int

    def term(self, batch: Batch, promoted: Sequence[str]) -> float | None:
        """See QuantizationMeter."""
        if not self._can_emulate:
            return None
        if self.quant_map is None:
            return 0.0
        return self._losses(batch, [self.quant_map.promoted(promoted)])[0]

    def groups(self, batch: Batch, names: Sequence[str]) -> dict[str, float] | None:
        """See QuantizationMeter."""
        if not self._can_emulate:
            return None
        assert self.quant_map is not None, "a run without formats has no groups"
        losses = self._losses(batch, [self.quant_map.only([name]) for name in names])
        return dict(zip(names, losses, strict=True))

    @property
    def _can_emulate(self) -> bool:
        """Not with Transformer Engine layers, which have kernels of their own; nor twice (learner.fp8_emulation)."""
        return self.learner.layers == "megatron" and self.learner.emulation is None

    def _losses(self, batch: Batch, quant_maps: Sequence[QuantMap]) -> list[float]:
        """-ln ESS with each map emulated, over the response tokens of some samples."""
        from megatron_bridge.step.sensitivity import row_scorer

        rows, chosen = rows_of(batch, self.num_tokens, self.learner)
        score = row_scorer(self.learner, rows)
        plain = score(None)[chosen]
        return [loss_of(token_ess(plain - score(quant)[chosen])) for quant in quant_maps]


def rows_of(batch: Batch, num_tokens: int, learner: MegatronLearner) -> tuple[list[list[int]], Any]:
    """Samples of all parts of a batch with about so many sampled tokens: their tokens, and bool [tokens] that marks the
    sampled ones among the tokens 1 … n-1 of each row. Collective, and the same on every rank: each has some of them."""
    import numpy as np
    import torch

    count = max(1, round(batch.num_samples * min(1.0, num_tokens / max(1, batch.num_sampled_tokens))))
    samples = np.unique(np.linspace(0, batch.num_samples - 1, count).round().astype(int)).tolist()
    own, lengths, chosen = batch.rows(), batch.lengths, []
    held = [own[sample] if len(own[sample]) else np.zeros(lengths[sample], np.int32) for sample in samples]
    flat = np.concatenate(held) if batch.share is None else learner.sum_of_shares(np.concatenate(held))
    for sample in samples:
        first, last = batch.response_offsets[sample : sample + 2]
        prompt = np.zeros(batch.prompt_lengths[sample] - 1, np.bool_)
        chosen += [prompt, batch.loss_mask[first:last]]
    rows = [row.tolist() for row in np.split(flat, np.cumsum(lengths[samples])[:-1])]
    return rows, torch.from_numpy(np.concatenate(chosen))
