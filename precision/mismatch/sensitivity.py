"""Rank layers by the damage of the rollout's formats, and choose those to keep in full precision.

    rank_groups       each layer group quantized alone, and each promoted alone      what a format costs, group by group
    promote_greedily  the costliest group first, until the ESS reaches a floor       the map that a recipe takes

Nothing here knows a model. `score(quant_map)` returns the log-probabilities of fixed tokens, [tokens] in nats: of the
unquantized model for None, of the model with emulated formats for a map. The smallest unit that changes format is a
module of an engine: qkv, o, gate_up and down of a layer, or all experts of it. A group's log-ratio is log
pi_unquantized - log pi_quantized, as if the engine had that format and nothing else differed. The ESS and k3 of tokens
that another policy sampled are no expectations, but they order groups alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from precision.formats.quant_map import QuantMap
from precision.mismatch.statistics import Gap, gap

Score = Callable[[QuantMap | None], Tensor]
"""Function of a quant map, or of None for no quantization: log-probabilities [tokens] of the same tokens, in nats."""

_LAYER = re.compile(r".*?\.layers\.\d+")


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Modules that change format together."""

    name: str
    """Name in `QuantMap.groups`, such as `model.layers.3.self_attn.qkv_proj`, or of a layer."""
    modules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GroupSensitivity:
    """The cost of one group's format."""

    group: LayerGroup
    alone: Gap
    """Gap with only this group quantized, against nothing quantized."""
    promoted: Gap
    """Gap with everything but this group quantized, against nothing quantized."""
    damage: float
    """KL (k3), nats, with the group quantized alone. Small damages add up over groups whose errors are independent, and
    1 - ESS is then twice their sum."""


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """One step of `promote_greedily`."""

    group: LayerGroup
    extra_bytes: int
    """Memory that an engine needs to keep the group in full precision."""
    gap: Gap
    """Gap on the held-out tokens with this and all earlier promotions together."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A map that holds the floor, and the promotions that lead to it."""

    quant_map: QuantMap
    start: Gap
    """Gap before the first promotion."""
    path: tuple[Promotion, ...]
    reached: bool
    """False when the ESS is below the floor although nothing is quantized any more."""
    gap: Gap
    """Gap of the suggested map as a whole."""


def layer_groups(quant_map: QuantMap) -> tuple[LayerGroup, ...]:
    """Return the map's quantized units, in its order."""
    quantized = quant_map.formats
    return tuple(
        LayerGroup(name=name, modules=modules) for name, modules in quant_map.groups.items() if modules[0] in quantized
    )


def whole_layers(quant_map: QuantMap) -> tuple[LayerGroup, ...]:
    """Return units as large as a decoder layer, named `model.layers.N`; fewer passes than `layer_groups`."""
    members: dict[str, list[str]] = {}
    for module in quant_map.formats:
        found = _LAYER.match(module)
        members.setdefault(found.group() if found else module, []).append(module)
    return tuple(LayerGroup(name=name, modules=tuple(modules)) for name, modules in members.items())


def rank_groups(score: Score, quant_map: QuantMap, *, chosen: Tensor | None = None) -> list[GroupSensitivity]:
    """Return the sensitivities, the most damaging group first, from one pass and two for each group. `chosen`, bool
    [tokens], are the tokens to judge by. Raises FloatingPointError for scores that are not finite."""
    plain = score(None)
    found = []
    for group in layer_groups(quant_map):
        alone = gap(plain, score(quant_map.only(group.modules)), chosen)
        rest = gap(plain, score(quant_map.promoted(group.modules)), chosen)
        found.append(GroupSensitivity(group=group, alone=alone, promoted=rest, damage=alone.k3))
    return sorted(found, key=lambda one: -one.damage)


def promote_greedily(
    score: Score,
    quant_map: QuantMap,
    ranked: Sequence[GroupSensitivity],
    *,
    ess_floor: float,
    extra_bytes: Mapping[str, int],
    held_out: Tensor | None = None,
) -> Suggestion:
    """Promote group after group until the ESS of the whole map is at least `ess_floor`. The next group is the one with
    the most damage for each byte that it costs (`extra_bytes`, by the group's name). Every map on the way is scored as
    a whole. `held_out`, bool [tokens], selects the tokens that decide when to stop: give tokens that `ranked` was not
    made from. Raises ValueError for a floor outside (0, 1] or a group without cost."""
    if not 0.0 < ess_floor <= 1.0:
        raise ValueError(f"ess_floor is {ess_floor}, expected above 0 and at most 1; 0.98 is a usual one")
    unpriced = [one.group.name for one in ranked if extra_bytes.get(one.group.name, 0) < 1]
    if unpriced:
        raise ValueError(f"{unpriced[0]} has no cost in bytes, expected a positive number for each group; add it")
    plain = score(None)
    start = gap(plain, score(quant_map), held_out)
    order = sorted(ranked, key=lambda one: -one.damage / extra_bytes[one.group.name])
    suggested, path = quant_map, list[Promotion]()
    for count in range(1, len(order) + 1):
        if (path[-1].gap if path else start).ess >= ess_floor:
            break
        promoted, group = order[:count], order[count - 1].group
        suggested = quant_map.promoted(module for one in promoted for module in one.group.modules)
        reached = gap(plain, score(suggested), held_out)
        path.append(Promotion(group=group, extra_bytes=extra_bytes[group.name], gap=reached))
    last = path[-1].gap if path else start
    return Suggestion(quant_map=suggested, start=start, path=tuple(path), reached=last.ess >= ess_floor, gap=last)
