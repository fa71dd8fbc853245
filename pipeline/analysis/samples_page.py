"""One HTML page of samples: some batches of a run, of each some groups, siblings of a group side by side, each token
colored by how learner and engine differ.

Texts of a run may hold anything. The template escapes all of them, and the page's policy lets a browser run the page's
own script alone, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.analysis.drawing import page
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.trajectories import Background, metadata_text, responses_of, tokenizer_of, visible
from pipeline.data.batch import FINISH_REASONS, Batch
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import EvenKeelError, ModelError
from pipeline.ports.learner import looked_at

MOST_TOKENS = 48_000
"""Response tokens on a page: some 3 MB."""
MOST_PROMPT_CHARACTERS = 2_000

BOUNDS = (0.01, 0.05, 0.2, 1.0)
"""Where the colors of |learner - engine| begin, nats: fixed, so that pages of two runs can be compared."""

Pieces = Callable[[Sequence[int]], list[str]]


class Token(NamedTuple):
    """A token as it is shown: its color, what it says where the pointer rests, and its text."""

    color: str
    said: str
    text: str


def write_samples(run_log: RunLog) -> Path | None:
    """Write `samples.html` into the run directory and return its path; None where no batch is committed yet. Reads one
    batch at a time, and keeps what is shown of it."""
    run = RunDirectory(run_log.run_dir)
    store = BatchStore(run.batches)
    committed = store.committed() if run.batches.is_dir() else []
    if not committed:
        return None
    background, chosen, unread = Background(run.path), list[ChosenSamples](), list[str]()
    for index in spread_over(committed):
        try:
            batch = store.read(index, None)
            learner_logprobs = run.learner_logprobs(index, batch.num_response_tokens)
            chosen.append(choose(batch, learner_logprobs, background.advantages(batch)))
        except EvenKeelError as error:
            unread.append(f"Batch {index}: {visible(str(error))}")
    tokenizer = None
    with suppress(ModelError):
        wanted = {one.batch.contract.tokenizer_sha256 for one in chosen}
        if len(wanted) == 1:
            tokenizer = tokenizer_of(run, run_log.recipe.model.path, *wanted)
    lengths = [length for one in chosen for length in one.batch.response_lengths.tolist()]
    most = shares_of(lengths, MOST_TOKENS)
    pieces = (lambda tokens: [f"{token} " for token in tokens]) if tokenizer is None else tokenizer.pieces
    script = resources.files("pipeline.analysis").joinpath("pages/samples.js").read_text(encoding="utf-8")
    text = page(
        "samples.html.j2",
        {},
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        name=run_log.recipe.run.name,
        num_batches=len(committed),
        steps=[one.batch.index for one in chosen],
        groups=[group for one in chosen for group in _groups(one, background, pieces, most)],
        held_out=_held_out(run, unread),
        unread=unread,
        no_answers=background.missing,
        num_samples=len(lengths),
        num_groups=sum(one.num_groups for one in chosen),
        num_cut=sum(length > most for length in lengths),
        most_tokens=most,
        bounds=BOUNDS,
        readable=tokenizer is not None,
        uncolored=[one.batch.index for one in chosen if one.learner_logprobs is None],
    )
    write_atomically(run.path / "samples.html", text)
    return run.path / "samples.html"


def _held_out(run: RunDirectory, unread: list[str]) -> list[dict[str, Any]]:
    """Return what some evaluations kept of their answers, the newest first; note in `unread` those that cannot be
    read."""
    versions = sorted(run.evaluated_versions())
    shown = []
    for version in reversed(spread_over(versions)) if versions else ():
        try:
            kept = run.evaluation(version).get("responses", ())
        except EvenKeelError as error:
            unread.append(f"Evaluation of version {version}: {visible(str(error))}")
            continue
        prompts = [
            dict(
                {name: visible_text(one[name]) for name in ("prompt", "answer", "source")},
                samples=[
                    dict(
                        sample,
                        response=visible_text(sample["response"]),
                        reward=None if sample["reward"] is None else f"{sample['reward']:.4g}",
                    )
                    for sample in one["samples"]
                ],
            )
            for one in kept
        ]
        if prompts:
            shown.append(dict(version=version, prompts=prompts))
    return shown


def _groups(chosen: ChosenSamples, background: Background, pieces: Pieces, most: int) -> list[dict[str, Any]]:
    """Return what the template shows of each group."""
    batch = chosen.batch
    groups = []
    for group, facts in chosen.groups.items():
        members = np.flatnonzero(batch.group == group).tolist()
        problem = int(batch.problem[members[0]])
        asked = background.problem(problem)
        prompt_ids = batch.sample_tokens(members[0])[: int(batch.prompt_lengths[members[0]])].tolist()
        prompt = visible_text("".join(pieces(prompt_ids)))
        before, after = ends_of(len(prompt), MOST_PROMPT_CHARACTERS)
        groups.append(
            dict(
                step=batch.index,
                group=group,
                problem=problem if problem >= 0 else None,
                source=next((visible(name) for name, within in batch.sources.items() if problem in within), None),
                facts=facts,
                scored=chosen.learner_logprobs is not None,
                prompt=(prompt[:before], len(prompt) - before - after, prompt[len(prompt) - after :]),
                answer="" if asked is None else visible_text(asked.answer),
                metadata="" if asked is None or not asked.metadata else visible(metadata_text(asked.metadata)),
                samples=[_sample(chosen, sample, pieces, most) for sample in members],
            )
        )
    return groups


def _sample(chosen: ChosenSamples, sample: int, pieces: Pieces, most: int) -> dict[str, Any]:
    """Return what the template shows of a sample: of a long response its two ends, and how many tokens are left out
    between them. `worst` is the largest gap and which token of the response that is, from 1; it may be one that is left
    out."""
    batch, learner, span = chosen.batch, chosen.learner_logprobs, responses_of(chosen.batch, sample)
    versions = batch.policy_version[span]
    oldest, newest = (int(versions.min()), int(versions.max())) if len(versions) else (None, None)
    parts = {name: float(values[sample]) for name, values in batch.reward_parts.items()}
    ids = batch.sample_tokens(sample)[int(batch.prompt_lengths[sample]) :].tolist()
    before, after = ends_of(len(ids), most)
    worst, unseen = None, False
    if learner is not None:
        gaps = token_gaps(batch, learner)[span]
        worst = (float(gaps.max()), int(gaps.argmax()) + 1) if len(gaps) else None
        unseen = bool(batch.loss_mask[span].any() and not looked_at(batch, learner)[span].any())

    def tokens(first: int, end: int) -> list[Token]:
        found = []
        for place, text in enumerate(pieces(ids[first:end]), start=span.start + first):
            found.append(_token(text, batch, place, None if learner is None else learner[place]))
        return found

    return dict(
        reward=f"{batch.reward[sample]:.4g}" if batch.judged[sample] else None,
        parts={visible(name): f"{value:.4g}" for name, value in parts.items() if not np.isnan(value)},
        advantage=None if chosen.advantages is None else f"{chosen.advantages[sample]:.4g}",
        finish=FINISH_REASONS[batch.finish[sample]],
        truncated=bool(batch.truncated[sample]),
        num_tokens=int(batch.response_lengths[sample]),
        versions=_range(oldest, newest),
        ages=_range(*(None if version is None else batch.index - version for version in (newest, oldest))),
        head=tokens(0, before),
        num_left_out=len(ids) - before - after,
        tail=tokens(len(ids) - after, len(ids)),
        worst=worst,
        unseen=unseen,
    )


def _range(low: int | None, high: int | None) -> str:
    if low is None:
        return "–"
    return f"{low}" if low == high else f"{low} to {high}"


def _token(text: str, batch: Batch, place: int, learner: np.float32 | None) -> Token:
    if not batch.loss_mask[place]:
        return Token("unsampled", "not sampled by an engine", visible_text(text))
    rollout = float(batch.rollout_logprobs[place])
    chance = f"p {np.exp(min(rollout, 0.0)):.3g}"
    if learner is None:
        return Token("", chance, visible_text(text))
    if np.isnan(learner):
        return Token("unseen", f"the learner did not look, {chance}", visible_text(text))
    gap = float(learner) - rollout
    return Token(color_of(gap), f"{gap:+.2g}, {chance}", visible_text(text))


def color_of(gap: float) -> str:
    """Return `more2`, for example, where the learner finds the token likelier, in the second color; empty below the
    first."""
    if not np.isfinite(gap):
        return "broken"
    level = int(np.searchsorted(BOUNDS, abs(gap), side="right"))
    return f"{'more' if gap > 0 else 'less'}{level}" if level else ""


def visible_text(text: str) -> str:
    """Return a text with its line ends as a symbol and a line end, and other unprintable characters as escapes."""
    return visible(text).replace("⏎", "⏎\n")


def ends_of(length: int, most: int) -> tuple[int, int]:
    """Return how much is shown of the beginning and of the end: all, or two thirds of `most` and one."""
    if length <= most:
        return length, 0
    return most - most // 3, most // 3


MOST_BATCHES, MOST_GROUPS, MOST_SAMPLES = 6, 4, 8
"""Of a run, of a batch, of a group: siblings fit beside one another, and a page can be looked through."""


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """All samples of a group, whether they are shown or not."""

    num_samples: int
    num_truncated: int
    reward_spread: float
    """Highest minus lowest reward; 0 where fewer than two samples have one."""
    worst_gap: float | None
    """The largest |learner - engine| of a token, nats; None where the learner looked at none."""


@dataclass(frozen=True, kw_only=True)
class ChosenSamples:
    """What is shown of one batch."""

    batch: Batch
    """Of these samples alone."""
    learner_logprobs: NDArray[np.float32] | None
    """[responses] of these samples; None where the learner has not met the batch."""
    advantages: NDArray[np.float64] | None
    """[samples] of these alone; None where they are not known."""
    num_groups: int
    """Of the whole batch."""
    groups: dict[int, GroupFacts]
    """Of the groups that are shown."""


def spread_over(indices: Sequence[int]) -> list[int]:
    """Return at most MOST_BATCHES of them at equal distances, with the first and the last."""
    places = np.linspace(0, len(indices) - 1, min(len(indices), MOST_BATCHES)).round().astype(int)
    return [indices[place] for place in places.tolist()]


def choose(
    batch: Batch, learner_logprobs: NDArray[np.float32] | None, advantages: NDArray[np.float64] | None = None
) -> ChosenSamples:
    """Choose groups by worst token, spread of rewards and truncated responses, then the first ones; of their samples
    those with the worst token, the highest and the lowest reward and the truncated ones, then the first."""
    worst = np.full(batch.num_samples, -np.inf)
    if learner_logprobs is not None:
        looked = looked_at(batch, learner_logprobs)
        sample = np.repeat(np.arange(batch.num_samples), batch.response_lengths)
        np.maximum.at(worst, sample[looked], token_gaps(batch, learner_logprobs)[looked])
    borders = 1 + np.flatnonzero(batch.group[1:] != batch.group[:-1])
    spans = [span for span in np.split(np.arange(batch.num_samples), borders) if len(span)]
    facts = []
    for span in spans:
        rewards = batch.reward[span][batch.judged[span]]
        facts.append(
            GroupFacts(
                num_samples=len(span),
                num_truncated=int(np.count_nonzero(batch.truncated[span])),
                reward_spread=float(np.ptp(rewards)) if len(rewards) else 0.0,
                worst_gap=None if worst[span].max() == -np.inf else float(worst[span].max()),
            )
        )
    never = -np.inf  # for a measure that is 0 or unknown
    measures: list[Sequence[float]] = [
        [one.worst_gap or never for one in facts],
        [one.reward_spread or never for one in facts],
        [one.num_truncated or never for one in facts],
    ]
    groups = pick(measures, len(facts), MOST_GROUPS)
    chosen = np.zeros(batch.num_samples, np.bool_)
    for group in groups:
        span = spans[group]
        reward = np.where(batch.judged[span], batch.reward[span], -np.inf)
        lowest = np.where(batch.judged[span], -batch.reward[span], -np.inf)
        truncated = np.where(batch.truncated[span], 1.0, -np.inf)
        order = [one.tolist() for one in (worst[span], reward, lowest, truncated)]
        chosen[span[pick(order, len(span), MOST_SAMPLES)]] = True
    of_responses = np.repeat(chosen, batch.response_lengths)
    return ChosenSamples(
        batch=batch.select(chosen),
        learner_logprobs=None if learner_logprobs is None else learner_logprobs[of_responses],
        advantages=None if advantages is None else advantages[chosen],
        num_groups=len(facts),
        groups={int(batch.group[spans[group][0]]): facts[group] for group in groups},
    )


def pick(measures: Sequence[Sequence[float]], size: int, most: int) -> list[int]:
    """Return the places of `most` of `size` items, ascending. In turn each measure takes its highest, and the last turn
    of a round takes the first item that is left. What is -inf is never taken for its measure."""
    ranked = [
        [
            place
            for place in np.argsort(-np.array(values, np.float64), kind="stable").tolist()
            if values[place] > -np.inf
        ]
        for values in measures
    ]
    taken: dict[int, None] = {}
    for round_ in zip_longest(*ranked, range(size)):
        for place in round_:
            if place is not None and len(taken) < most:
                taken.setdefault(place)
    return sorted(taken)


def token_gaps(batch: Batch, learner_logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return [responses] |learner - engine|, nats: 0 for a token that no engine sampled or that the learner did not
    look at, inf where it is not finite."""
    with np.errstate(invalid="ignore"):
        gaps = np.abs(learner_logprobs.astype(np.float64) - batch.rollout_logprobs)
    return np.where(looked_at(batch, learner_logprobs), np.where(np.isfinite(gaps), gaps, np.inf), 0.0)


def shares_of(lengths: Sequence[int], most: int) -> int:
    """Return how much of each may be shown so that it is `most` in all: short ones leave their rest to long ones."""
    left = most
    for count, length in zip(range(len(lengths), 0, -1), sorted(lengths), strict=True):
        if length * count > left:
            return left // count
        left -= length
    return max(lengths, default=0)
