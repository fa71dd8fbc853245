"""Scores of learner and engine, taken by version and by row, laid side by side token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launch.build.engines import engine_dtype
from launch.mismatch.rows import SampledRows
from launch.mismatch.scoring import MOST_SEARCHED_ROWS, Job
from pipeline.analysis.mismatch.measured import Audit, Measured, Setting
from pipeline.config.recipe import Recipe
from precision.mismatch.attribution import TokenScores

Flat = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What was scored, all arrays over the response tokens of all rows."""

    rows: SampledRows
    version: NDArray[np.int64]
    """The version that sampled the token."""
    counts: NDArray[np.bool_]
    """False for tokens that no engine sampled, or that the learner never scored."""
    now: Flat | None
    """By the learner at the weights that are trained; None: those that sampled."""
    prefill: Flat | None
    """By the engine, at the version that sampled; None: not to be had."""
    learner: Mapping[str, Flat]
    """What launch.mismatch.score_ranks wrote for `job`."""
    job: Job

    def measured(self, setting: Setting, audit: Audit) -> Measured:
        """All of it for the tokens that count."""
        kept = self.counts
        then = self._required("then")
        quantized, routed = self._at_version("quantized"), self._at_version("routed")
        prefix = "layer."
        layers = sorted(int(name.removeprefix(prefix)) for name in self._names() if name.startswith(prefix))
        tried = self._searched() & kept
        if self.job.searched and not any(name.startswith("effect.") for name in self.learner):
            remark = "The search for known faults failed, for want of memory perhaps; --no-locate leaves it out."
            setting = replace(setting, remarks=(*setting.remarks, remark))
        return Measured(
            setting=setting,
            scores=TokenScores(
                now=_tensor(then if self.now is None else self.now, kept),
                then=_tensor(then, kept),
                quantized=None if quantized is None else _tensor(quantized, kept),
                routed=None if routed is None else _tensor(routed, kept),
                prefill=None if self.prefill is None else _tensor(self.prefill, kept),
                decode=_tensor(self.rows.decode, kept),
            ),
            position=self.rows.position[kept],
            entropy=self._required("entropy")[kept],
            layer_steps={layer: self._required(f"{prefix}{layer}")[kept] for layer in layers},
            searched=tried[kept],
            effects={
                name.removeprefix("effect."): values[tried[self._searched_rows()]]
                for name, values in self.learner.items()
                if name.startswith("effect.")
            },
            audit=audit,
        )

    def _names(self) -> list[str]:
        """Of the arrays of a version."""
        prefix = f"{self.job.versions[-1].number}."
        return [name.removeprefix(prefix) for name in self.learner if name.startswith(prefix)]

    def _required(self, name: str) -> Flat:
        found = self._at_version(name)
        assert found is not None, name
        return found

    def _at_version(self, name: str) -> Flat | None:
        """The learner's values of each token at the version that sampled it, NaN where none did."""
        if name not in self._names():
            return None
        values = np.full(len(self.version), np.nan)
        for part in self.job.versions:
            here = np.isin(self.rows.row, part.rows)
            values[here] = np.where(
                self.version[here] == part.number, self.learner[f"{part.number}.{name}"], values[here]
            )
        return values

    def _searched_rows(self) -> NDArray[np.bool_]:
        return np.asarray(np.isin(self.rows.row, self.job.searched))

    def _searched(self) -> NDArray[np.bool_]:
        return np.asarray(self._searched_rows() & (self.version == self.job.versions[-1].number))


def searched_rows(candidates: NDArray[np.int64], most: int = MOST_SEARCHED_ROWS) -> tuple[int, ...]:
    """At most `most` of `candidates`, ascending, evenly spread: neighbors answer one prompt."""
    count = min(most, len(candidates))
    places = np.linspace(0, len(candidates) - 1, count).astype(np.int64)
    return tuple(candidates[places].tolist())


def describe(
    recipe: Recipe, source: str, kind: str, versions: tuple[int, ...], *, rows: SampledRows, prefilled: bool
) -> Setting:
    """The setting, and what could not be compared in it."""
    temperature = recipe.learner.temperature or recipe.rollout.temperature
    remarks = _routing_remarks(rows, replayed=recipe.rollout.replay_experts)
    if not prefilled:
        remarks.append(f"{_not_prefilled(recipe, rows, temperature)}: kernels are in the decoding term.")
    if temperature != recipe.rollout.temperature:
        remarks.append(
            f"The engine samples at temperature {recipe.rollout.temperature:g}, the learner trains the policy of "
            f"temperature {temperature:g}: that difference is in the decoding term."
        )
    return Setting(
        source=source,
        kind=kind,
        rollout_precision=recipe.rollout.precision,
        learner_precision=recipe.learner.precision,
        engine_dtype=engine_dtype(recipe),
        temperature=temperature,
        sampled_at=recipe.rollout.temperature,
        versions=versions,
        trains_formats=recipe.learner.fp8_emulation,
        remarks=tuple(remarks),
    )


def _not_prefilled(recipe: Recipe, rows: SampledRows, temperature: float) -> str:
    """Why the engine did not score what it sampled."""
    if rows.experts is not None:
        return "An engine that scores a row chooses experts anew"
    if recipe.rollout.asks_for_kept_sets:
        return "SGLang scores prompts over the whole vocabulary alone, the learner what top_p and top_k kept"
    return f"SGLang scores prompts at temperature 1 alone, and the learner's is {temperature:g}"


def _routing_remarks(rows: SampledRows, *, replayed: bool) -> list[str]:
    """Of a mixture: whose experts the scores are with, and of how many tokens the engine could say them."""
    if rows.experts is None:
        return []
    unknown = 1.0 - rows.experts.known.sum() / max(1, len(rows.experts) - len(rows.tokens))
    found = ["The learner trains with the engine's experts: routing is no difference."] if replayed else []
    if unknown > 0:
        found.append(
            f"Of {unknown:.0%} of the tokens the engine could not say the experts any more: their routing is in the "
            "decoding term."
        )
    return found


def _tensor(values: Flat, kept: NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(values[kept])
