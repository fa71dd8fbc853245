"""Kept sets find their tokens again when rows are picked, sent to ranks and laid over an engine's scores."""

from __future__ import annotations

import numpy as np

from launch.attribution.rows import SampledRows, ScoringJob, responses_of
from pipeline.data.batch import KeptSets

ROWS = SampledRows(
    tokens=[[1, 2, 3], [4, 5], [6, 7, 8, 9]],
    prompt_lengths=[1, 1, 3],
    decode=np.array([-0.1, -0.2, -0.3, -0.4]),
    kept=KeptSets.of([[2, 20], [3], [5, 50, 51], [9, 90]]),
)


def test_rows_are_picked_with_their_sets() -> None:
    part = ROWS.part([0, 2])
    assert (part.tokens, part.prompt_lengths) == ([[1, 2, 3], [6, 7, 8, 9]], [1, 3])
    assert part.decode.tolist() == [-0.1, -0.2, -0.4]
    assert part.kept is not None
    assert part.kept.tokens.tolist() == [2, 20, 3, 9, 90]
    assert responses_of(part) == responses_of_job(ScoringJob(**responses_of(ROWS)).part([0, 2]))


def responses_of_job(job: ScoringJob) -> dict[str, object]:
    return dict(tokens=job.tokens, prompt_lengths=job.prompt_lengths, kept=job.kept)


def test_an_engine_gets_none_for_prompts() -> None:
    by_row = ROWS.kept_by_row()
    assert by_row is not None
    assert [[one.tolist() for one in row] for row in by_row] == [[[2, 20], [3]], [[5, 50, 51]], [[], [], [9, 90]]]
