"""What `quant-map suggest` concludes from scores of rows: the ranking of groups, and the map that holds the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.quant_map.scored_rows import ScoredRow, halves
from precision.formats.quant_map import QuantMap
from precision.mismatch.sensitivity import Score, promote_greedily, rank_groups
from precision.mismatch.statistics import Gap


def judged(
    score: Score, quant: QuantMap, rows: Sequence[ScoredRow], *, costs: Mapping[str, int], ess_floor: float
) -> dict[str, Any]:
    """Keys: ess_floor, reached, start and gap (a Gap), ranking and path (one entry a group, with its damage or cost),
    quant_map (as its file). `costs` are bytes by group."""
    chosen, held_out = halves(rows)
    ranked = rank_groups(score, quant, chosen=chosen)
    found = promote_greedily(score, quant, ranked, ess_floor=ess_floor, extra_bytes=costs, held_out=held_out)
    return dict(
        ess_floor=ess_floor,
        reached=found.reached,
        start=figures(found.start),
        gap=figures(found.gap),
        ranking=[
            dict(
                group=one.group.name,
                damage=one.damage,
                extra_bytes=costs[one.group.name],
                alone=figures(one.alone),
                promoted=figures(one.promoted),
            )
            for one in ranked
        ],
        path=[dict(group=step.group.name, extra_bytes=step.extra_bytes, **figures(step.gap)) for step in found.path],
        quant_map=found.quant_map.to_file().model_dump(mode="json"),
    )


def figures(gap: Gap) -> dict[str, float]:
    """As JSON."""
    return dict(num_tokens=gap.num_tokens, mean_abs=gap.mean_abs, max_abs=gap.max_abs, k3=gap.k3, ess=gap.ess)
