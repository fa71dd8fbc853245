"""Show the samples of a run as rows of plain values, as text for a terminal, and as one HTML page.

The page shows some groups of some batches, the samples of a group side by side, each token colored by the difference
between learner and engine. Texts of a run may hold anything: the template escapes all of them, and the page's policy
lets a browser run nothing and fetch nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.compute import AdvantageComputer
from pipeline.analysis.run_log import RunLog
from pipeline.data.batch import FINISH_REASONS, VERIFIER_FAILED, Batch, StopReason, TokenKind
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import all_recipes, recipe_of_step
from pipeline.data.store import BatchStore
from pipeline.errors import EvenKeelError, ModelError
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
    *("episode", "branch_of", "branched_at", "turns", "turn_rewards", "stopped", "tool_calls", "tool_s", "said"),
)
"""The keys of a row of `sample_rows`, in order. Those from `episode` on are None for samples of one turn."""
MOST_METADATA = 2_000
_SYMBOLS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


class Background:
    """A run's task and recipes, which give answers, metadata and advantages that its batches do not hold. `missing`
    says why there are no answers, where the task cannot be built here."""

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
        if self._task is None or not 0 <= number < self._task.num_prompts:
            return None
        return self._task.problem(number)

    def advantages(self, batch: Batch) -> NDArray[np.float64] | None:
        """Return a whole batch's advantages, [samples], or None where they depend on more than the batch."""
        recipe = recipe_of_step(self._recipes, batch.index)
        by_tokens = recipe.distillation is not None and recipe.distillation.judges_alone
        if recipe.advantage.moving_parts or by_tokens:
            return None
        return AdvantageComputer.of(recipe).compute_advantages(batch).values


def tokenizer_of(run: RunDirectory, model: Path, sha256: str) -> Tokenizer:
    """Return the tokenizer with this digest, from `model`, where the recipe names it, or from a model of the run.
    Raises ModelError where neither has it, for example in a run copied from another machine."""
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


