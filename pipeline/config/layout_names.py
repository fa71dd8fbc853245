"""Short names of layouts, as papers and tables write them: TP2×PP2×VPP2×SP."""

from __future__ import annotations

import re
from typing import Any

from pipeline.config.recipe import LearnerSection
from pipeline.config.section import MOST_PROCESSES
from pipeline.errors import RecipeError

_SIZES = {
    "TP": "tensor_parallel",
    "PP": "pipeline_parallel",
    "VPP": "virtual_pipeline",
    "CP": "context_parallel",
    "EP": "expert_parallel",
    "ETP": "expert_tensor_parallel",
    "DP": "data_parallel",
    "MB": "micro_batch_rows",
}
_WORDS: dict[str, dict[str, Any]] = {
    "one": {},
    "SP": {"sequence_parallel": True},
    "RECOMPUTE": {"recompute": "full"},
    "SELECTIVE": {"recompute": "selective"},
    "PLAIN": {"distributed_optimizer": False, "overlap_grad_reduce": False},
}


def parse_layout(name: str) -> dict[str, Any]:
    """ "TP2×PP2" (or TP2xPP2) → fields of LearnerSection, and `micro_batch_rows` for MBn.

    When experts are spread over more ranks than are named, data parallel ranks are added. Raises RecipeError.
    """
    fields: dict[str, Any] = {}
    for part in re.split(r"[×x+]", name):
        match = re.fullmatch(r"([A-Z]+)([1-9]\d*)", part)
        if part in _WORDS:
            fields |= _WORDS[part]
        elif match is not None and match[1] in _SIZES:
            fields[_SIZES[match[1]]] = int(match[2])
        else:
            raise RecipeError(
                f"layout {name!r}: {part!r} is not one of {', '.join(f'{key}n' for key in _SIZES)} or "
                f"{', '.join(_WORDS)}; for example TP2×PP2"
            )
    spread = fields.get("expert_parallel", 1) * fields.get("expert_tensor_parallel", 1)
    named = fields.get("tensor_parallel", 1) * fields.get("context_parallel", 1)
    if "data_parallel" not in fields and spread > named:
        fields["data_parallel"] = spread // named
    if (most := max((size for key, size in fields.items() if key in _SIZES.values()), default=1)) > MOST_PROCESSES:
        raise RecipeError(f"layout {name!r} has {most} ranks, expected at most {MOST_PROCESSES}")
    return fields


def layout_name(learner: LearnerSection) -> str:
    """The name of a learner's layout, such as `TP4×PP4×DP2×SP` or `one`; `parse_layout` reads it."""
    sizes = ((name, getattr(learner, field, 1)) for name, field in _SIZES.items())
    parts = [f"{name}{size}" for name, size in sizes if size > 1]
    if learner.sequence_parallel and learner.tensor_parallel > 1:
        parts.append("SP")
    parts += [word for word, fields in _WORDS.items() if fields.get("recompute") == learner.recompute]
    return "×".join(parts) or "one"
