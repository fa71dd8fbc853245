"""Describe the compared rows, whose responses an engine sampled, and have a learner score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from launch.run.processes import child_environment, run_ranks, torchrun
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from pipeline.config.recipe import Recipe
from pipeline.data.batch import KeptSets
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import FatalError


@dataclass(kw_only=True)
class SampledRows:
    """Sampled rows with the engine's log-probabilities."""

    tokens: list[list[int]]
    prompt_lengths: list[int]
    decode: NDArray[np.float64]
    """[responses] log-probabilities under the run's contract, row after row."""
    kept: KeptSets | None = None
    """[responses] kept sets over which every score is renormalized; None: the whole vocabulary."""
    experts: RoutedExperts | None = None
    """[tokens of all rows] the experts that the engine chose; None: unknown, or a dense model."""

    lengths: list[int] = field(init=False)
    row: NDArray[np.int64] = field(init=False)
    """[responses] the row of each token."""

    def __post_init__(self) -> None:
        self.lengths = [len(row) - prompt for row, prompt in zip(self.tokens, self.prompt_lengths, strict=True)]
        self.row = np.repeat(np.arange(len(self.tokens)), self.lengths)

    def part(self, rows: Sequence[int]) -> SampledRows:
        here = np.flatnonzero(np.isin(self.row, rows))
        return SampledRows(
            tokens=[self.tokens[row] for row in rows],
            prompt_lengths=[self.prompt_lengths[row] for row in rows],
            decode=self.decode[here],
            kept=None if self.kept is None else self.kept.take(here),
            experts=None if self.experts is None else self.experts[tokens_of(self.tokens, rows)],
        )

    def kept_by_row(self) -> list[list[NDArray[np.int32]]] | None:
        """Return the kept sets of tokens 1 … n-1 of each row; an empty set means the whole vocabulary."""
        if self.kept is None:
            return None
        sets, whole = np.split(self.kept.tokens, self.kept.offsets[1:-1]), np.zeros(0, np.int32)
        ends = np.cumsum([0, *self.lengths])
        return [
            [whole] * (prompt - 1) + sets[start:end]
            for prompt, start, end in zip(self.prompt_lengths, ends[:-1], ends[1:], strict=True)
        ]


def tokens_of(tokens: Sequence[Sequence[int]], rows: Sequence[int]) -> NDArray[np.bool_]:
    """Return the mask [tokens of all rows] of the tokens in `rows`, which are ascending."""
    return np.repeat(np.isin(np.arange(len(tokens)), rows), [len(row) for row in tokens])


JOB_FILE, EXPERTS_FILE, SCORES_FILE = "job.json", "experts.npz", "scores.npz"
MOST_SEARCHED_ROWS = 32
"""The most rows on which faults are searched: a fault affects all rows alike, and each candidate takes a pass."""
MOST_ROWS = 256
"""The most rows of a recorded batch that are scored: each layer takes a pass over them."""
MOST_MODULES = 64
"""The most modules that are searched one by one; larger models are searched layer by layer."""


class VersionRows(BaseModel):
    """Rows with tokens that one version sampled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    weights: Path
    rows: tuple[int, ...]


class ScoringJob(BaseModel):
    """Rows, and the weights with which to score them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: list[list[int]]
    prompt_lengths: list[int]
    kept: list[list[int]] | None = None
    """[responses] kept sets over which each token is renormalized; None: the whole vocabulary."""
    replayed: bool = False
    """Whether the learner trains with the engine's experts: all its scores use them, and there is no routing term."""
    versions: tuple[VersionRows, ...] = ()
    now: Path | None = None
    """HF folder of the trained weights; None: not scored."""
    former: Path | None = None
    """HF folder of the version before the last of `versions`, which engines may hold by mistake."""
    searched: tuple[int, ...] = ()
    """Rows of the last of `versions` on which faults are tried."""

    def part(self, rows: Sequence[int]) -> ScoringJob:
        lengths = [len(row) - prompt for row, prompt in zip(self.tokens, self.prompt_lengths, strict=True)]
        ends = np.cumsum([0, *lengths])
        return ScoringJob(
            tokens=[self.tokens[row] for row in rows],
            prompt_lengths=[self.prompt_lengths[row] for row in rows],
            replayed=self.replayed,
            kept=None if self.kept is None else [one for row in rows for one in self.kept[ends[row] : ends[row + 1]]],
        )


def responses_of(rows: SampledRows) -> dict[str, Any]:
    kept = None if rows.kept is None else np.split(rows.kept.tokens, rows.kept.offsets[1:-1])
    return dict(
        tokens=rows.tokens,
        prompt_lengths=rows.prompt_lengths,
        kept=None if kept is None else [one.tolist() for one in kept],
    )


def score_in_ranks(
    run: RunDirectory, recipe: Recipe, job: ScoringJob, experts: RoutedExperts | None = None
) -> dict[str, NDArray[np.float64]]:
    """Score a job by a learner of the recipe's layout; return the arrays that launch.attribution.score_ranks describes.
    `experts` are those of all tokens of the job's rows."""
    (run.path / JOB_FILE).write_text(job.model_dump_json(), encoding="utf-8")
    if experts is not None:
        write_experts(run.path, experts)
    command = torchrun(recipe.learner.num_processes, "launch.attribution.score_ranks", str(run.path))
    num_layers = ModelConfig.from_hf(read_hf_config(recipe.model.path)).num_layers
    # Passes over rows: one per layer of each version, two per searched module, and the time of one for the start.
    search = 2 * max(MOST_MODULES, num_layers) + 8 if job.searched else 0
    deadline_s = recipe.learner.step_deadline_s * (2 + len(job.versions) * (num_layers + 4) + search)
    try:
        run_ranks(run, command, log=run.logs / "mismatch.log", env=child_environment(), deadline_s=deadline_s)
    except FatalError:
        if not (run.path / SCORES_FILE).exists():
            raise  # otherwise only the search for faults, which comes last, has failed; the page says so
    with np.load(run.path / SCORES_FILE, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def write_experts(folder: Path, experts: RoutedExperts) -> None:
    """Write experts for `read_experts`, much smaller than JSON."""
    np.savez(folder / EXPERTS_FILE, ids=experts.ids, known=experts.known)


def read_experts(folder: Path) -> RoutedExperts | None:
    """Read the experts [tokens of all rows of the job]; None: unknown, or a dense model."""
    if not (folder / EXPERTS_FILE).is_file():
        return None
    with np.load(folder / EXPERTS_FILE, allow_pickle=False) as stored:
        return RoutedExperts(ids=stored["ids"], known=stored["known"])