def sample_rows(
    batch: Batch,
    tokenizer: Tokenizer | None,
    background: Background,
    *,
    learner_logprobs: NDArray[np.float32] | None = None,
    advantages: NDArray[np.float64] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield one mapping a sample, or a row of an episode, of plain values that JSON and Parquet can hold.

    `answer` and `metadata` come from the task; `advantage` from `advantages`, or from the recipe for a whole batch.
    Unknown values are None. `prompt` and `response` are decoded with special tokens, and empty without a tokenizer.
    `reward` is None for a sample whose verifier failed. `log_ratio_mean` and `log_ratio_abs_max` are of learner minus
    engine, nats, over the tokens that an engine sampled and the learner scored; None without such a token, or without
    `learner_logprobs` ([responses], natural log, under the batch's contract). The rows of an episode follow each other
    and have its number, `episode`; `branch_of` is the `sample` from which a row branched, or None, and `said` the
    response by who said it: `kind` (of TokenKind), `tokens` (their number) and `text`.
    """
    if learner_logprobs is not None and learner_logprobs.shape != batch.rollout_logprobs.shape:
        raise ValueError(f"learner_logprobs is {learner_logprobs.shape}, expected {batch.rollout_logprobs.shape}")
    judged, gaps = batch.judged, np.full(batch.num_response_tokens, np.nan)
    if learner_logprobs is not None:
        known = looked_at(batch, learner_logprobs) & np.isfinite(learner_logprobs) & np.isfinite(batch.rollout_logprobs)
        np.subtract(learner_logprobs, batch.rollout_logprobs, out=gaps, where=known, dtype=np.float64)
    if advantages is None:
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
            prompt="" if tokenizer is None else tokenizer.decode(prompt.tolist(), special=True),
            answer=None if problem is None else problem.answer,
            metadata=None if problem is None else dict(problem.metadata),
            response="" if tokenizer is None else tokenizer.decode(response.tolist(), special=True),
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
            **_of_episode(batch, sample, tokenizer),
        )


def _of_episode(batch: Batch, sample: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the columns of SAMPLE_COLUMNS that only a row of an episode has."""
    if (of := batch.episodes) is None:
        return dict.fromkeys(SAMPLE_COLUMNS[SAMPLE_COLUMNS.index("episode") :])
    tokens, first, turns = batch.sample_tokens(sample), int(batch.response_offsets[sample]), int(of.turns[sample])
    response = tokens[int(batch.prompt_lengths[sample]) :].tolist()
    before = int(of.turns[:sample].sum())
    rewards = [] if of.turn_rewards is None else of.turn_rewards[before : before + turns].tolist()
    return dict(
        episode=int(of.number[sample]),
        branch_of=int(of.branch_of[sample]) if of.branch_of[sample] >= 0 else None,
        branched_at=int(of.branched_at[sample]),
        turns=turns,
        turn_rewards=[None if np.isnan(reward) else reward for reward in rewards],
        stopped=StopReason(of.stopped[sample]).name.lower(),
        tool_calls=int(of.tool_calls[sample]),
        tool_s=float(of.tool_s[sample]),
        said=[
            dict(
                kind=kind.name.lower(),
                tokens=end - begin,
                text="" if tokenizer is None else tokenizer.decode(response[begin - first : end - first], special=True),
            )
            for kind, begin, end in stretches(batch, sample)
        ],
    )


def stretches(batch: Batch, sample: int) -> list[tuple[TokenKind, int, int]]:
    """Return the kind, first token and end (exclusive), in the arrays [responses], of each longest run of tokens of one
    kind in a response. That of a sample of one turn is one run."""
    span = responses_of(batch, sample)
    kinds = np.zeros(span.stop - span.start, np.uint8) if batch.token_kind is None else batch.token_kind[span]
    borders = [0, *(1 + np.flatnonzero(np.diff(kinds))).tolist(), len(kinds)]
    return [
        (TokenKind(kinds[begin]), span.start + begin, span.start + end)
        for begin, end in pairwise(borders)
        if begin < end
    ]


def render_batch(
    batch: Batch,
    tokenizer: Tokenizer,
    background: Background,
    *,
    learner_logprobs: NDArray[np.float32] | None = None,
    limit: int | None = None,
) -> Iterator[str]:
    """Yield lines of text, without line ends, with the rows of `sample_rows` of the first `limit` samples and, with
    `learner_logprobs`, a line for each token with its gap, learner minus rollout."""
    unfit = [drop for drop in batch.dropped if drop.kind != "solved"]
    dropped = "".join(f"; group {drop.group} dropped: {visible(drop.reason)}" for drop in unfit)
    if solved := sum(drop.kind == "solved" for drop in batch.dropped):
        dropped += f"; {solved} groups of solved problems passed over"
    yield f"batch {batch.index}: {batch.num_samples} samples, {batch.num_response_tokens} response tokens{dropped}"
    rows = sample_rows(batch, tokenizer, background, learner_logprobs=learner_logprobs)
    for sample, row in zip(range(batch.num_samples if limit is None else limit), rows, strict=False):
        row["reward_parts"].pop(VERIFIER_FAILED, None)
        parts = ", ".join(f"{visible(name)} {value:g}" for name, value in row["reward_parts"].items())
        reward = "none: its verifier failed" if row["reward"] is None else f"{row['reward']:g}"
        said, stopped = [("response", visible(row["response"]) or " ")], ""
        if row["episode"] is not None:
            said = [(one["kind"], visible(one["text"]) or " ") for one in row["said"]]
            stopped = (
                f"{row['stopped']}, {row['tool_calls']} tool calls, {row['tool_s']:.3g} s in tools and environment"
            )
        lines = [
            ("prompt", visible(row["prompt"])),
            ("answer", visible(row["answer"] or "")),
            ("metadata", visible(metadata_text(row["metadata"]))),
            *said,
            ("reward", f"{reward} ({parts})" if parts else reward),
            ("advantage", "" if row["advantage"] is None else f"{row['advantage']:.4g}"),
            (
                "finish",
                f"{row['finish']} after {row['response_tokens']} tokens, engine {row['engine']}, "
                f"generated {row['generated_s']:.3g} s",
            ),
            ("versions", span_text(row["version_min"], row["version_max"])),
            ("episode", stopped),
        ]
        of = "" if row["episode"] is None else f", episode {row['episode']}"
        if row["branch_of"] is not None:
            of += f", branched from sample {row['branch_of']} behind {row['branched_at']} tokens"
        yield from ("", f"sample {sample}, group {row['group']}{of}")
        yield from (f"  {name:<9} {text}" for name, text in lines if text)
        if learner_logprobs is None:
            continue
        yield f"  {'token':<16}{'version':>8}{'rollout':>10}{'learner':>10}{'gap':>10}"
        span, tokens = responses_of(batch, sample), batch.sample_tokens(sample)[row["prompt_tokens"] :]
        arrays = (batch.policy_version, batch.loss_mask, batch.rollout_logprobs, learner_logprobs)
        for token, version, sampled, rollout, learner in zip(tokens, *(array[span] for array in arrays), strict=True):
            text = f"  {visible(tokenizer.decode([int(token)], special=True)):<16}{version:>8}"
            gap = f"{'not looked at':>20}" if np.isnan(learner) else f"{learner:>10.4f}{learner - rollout:>+10.4f}"
            yield f"{text}{rollout:>10.4f}{gap}" if sampled else f"{text}{'unsampled':>10}"


def responses_of(batch: Batch, sample: int) -> slice:
    """Return the slice of a sample's response tokens in the arrays [responses]."""
    offsets = batch.response_offsets
    return slice(int(offsets[sample]), int(offsets[sample + 1]))


def metadata_text(metadata: dict[str, Any] | None) -> str:
    """Return a problem's metadata as JSON of at most MOST_METADATA characters; empty without metadata."""
    text = json.dumps(metadata, ensure_ascii=False, default=str) if metadata else ""
    return text if len(text) <= MOST_METADATA else f"{text[:MOST_METADATA]}…"


def span_text(low: int | None, high: int | None) -> str:
    """Return a range as text: `3`, `3 to 4`, or a dash."""
    if low is None:
        return "–"
    return f"{low}" if low == high else f"{low} to {high}"


def visible(text: str, line_end: str = "⏎") -> str:
    """Return a text with line ends and tabs as symbols, and other unprintable characters as escapes."""

    def shown(character: str) -> str:
        if character.isprintable():
            return character
        low = f"\\x{ord(character):02x}"
        return _SYMBOLS.get(character) or (
            character.encode("unicode_escape").decode() if ord(character) > 0x20 else low
        )

    return "".join(map(shown, text)).replace("⏎", line_end)


MOST_TOKENS = 48_000
"""Most response tokens on a page: about 3 MB."""
MOST_PROMPT_CHARACTERS = 2_000
MOST_BATCHES, MOST_GROUPS, MOST_SAMPLES = 6, 4, 8
"""Most batches of a run, groups of a batch and samples of a group on a page."""
BOUNDS = (0.01, 0.05, 0.2, 1.0)
"""Lower bounds of the colors of |learner - engine|, nats: fixed, so that pages of two runs can be compared."""
_LINES = "⏎\n"

Pieces = Callable[[Sequence[int]], list[str]]


class Said(NamedTuple):
    """Tokens of one kind, with what stands above them; nothing does in a sample of one turn."""

    kind: str
    label: str
    tokens: list[Token]


class Token(NamedTuple):
    """A token as the page shows it: its color, the text under the pointer, and its own text."""

    color: str
    said: str
    text: str


def write_samples(run_log: RunLog) -> Path | None:
    """Write `samples.html` and return its path, or None without a committed batch. Holds one whole batch at a time."""
    from pipeline.analysis.drawing import page

    run = RunDirectory(run_log.run_dir)
    store = BatchStore(run.batches)
    committed = store.committed() if run.batches.is_dir() else []
    if not committed:
        return None
    background, unread = Background(run.path), list[str]()
    chosen: list[tuple[Batch, NDArray[np.float32] | None, NDArray[np.float64] | None, dict[int, dict[str, Any]]]] = []
    num_groups = 0
    for index in spread_over(committed):
        try:
            batch = store.read(index, None)
            learner = run.learner_logprobs(index, batch.num_response_tokens)
            advantages = background.advantages(batch)
        except EvenKeelError as error:
            unread.append(f"Batch {index}: {visible(str(error))}")
            continue
        kept, facts = choose(batch, learner)
        num_groups += len(np.unique(batch.group))
        advantages = None if advantages is None else advantages[kept]
        learner = None if learner is None else learner[np.repeat(kept, batch.response_lengths)]
        chosen.append((batch.select(kept), learner, advantages, facts))
    tokenizer = None
    with suppress(ModelError):
        wanted = {batch.contract.tokenizer_sha256 for batch, *_ in chosen}
        if len(wanted) == 1:
            tokenizer = tokenizer_of(run, run_log.recipe.model.path, *wanted)
    lengths = [length for batch, *_ in chosen for length in batch.response_lengths.tolist()]
    # The limit on each length that keeps the total within MOST_TOKENS; short texts leave their rest to others.
    left, most = MOST_TOKENS, max(lengths, default=0)
    for count, length in zip(range(len(lengths), 0, -1), sorted(lengths), strict=True):
        if length * count > left:
            most = left // count
            break
        left -= length
    pieces = (lambda tokens: [f"{token} " for token in tokens]) if tokenizer is None else tokenizer.pieces
    groups = []
    for batch, learner, advantages, facts in chosen:
        rows = list(sample_rows(batch, None, background, learner_logprobs=learner, advantages=advantages))
        for group, of_group in facts.items():
            members = [row for row in rows if row["group"] == group]
            first = members[0]
            prompt = batch.sample_tokens(first["sample"])[: first["prompt_tokens"]].tolist()
            episodes = groupby(members, key=lambda row: batch.episode[row["sample"]])
            shown = dict(
                step=batch.index,
                group=first["group"],
                problem=first["problem"] if first["problem"] >= 0 else None,
                source=None if first["source"] is None else visible(first["source"]),
                prompt=_shown_prompt(prompt, pieces),
                answer=visible(first["answer"] or "", _LINES),
                metadata=visible(metadata_text(first["metadata"])),
                facts=of_group,
                scored=learner is not None,
                samples=[_shown_sample(batch, learner, list(own), prompt, pieces, most) for _, own in episodes],
            )
            groups.append(shown)
    text = page(
        "samples.html.j2",
        {},
        name=run_log.recipe.run.name,
        num_batches=len(committed),
        steps=[batch.index for batch, *_ in chosen],
        groups=groups,
        held_out=_held_out(run, unread),
        unread=unread,
        no_answers=background.missing,
        num_samples=sum(batch.num_episodes for batch, *_ in chosen),
        has_episodes=any(batch.episodes is not None for batch, *_ in chosen),
        num_groups=num_groups,
        num_cut=sum(length > most for length in lengths),
        most_tokens=most,
        bounds=BOUNDS,
        readable=tokenizer is not None,
        uncolored=[batch.index for batch, learner, *_ in chosen if learner is None],
    )
    write_atomically(run.path / "samples.html", text)
    return run.path / "samples.html"


def _held_out(run: RunDirectory, unread: list[str]) -> list[dict[str, Any]]:
    """Return the kept answers of some evaluations, newest first; add a sentence to `unread` for each unreadable one."""
    versions, shown = sorted(run.evaluated_versions()), []
    for version in reversed(spread_over(versions)) if versions else ():
        try:
            found = run.evaluation(version)
        except EvenKeelError as error:
            unread.append(f"Evaluation of version {version}: {visible(str(error))}")
            continue
        kept, answered = found.get("responses", ()), found.get("answered", ())
        by = ", ".join(f"{tokens} of version {other}" for other, tokens in answered)
        for one in kept:
            one |= {name: visible(one[name], _LINES) for name in ("prompt", "answer", "source")}
            for sample in one["samples"]:
                sample["response"] = visible(sample["response"], _LINES)
                sample["reward"] = None if sample["reward"] is None else f"{sample['reward']:.4g}"
        if kept:
            shown.append(dict(version=version, answered=by, prompts=kept))
    return shown


def _shown_prompt(tokens: Sequence[int], pieces: Pieces) -> tuple[str, int, str]:
    """Return a prompt's text; of a long one two thirds of what is shown from its beginning, how many characters are
    left out, and one third from its end."""
    text = visible("".join(pieces(tokens)), _LINES)
    before, after = len(text), 0
    if before > MOST_PROMPT_CHARACTERS:
        after = MOST_PROMPT_CHARACTERS // 3
        before = MOST_PROMPT_CHARACTERS - after
    return text[:before], len(text) - before - after, text[len(text) - after :]


def _shown_sample(
    batch: Batch,
    learner: NDArray[np.float32] | None,
    rows: Sequence[dict[str, Any]],
    prompt: Sequence[int],
    pieces: Pieces,
    most: int,
) -> dict[str, Any]:
    """Return the template's values for a sample, or an episode of some `rows`. A row shows what the model read before
    it unless that stands elsewhere on the page: in the group's `prompt`, or in the row from which it branched."""
    first, shown, turns = rows[0], list[dict[str, Any]](), 0
    numbers = {row["sample"]: number for number, row in enumerate(rows, start=1)}
    for row in rows:
        before = batch.sample_tokens(row["sample"])[: row["prompt_tokens"]].tolist()
        branch = None
        if (of := row["branch_of"]) is not None:
            at, before = row["branched_at"], before[row["branched_at"] :]
            place = at - int(batch.prompt_lengths[of]) + int(batch.response_offsets[of])
            own = sum(kind is TokenKind.SAMPLED and end <= place for kind, _, end in stretches(batch, of))
            branch = (
                f"branches from row {numbers[of]}, {f'behind {own} of its turns' if own else 'before its first turn'}"
            )
        elif before == prompt:
            before = []
        found = _shown_row(batch, learner, row, turns, pieces, most)
        shown.append(found | dict(branch=branch, prompt=_shown_prompt(before, pieces) if before else None))
        turns += row["turns"] or 0
    episode = None
    if first["episode"] is not None:
        episode = dict(turns=turns, tool_calls=first["tool_calls"], tool_s=first["tool_s"])
        episode |= dict(stopped=first["stopped"].replace("_", " "))
    return dict(
        reward=None if first["reward"] is None else f"{first['reward']:.4g}",
        parts={visible(name): f"{value:.4g}" for name, value in first["reward_parts"].items()},
        advantage=None if first["advantage"] is None else f"{first['advantage']:.4g}",
        episode=episode,
        rows=shown,
    )


def _shown_row(
    batch: Batch,
    learner: NDArray[np.float32] | None,
    row: dict[str, Any],
    turns_before: int,
    pieces: Pieces,
    most: int,
) -> dict[str, Any]:
    """Return the template's values for a row; its episode has `turns_before` it in other rows. A long response is cut
    to two thirds of `most` from its beginning and one third from its end. `worst` is the largest gap and the position
    of its token in the response, from 1, shown or not."""
    span, oldest, newest = responses_of(batch, row["sample"]), row["version_min"], row["version_max"]
    ids = batch.sample_tokens(row["sample"])[row["prompt_tokens"] :].tolist()
    is_episode = row["episode"] is not None
    before, after = (len(ids), 0) if len(ids) <= most else (most - most // 3, most // 3)
    worst, unseen = None, False
    if learner is not None and len(ids):
        gaps = token_gaps(batch, learner)[span]
        worst = float(gaps.max()), int(gaps.argmax()) + 1
        unseen = bool(batch.loss_mask[span].any() and not looked_at(batch, learner)[span].any())

    def tokens(first: int, end: int) -> Iterator[Token]:
        for place, piece in enumerate(pieces(ids[first - span.start : end - span.start]), start=first):
            text, rollout = visible(piece, _LINES), float(batch.rollout_logprobs[place])
            chance = f"p {np.exp(min(rollout, 0.0)):.3g}"
            if not batch.loss_mask[place]:
                yield Token("unsampled", "left out of the loss" if is_episode else "not sampled by an engine", text)
            elif learner is None:
                yield Token("", chance, text)
            elif np.isnan(learner[place]):
                yield Token("unseen", f"the learner did not look, {chance}", text)
            else:
                gap = float(learner[place]) - rollout
                level = int(np.searchsorted(BOUNDS, abs(gap), side="right"))
                color = f"{'more' if gap > 0 else 'less'}{level}" if level else ""
                # The CSS class, such as `more2` where the learner's probability is higher.
                yield Token(color if np.isfinite(gap) else "broken", f"{gap:+.2g}, {chance}", text)

    def said(first: int, end: int) -> Iterator[Said]:
        turn = 0
        for kind, low, high in stretches(batch, row["sample"]):
            turn, label = turn + (kind is TokenKind.SAMPLED), kind.name.lower() if is_episode else ""
            low, high = max(low, span.start + first), min(high, span.start + end)
            if low >= high:
                continue
            if kind is not TokenKind.SAMPLED:
                text = visible("".join(pieces(ids[low - span.start : high - span.start])), _LINES)
                label = "repeated: trained in another row" if kind is TokenKind.REPEATED else label
                yield Said(kind.name.lower(), label, [Token("", "masked", text)])
                continue
            if is_episode:
                label = f"turn {turns_before + turn}"
                if row["turn_rewards"] and (reward := row["turn_rewards"][turn - 1]) is not None:
                    label += f", reward {reward:.4g}"
            yield Said("sampled", label, list(tokens(low, high)))

    return dict(
        finish=row["finish"],
        truncated=row["truncated"] and not is_episode,
        num_tokens=len(ids),
        versions=span_text(oldest, newest),
        ages="–" if oldest is None else span_text(batch.index - newest, batch.index - oldest),
        head=list(said(0, before)),
        num_left_out=len(ids) - before - after,
        tail=list(said(len(ids) - after, len(ids))),
        worst=worst,
        unseen=unseen,
    )


def spread_over(indices: Sequence[int]) -> list[int]:
    """Return at most MOST_BATCHES of the indices at equal distances, with the first and the last."""
    places = np.linspace(0, len(indices) - 1, min(len(indices), MOST_BATCHES)).round().astype(int)
    return [indices[place] for place in places.tolist()]


def choose(
    batch: Batch, learner_logprobs: NDArray[np.float32] | None
) -> tuple[NDArray[np.bool_], dict[int, dict[str, Any]]]:
    """Choose groups by worst token, spread of rewards, truncated responses and position, and samples of each group by
    worst token, highest reward, lowest reward, truncation and position. An episode of several turns is one sample, of
    which all rows are chosen. Return a mask, [rows], and facts of each group: its numbers of samples and of truncated
    samples, its highest minus lowest reward (0 for fewer than two rewards), and its largest |learner - engine|, nats
    (None where the learner scored none)."""
    worst, first = np.full(batch.num_episodes, -np.inf), batch.first_rows
    of_reward, of_judged, of_truncated = batch.reward[first], batch.judged[first], batch.truncated[first]
    if learner_logprobs is not None:
        looked = looked_at(batch, learner_logprobs)
        sample = np.repeat(batch.episode, batch.response_lengths)
        np.maximum.at(worst, sample[looked], token_gaps(batch, learner_logprobs)[looked])
    borders = 1 + np.flatnonzero(np.diff(batch.group[first]))
    spans = [span for span in np.split(np.arange(batch.num_episodes), borders) if len(span)]
    facts: list[dict[str, Any]] = []
    for span in spans:
        rewards = of_reward[span][of_judged[span]]
        facts.append(
            dict(
                num_samples=len(span),
                num_truncated=int(np.count_nonzero(of_truncated[span])),
                reward_spread=float(np.ptp(rewards)) if len(rewards) else 0.0,
                worst_gap=None if worst[span].max() == -np.inf else float(worst[span].max()),
            )
        )
    # A measure that is 0 or unknown chooses nothing.
    measures = [[one[key] or -np.inf for one in facts] for key in ("worst_gap", "reward_spread", "num_truncated")]
    groups = pick(measures, len(facts), MOST_GROUPS)
    chosen = np.zeros(batch.num_episodes, np.bool_)
    for group in groups:
        span = spans[group]
        reward = np.where(of_judged[span], of_reward[span], -np.inf)
        lowest = np.where(of_judged[span], -of_reward[span], -np.inf)
        truncated = np.where(of_truncated[span], 1.0, -np.inf)
        order = [one.tolist() for one in (worst[span], reward, lowest, truncated)]
        chosen[span[pick(order, len(span), MOST_SAMPLES)]] = True
    return chosen[batch.episode], {int(batch.group[first][spans[group][0]]): facts[group] for group in groups}


def pick(measures: Sequence[Sequence[float]], size: int, most: int) -> list[int]:
    """Return the indices of `most` of `size` items, ascending. In round r each measure takes its r-th highest item, and
    then item r is taken; items already taken are skipped. An item at -inf is never taken for its measure."""
    ranked = []
    for values in measures:
        order = np.argsort(-np.array(values, np.float64), kind="stable").tolist()
        ranked.append([place for place in order if values[place] > -np.inf])
    taken: dict[int, None] = {}
    for round_ in zip_longest(*ranked, range(size)):
        for place in round_:
            if place is not None and len(taken) < most:
                taken.setdefault(place)
    return sorted(taken)


def token_gaps(batch: Batch, learner_logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return |learner - engine|, [responses], nats: 0 where one of them did not score, inf where it is not finite."""
    with np.errstate(invalid="ignore"):
        gaps = np.abs(learner_logprobs.astype(np.float64) - batch.rollout_logprobs)
    return np.where(looked_at(batch, learner_logprobs), np.where(np.isfinite(gaps), gaps, np.inf), 0.0)
