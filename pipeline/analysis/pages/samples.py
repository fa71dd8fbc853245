"""One HTML page of samples: siblings of a group side by side, each token colored by how learner and engine differ.

Texts of a run may hold anything. The template escapes all of them, and the page's policy lets a browser run the page's
own script alone, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from numpy.typing import NDArray

from pipeline.analysis.pages.chosen_samples import ChosenSamples, choose, shares_of, spread_over, token_gaps
from pipeline.analysis.pages.style import page_style
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.trajectories import Background, metadata_text, tokenizer_of, visible
from pipeline.data.batch import FINISH_REASONS, Batch
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import EvenKeelError, ModelError
from pipeline.ports.learner import looked_at
from pipeline.tasks.tokenizer import Tokenizer

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


@dataclass
class _Found:
    """What is shown of a run, and what is not."""

    committed: list[int]
    background: Background
    chosen: list[ChosenSamples] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def write_samples(run_log: RunLog) -> Path | None:
    """Write `samples.html` into the run directory and return its path; None where no batch is committed yet."""
    run = RunDirectory(run_log.run_dir)
    committed = BatchStore(run.batches).committed() if run.batches.is_dir() else []
    if not committed:
        return None
    page = run.path / "samples.html"
    write_atomically(page, _render(run_log, run, _find(run, committed)))
    return page


def _find(run: RunDirectory, committed: list[int]) -> _Found:
    """Reads one batch at a time, and keeps what is shown of it."""
    found, store = _Found(committed, Background(run.path)), BatchStore(run.batches)
    for index in spread_over(committed):
        try:
            batch = store.read(index, None)
            learner_logprobs = run.learner_logprobs(index, batch.num_response_tokens)
            found.chosen.append(choose(batch, learner_logprobs, found.background.advantages(batch)))
        except EvenKeelError as error:
            found.unread.append(f"Batch {index}: {visible(str(error))}")
    return found


def _render(run_log: RunLog, run: RunDirectory, found: _Found) -> str:
    tokenizer = _tokenizer(run_log, run, found.chosen)
    lengths = [length for one in found.chosen for length in one.batch.response_lengths.tolist()]
    most = shares_of(lengths, MOST_TOKENS)
    pieces = _ids if tokenizer is None else tokenizer.pieces
    groups = [group for one in found.chosen for group in _groups(one, found.background, pieces, most)]
    held_out = _held_out(run, found)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    folder = resources.files("pipeline.analysis.pages")
    script = folder.joinpath("samples.js").read_text(encoding="utf-8")
    return environment.from_string(folder.joinpath("samples.html.j2").read_text(encoding="utf-8")).render(
        style=page_style(),
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        name=run_log.recipe.run.name,
        num_batches=len(found.committed),
        steps=[one.batch.index for one in found.chosen],
        unread=found.unread,
        groups=groups,
        held_out=held_out,
        no_answers=found.background.missing,
        num_samples=len(lengths),
        num_groups=sum(one.num_groups for one in found.chosen),
        num_cut=sum(length > most for length in lengths),
        most_tokens=most,
        bounds=BOUNDS,
        readable=tokenizer is not None,
        uncolored=[one.batch.index for one in found.chosen if one.learner_logprobs is None],
    )


def _tokenizer(run_log: RunLog, run: RunDirectory, chosen: Sequence[ChosenSamples]) -> Tokenizer | None:
    """The one that the batches were sampled with; None where it is not there, or where they differ."""
    wanted = {one.batch.contract.tokenizer_sha256 for one in chosen}
    with suppress(ModelError):
        if len(wanted) == 1:
            return tokenizer_of(run, run_log.recipe.model.path, *wanted)
    return None


def _ids(tokens: Sequence[int]) -> list[str]:
    return [f"{token} " for token in tokens]


def _held_out(run: RunDirectory, found: _Found) -> list[dict[str, Any]]:
    """What some evaluations kept of their answers, the newest first."""
    versions = sorted(run.evaluated_versions())
    shown = []
    for version in reversed(spread_over(versions)) if versions else ():
        try:
            kept = run.evaluation(version).get("responses", ())
        except EvenKeelError as error:
            found.unread.append(f"Evaluation of version {version}: {visible(str(error))}")
            continue
        prompts = [
            dict(
                {name: visible_text(one[name]) for name in ("prompt", "answer", "source")},
                samples=[
                    dict(sample, response=visible_text(sample["response"]), reward=_number(sample["reward"]))
                    for sample in one["samples"]
                ],
            )
            for one in kept
        ]
        if prompts:
            shown.append(dict(version=version, prompts=prompts))
    return shown


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _groups(chosen: ChosenSamples, background: Background, pieces: Pieces, most: int) -> list[dict[str, Any]]:
    """What the template shows of each group."""
    batch, learner = chosen.batch, chosen.learner_logprobs
    gaps = None if learner is None else token_gaps(batch, learner)
    looked = None if learner is None else looked_at(batch, learner)
    groups = []
    for group, facts in chosen.groups.items():
        members = np.flatnonzero(batch.group == group).tolist()
        problem = int(batch.problem[members[0]])
        asked = background.problem(problem)
        prompt = visible_text("".join(pieces(_prompt(batch, members[0]))))
        before, after = ends_of(len(prompt), MOST_PROMPT_CHARACTERS)
        groups.append(
            dict(
                step=batch.index,
                group=group,
                problem=problem if problem >= 0 else None,
                source=next((visible(name) for name, within in batch.sources.items() if problem in within), None),
                facts=facts,
                scored=learner is not None,
                prompt=(prompt[:before], len(prompt) - before - after, prompt[len(prompt) - after :]),
                answer="" if asked is None else visible_text(asked.answer),
                metadata="" if asked is None or not asked.metadata else visible(metadata_text(asked.metadata)),
                samples=[
                    dict(
                        **_sample(batch, sample),
                        advantage=None if chosen.advantages is None else f"{chosen.advantages[sample]:.4g}",
                        **_response(chosen, sample, pieces, most),
                        worst=None if gaps is None else _worst(gaps[_span(batch, sample)]),
                        unseen=looked is not None and _unseen(batch, looked, sample),
                    )
                    for sample in members
                ],
            )
        )
    return groups


def _sample(batch: Batch, sample: int) -> dict[str, Any]:
    versions = batch.policy_version[_span(batch, sample)]
    oldest, newest = (int(versions.min()), int(versions.max())) if len(versions) else (None, None)
    parts = {name: float(values[sample]) for name, values in batch.reward_parts.items()}
    return dict(
        reward=f"{batch.reward[sample]:.4g}" if batch.judged[sample] else None,
        parts={visible(name): f"{value:.4g}" for name, value in parts.items() if not np.isnan(value)},
        finish=FINISH_REASONS[batch.finish[sample]],
        truncated=bool(batch.truncated[sample]),
        num_tokens=int(batch.response_lengths[sample]),
        versions=_range(oldest, newest),
        ages=_range(*(None if version is None else batch.index - version for version in (newest, oldest))),
    )


def _worst(gaps: NDArray[np.float64]) -> tuple[float, int] | None:
    """The largest, and which token of the response that is, from 1; it may be one that is left out."""
    return (float(gaps.max()), int(gaps.argmax()) + 1) if len(gaps) else None


def _unseen(batch: Batch, looked: NDArray[np.bool_], sample: int) -> bool:
    """Whether the learner looked at nothing that an engine sampled."""
    span = _span(batch, sample)
    return bool(batch.loss_mask[span].any() and not looked[span].any())


def _range(low: int | None, high: int | None) -> str:
    if low is None:
        return "–"
    return f"{low}" if low == high else f"{low} to {high}"


def _response(chosen: ChosenSamples, sample: int, pieces: Pieces, most: int) -> dict[str, Any]:
    """The tokens of a response; of a long one its two ends, and how many are left out between them."""
    batch, span = chosen.batch, _span(chosen.batch, sample)
    ids = batch.sample_tokens(sample)[int(batch.prompt_lengths[sample]) :].tolist()
    before, after = ends_of(len(ids), most)
    learner = None if chosen.learner_logprobs is None else chosen.learner_logprobs[span]

    def tokens(first: int, end: int) -> list[Token]:
        texts = pieces(ids[first:end])
        return [
            _token(text, batch, span.start + first + place, None if learner is None else learner[first + place])
            for place, text in enumerate(texts)
        ]

    return dict(head=tokens(0, before), num_left_out=len(ids) - before - after, tail=tokens(len(ids) - after, len(ids)))


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
    """`more2`, for example: the learner finds the token likelier, in the second color; empty below the first."""
    if not np.isfinite(gap):
        return "broken"
    level = int(np.searchsorted(BOUNDS, abs(gap), side="right"))
    return f"{'more' if gap > 0 else 'less'}{level}" if level else ""


def visible_text(text: str) -> str:
    """Several lines that show what they hold: line ends as a symbol and a line end, other unprintable characters as
    escapes."""
    return visible(text).replace("⏎", "⏎\n")


def ends_of(length: int, most: int) -> tuple[int, int]:
    """How much is shown of the beginning and of the end: all, or two thirds of `most` and one."""
    if length <= most:
        return length, 0
    return most - most // 3, most // 3


def _prompt(batch: Batch, sample: int) -> list[int]:
    tokens: NDArray[np.int32] = batch.sample_tokens(sample)[: int(batch.prompt_lengths[sample])]
    return list(tokens.tolist())


def _span(batch: Batch, sample: int) -> slice:
    offsets = batch.response_offsets
    return slice(int(offsets[sample]), int(offsets[sample + 1]))
