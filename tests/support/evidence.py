"""Results of evidence runs that nobody ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.evidence.results import Evaluation, Result


def a_result(arm: str, seed: int, scores: Sequence[Sequence[int]], *, samples: int = 10, **fields: Any) -> Result:
    """A finished run with the given right answers of each prompt at versions 0, 10, 20 …, a second a version."""
    evaluations = [
        Evaluation(version=10 * place, samples=samples, correct=list(correct), trained_s=10.0 * place)
        for place, correct in enumerate(scores)
    ]
    kept: dict[str, Any] = dict(
        condition="plain", state="finished", reason="", steps=20, steps_planned=20, samples_per_step=256, series={}
    )
    return Result(arm=arm, seed=seed, **{**kept, "evaluations": evaluations, **fields})
