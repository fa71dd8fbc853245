"""A batch as text for people: what was asked, what was answered, what it earned, and where the two models differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.compute import AdvantageComputer
from pipeline.data.batch import FINISH_REASONS, VERIFIER_FAILED, Batch
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import all_recipes, recipe_of_step
from pipeline.errors import ModelError
from pipeline.ports.learner import looked_at
from pipeline.tasks import Task, build_task
from pipeline.tasks.task import Problem
from pipeline.tasks.tokenizer import Tokenizer
from precision.text import one_line

SAMPLE_COLUMNS = (
    *("batch", "sample", "group", "problem", "source", "prompt", "answer", "metadata", "response"),
    *("reward", "reward_parts", "advantage", "finish"),
    *("truncated", "prompt_tokens", "response_tokens", "version_min", "version_max", "engine", "generated_s"),
    *("log_ratio_mean", "log_ratio_abs_max"),
)
"""The keys of a row of `sample_rows`, in their order."""

MOST_METADATA = 2_000
_SYMBOLS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


class Background:
    """What a run knows of its samples beside its batches: reference answers and metadata, by its task, and advantages,
    by its recipe. `missing` says why there are no answers, where the task cannot be built here."""

    def __init__(self, run_dir: Path) -> None:
        self._recipes = all_recipes(run_dir)
        self._task: Task | None = None
        self.missing = ""
        recipe = self._recipes[-1].recipe
        try:
            self._task = build_task(recipe.task, recipe.run.seed)
        except Exception as error:  # noqa: BLE001 - data that is gone or changed, or whatever a user's own class raises
            self.missing = f"reference answers are not shown: {one_line(error, 300)}"

    def problem(self, number: int) -> Problem | None:
        """Return a problem that was asked; None where it is not known."""
        if self._task is None or not 0 <= number < self._task.num_prompts:
            return None
        return self._task.problem(number)

    def advantages(self, batch: Batch) -> NDArray[np.float64] | None:
        """Return what the samples of a whole batch are trained with, [samples]; None where that depends on more than
        the batch."""
        recipe = recipe_of_step(self._recipes, batch.index)
        by_tokens = recipe.distillation is not None and recipe.distillation.judges_alone
        if recipe.advantage.moving_parts or by_tokens:
            return None
        return AdvantageComputer.of(recipe).compute_advantages(batch).values


def render_batch(
    batch: Batch,
    tokenizer: Tokenizer,
    *,
    learner_logprobs: NDArray[np.float32] | None = None,
    samples: Iterable[int] | None = None,
    background: Background | None = None,
) -> Iterator[str]:
    """Lines of text, without line ends: each sample's prompt, response, reward, finish and versions; with `background`
    also its reference answer, metadata and advantage.

    With `learner_logprobs` ([responses], natural log, under the batch's contract) also one line a token with
    learner minus rollout; a token that no engine sampled has neither, and one that the learner did not look at has no
    gap. `samples` selects; the default is all.
    """
    if learner_logprobs is not None and learner_logprobs.shape != batch.rollout_logprobs.shape:
        raise ValueError(f"learner_logprobs is {learner_logprobs.shape}, expected {batch.rollout_logprobs.shape}")
    unfit = [drop for drop in batch.dropped if drop.kind != "solved"]
    dropped = "".join(f"; group {drop.group} dropped: {visible(drop.reason)}" for drop in unfit)
    if solved := sum(drop.kind == "solved" for drop in batch.dropped):
        dropped += f"; {solved} groups of solved problems passed over"
    yield f"batch {batch.index}: {batch.num_samples} samples, {batch.num_response_tokens} response tokens{dropped}"
    advantages = None if background is None else background.advantages(batch)
    for sample in range(batch.num_samples) if samples is None else samples:
        yield ""
        yield from _render_sample(batch, tokenizer, sample, background, advantages)
        if learner_logprobs is not None:
            yield from _render_gaps(batch, tokenizer, sample, learner_logprobs)


def sample_rows(
    batch: Batch, tokenizer: Tokenizer, background: Background, *, learner_logprobs: NDArray[np.float32] | None = None
) -> Iterator[dict[str, Any]]:
    """One mapping a sample, of plain values that JSON and Parquet can hold.

    `answer` and `metadata` are the task's, `advantage` what the sample is trained with; None where they are not known.
    `prompt` and `response` are decoded with special tokens. `reward` is None for a sample whose verifier failed.
    `log_ratio_mean` and `log_ratio_abs_max` are of learner minus engine, nats, over the tokens that an engine sampled
    and the learner looked at; None without `learner_logprobs` ([responses]), or where there is no such token.
    """
    judged, gaps = batch.judged, _finite_gaps(batch, learner_logprobs)
    advantages = background.advantages(batch)
    for sample in range(batch.num_samples):
        span = responses_of(batch, sample)
        prompt, response = np.split(batch.sample_tokens(sample), [int(batch.prompt_lengths[sample])])
        parts = {name: float(values[sample]) for name, values in batch.reward_parts.items()}
        versions = batch.policy_version[span]
        known = gaps[span][~np.isnan(gaps[span])]
        problem = background.problem(int(batch.problem[sample]))
        yield dict(
            batch=batch.index,
            sample=sample,
            group=int(batch.group[sample]),
            problem=int(batch.problem[sample]),
            source=next((name for name, within in batch.sources.items() if batch.problem[sample] in within), None),
            prompt=tokenizer.decode(prompt.tolist(), special=True),
            answer=None if problem is None else problem.answer,
            metadata=None if problem is None else dict(problem.metadata),
            response=tokenizer.decode(response.tolist(), special=True),
            reward=float(batch.reward[sample]) if judged[sample] else None,
            reward_parts={name: value for name, value in parts.items() if not np.isnan(value)},
            advantage=None if advantages is None else float(advantages[sample]),
            finish=FINISH_REASONS[batch.finish[sample]],
            truncated=bool(batch.truncated[sample]),
            prompt_tokens=len(prompt),
            response_tokens=len(response),
            version_min=int(versions.min()) if len(versions) else None,
            version_max=int(versions.max()) if len(versions) else None,
            engine=int(batch.engine[sample]),
            generated_s=float(batch.generated_s[sample]),
            log_ratio_mean=float(known.mean()) if len(known) else None,
            log_ratio_abs_max=float(np.abs(known).max()) if len(known) else None,
        )


def _finite_gaps(batch: Batch, learner_logprobs: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """[responses] learner - engine, nats; NaN where one of the two is not known or not finite."""
    if learner_logprobs is None:
        return np.full(batch.num_response_tokens, np.nan)
    known = looked_at(batch, learner_logprobs) & np.isfinite(learner_logprobs) & np.isfinite(batch.rollout_logprobs)
    gaps = np.full(len(known), np.nan)
    np.subtract(learner_logprobs, batch.rollout_logprobs, out=gaps, where=known, dtype=np.float64)
    return gaps


def tokenizer_of(run: RunDirectory, model: Path, sha256: str) -> Tokenizer:
    """The one that batches with this digest were sampled with: from `model`, where the recipe names it, or from a model
    of the run. Raises ModelError where neither has it, for example where the run was copied from another machine.
    """
    policies = sorted(run.policies.glob("[0-9]*"), reverse=True)
    for folder in (model, run.model, *policies[:1]):
        with suppress(ModelError):
            tokenizer = Tokenizer.load(folder)
            if tokenizer.sha256 == sha256:
                return tokenizer
    raise ModelError(
        f"the tokenizer that {run.path} was sampled with is neither in {model} nor in a model of the run; put the "
        f"model back there, or its tokenizer into {run.model}"
    )


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Return what the data says beside prompt and answer, as JSON of at most MOST_METADATA characters."""
    text = json.dumps(metadata, ensure_ascii=False, default=str)
    return text if len(text) <= MOST_METADATA else f"{text[:MOST_METADATA]}…"


def visible(text: str) -> str:
    """One line that shows what it holds: line ends and tabs as symbols, other unprintable characters as escapes."""
    return "".join(_SYMBOLS.get(c) or (c if c.isprintable() else _escape(c)) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode() if ord(character) > 0x20 else f"\\x{ord(character):02x}"


def _render_sample(
    batch: Batch,
    tokenizer: Tokenizer,
    sample: int,
    background: Background | None,
    advantages: NDArray[np.float64] | None,
) -> Iterator[str]:
    tokens = batch.sample_tokens(sample)
    prompt, response = np.split(tokens, [int(batch.prompt_lengths[sample])])
    parts = {name: float(values[sample]) for name, values in batch.reward_parts.items()}
    yield f"sample {sample}, group {batch.group[sample]}"
    yield f"  prompt    {visible(tokenizer.decode(prompt.tolist(), special=True))}"
    if background is not None and (problem := background.problem(int(batch.problem[sample]))) is not None:
        if problem.answer:
            yield f"  answer    {visible(problem.answer)}"
        if problem.metadata:
            yield f"  metadata  {visible(metadata_text(problem.metadata))}"
    yield f"  response  {visible(tokenizer.decode(response.tolist(), special=True))}"
    parts.pop(VERIFIER_FAILED, None)
    reward = f"{batch.reward[sample]:g}" if batch.judged[sample] else "none: its verifier failed"
    explained = ", ".join(f"{visible(name)} {value:g}" for name, value in parts.items() if not np.isnan(value))
    yield f"  reward    {reward}{f' ({explained})' if explained else ''}"
    if advantages is not None:
        yield f"  advantage {advantages[sample]:.4g}"
    yield (
        f"  finish    {FINISH_REASONS[batch.finish[sample]]} after {len(response)} tokens, "
        f"engine {batch.engine[sample]}, queued {batch.queued_s[sample]:.3g} s, "
        f"generated {batch.generated_s[sample]:.3g} s"
    )
    span = responses_of(batch, sample)
    yield f"  versions  {_versions(batch.policy_version[span])}"
    if not batch.loss_mask[span].all():
        unsampled = response[~batch.loss_mask[span]].tolist()
        yield f"  unsampled {visible(tokenizer.decode(unsampled, special=True))}"


def _render_gaps(
    batch: Batch, tokenizer: Tokenizer, sample: int, learner_logprobs: NDArray[np.float32]
) -> Iterator[str]:
    span = responses_of(batch, sample)
    tokens = batch.sample_tokens(sample)[int(batch.prompt_lengths[sample]) :]
    yield f"  {'token':<16}{'version':>8}{'rollout':>10}{'learner':>10}{'gap':>10}"
    arrays = (batch.policy_version, batch.loss_mask, batch.rollout_logprobs, learner_logprobs)
    for token, version, sampled, rollout, learner in zip(tokens, *(array[span] for array in arrays), strict=True):
        text = visible(tokenizer.decode([int(token)], special=True))
        if not sampled:
            yield f"  {text:<16}{version:>8}{'unsampled':>10}"
            continue
        gap = f"{'not looked at':>20}" if np.isnan(learner) else f"{learner:>10.4f}{learner - rollout:>+10.4f}"
        yield f"  {text:<16}{version:>8}{rollout:>10.4f}{gap}"


def responses_of(batch: Batch, sample: int) -> slice:
    """Return where the response tokens of a sample are in the arrays [responses]."""
    offsets = batch.response_offsets
    return slice(int(offsets[sample]), int(offsets[sample + 1]))


def _versions(versions: NDArray[np.int32]) -> str:
    """`3 × 5 tokens, 4 × 2 tokens`: spans in the order sampled."""
    spans = [(version, len(list(run))) for version, run in groupby(versions.tolist())]
    return ", ".join(f"{version} × {count} tokens" for version, count in spans) or "none"
