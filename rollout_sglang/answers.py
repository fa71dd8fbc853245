"""From the bytes of an answer to completions: what cannot be is refused here, with the sample and the reason.

    parts ──ElementCutter──▶ a sample, counted and measured ──pydantic──▶ Generated
          ──counts against what was asked, shapes──▶ arrays ──pipeline.data.batch_values──▶ a completion

Every size is compared before memory is taken for it. An answer is read while it comes, sample by sample: what there is
of it at once are the arrays of the samples so far, and the bytes of one sample.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from pipeline.background import beside_loop
from pipeline.data.batch import Completion, FinishReason, KeptSets, Sampling
from pipeline.data.batch_values import HIGHEST_LOGPROB, Limits, Responses, as_float32, response_faults
from pipeline.data.routed_experts import RoutedExperts, decode_engine_rows, rows_still_true
from pipeline.errors import BadAnswerError
from precision.settings import problem_of
from precision.text import quoted
from rollout_sglang.protocol import GENERATED, Generated, MetaInfo, policy_version

SAMPLE_BYTES = 1 << 16
"""What a sample has beside its tokens: names, versions, a message."""
TOKEN_BYTES = 512
"""For a token: its id twice (20), a log-probability (24) and its text, of which the longest of known tokenizers has 128
characters of which JSON writes some as two bytes, rarely more. Honest answers have about 50."""
ID_BYTES = 12
"""An id in a kept set, with its comma."""
MOST_KEPT_IDS = 1 << 12
"""SGLang ends a request that keeps more for one token."""
SCORE_BYTES = 64
"""A scored token: log-probability, id, null."""
_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asked for."""

    num_prompt: int
    num_samples: int
    sampling: Sampling
    keeps_kv: bool = False
    """Whether keys and values outlast an update of the weights, so that nothing is read again."""
    late_tokens: int = 0
    """How many tokens the old weights have sampled when a server counts what it has sampled so far as theirs, and which
    it counts to the new ones."""

    sample_bytes: int = field(init=False)
    """More than any right answer has for a sample."""

    def __post_init__(self) -> None:
        sampling, tokens = self.sampling, self.sampling.max_new_tokens
        most = SAMPLE_BYTES + tokens * TOKEN_BYTES
        if sampling.kept_set:
            most += tokens * (MOST_KEPT_IDS * ID_BYTES + SCORE_BYTES)
        if (shape := sampling.experts) is not None:
            most += 6 * (self.num_prompt + tokens) * shape.num_layers * shape.per_token  # base64 of int32
        object.__setattr__(self, "sample_bytes", most)


class NoListError(ValueError):
    """Bytes that are no JSON list of objects of the expected size."""


class SampleReader(Generic[T]):
    """Makes something of each sample of an answer, in order, while the answer comes. Methods raise BadAnswerError for
    what cannot be, and what `make` raises."""

    def __init__(self, make: Callable[[int, Generated], T], *, expected: int, sample_bytes: int) -> None:
        """`make` is given each sample's number and the sample; `expected` samples of `sample_bytes` at most are."""
        self._make = make
        self._expected = expected
        self._cutter = ElementCutter(most=expected, element_bytes=sample_bytes)
        self._made: list[T] = []

    def add(self, part: bytes) -> None:
        """Take the next bytes of the answer."""
        try:
            for sample in self._cutter.add(part):
                number = len(self._made)
                try:
                    parsed = GENERATED.validate_json(sample)
                except ValidationError as error:
                    raise BadAnswerError(
                        f"sample {number} is something else than SGLang's protocol ({problem_of(error)})"
                    ) from None
                self._made.append(self._make(number, parsed))
        except NoListError as error:
            raise BadAnswerError(f"it answered something else than SGLang's protocol: {error}") from None

    def end(self) -> list[T]:
        """Return what was made: there are no more bytes."""
        try:
            self._cutter.end()
        except NoListError as error:
            raise BadAnswerError(f"it answered something else than SGLang's protocol: {error}") from None
        if len(self._made) != self._expected:
            raise BadAnswerError(f"it answered {len(self._made)} samples, expected {self._expected}")
        return self._made


def completion_reader(asked: Asked, *, engine: int, waited_s: Callable[[], float]) -> SampleReader[Completion]:
    """Return a reader of the samples that were asked for; `waited_s` says for how long the caller has waited by now.
    Its methods raise EngineVersionError, too, for tokens of weights that are none of ours."""
    return SampleReader(
        lambda number, sample: _completion(number, sample, asked, engine, waited_s()),
        expected=asked.num_samples,
        sample_bytes=asked.sample_bytes,
    )


def _completion(number: int, sample: Generated, asked: Asked, engine: int, elapsed_s: float) -> Completion:
    if (what := _shape_fault(sample, asked)) is not None:
        raise BadAnswerError(f"sample {number}: {what}")
    meta = sample.meta_info
    if meta.finish_reason.type == "abort" and asked.sampling.kept_set and meta.output_token_sampling_mask is None:
        # It was retracted, and aborted while it waited: SGLang answers the tokens that it had, and no kept sets.
        return aborted_completion(engine, elapsed_s)
    try:
        tokens = np.array(sample.output_ids, np.int64)
    except OverflowError:
        raise BadAnswerError(f"sample {number}: a token id does not fit 64 bits") from None
    if asked.sampling.kept_set:
        logprobs = meta.output_token_sampling_logprobs or []
    else:  # SGLang writes null for NaN
        logprobs = [float("nan") if row[0] is None else row[0] for row in meta.output_token_logprobs or []]
    # An engine cannot have taken longer than its caller waited, whatever its clock says.
    generated_s = min(elapsed_s, max(0.0, meta.e2e_latency - (meta.queue_time or 0.0)))
    responses = Responses(
        offsets=np.array([0, len(tokens)], np.int64),
        tokens=tokens,
        logprobs=as_float32(logprobs),
        versions=token_versions(meta, len(tokens), asked.late_tokens),
        sampled=np.broadcast_to(np.True_, len(tokens)),
        may_be_empty=np.array([meta.finish_reason.type == "abort"]),
        queued_s=as_float32([elapsed_s - generated_s]),
        generated_s=as_float32([generated_s]),
        kept=_kept(sample) if asked.sampling.kept_set else None,
    )
    limits = Limits(vocab_size=asked.sampling.vocab_size, max_response_tokens=asked.sampling.max_new_tokens)
    for fault in response_faults(responses, limits):
        raise BadAnswerError(f"sample {number}: {fault.what}")
    versions = responses.versions
    return Completion(
        tokens=tokens.astype(np.int32),
        logprobs=responses.logprobs,
        versions=(
            np.broadcast_to(np.int32(versions[0]), len(versions))  # mostly all are one, which takes no memory
            if versions.strides == (0,) and len(versions)
            else versions.astype(np.int32)
        ),
        loss_mask=responses.sampled,
        finish=next(reason for reason in _REASONS if reason == meta.finish_reason.type),
        engine=engine,
        queued_s=float(responses.queued_s[0]),
        generated_s=float(responses.generated_s[0]),
        experts=_routes(sample, responses.versions, asked),
        kept=responses.kept,
    )


def _shape_fault(sample: Generated, asked: Asked) -> str | None:
    """Return what is wrong with the counts of a sample; None: nothing. No token is looked at here."""
    meta, count = sample.meta_info, len(sample.output_ids)
    rows = meta.output_token_logprobs or []
    if meta.finish_reason.type not in _REASONS:
        return f"it ended with {quoted(meta.finish_reason.type)}, expected one of {', '.join(_REASONS)}"
    if isinstance(meta.finish_reason.matched, str):
        # SGLang says "NaN happened" here, and puts an end of text in place of the token that it could not sample.
        return f"it was ended by {quoted(meta.finish_reason.matched)}, but no such text was asked for"
    if count > asked.sampling.max_new_tokens:
        return f"it has {count} tokens, at most {asked.sampling.max_new_tokens} were asked for"
    if meta.finish_reason.type == "length" and count < asked.sampling.max_new_tokens:
        # SGLang lowers what is asked for, without a word, to what all its keys and values hold.
        return (
            f"it was cut off at {count} of {asked.sampling.max_new_tokens} tokens: with a prompt of {asked.num_prompt} "
            "they do not fit the engine's keys and values (max_total_num_tokens in its log) or its context; raise "
            "--mem-fraction-static in rollout.extra_args or rollout.tensor_parallel, or lower rollout.max_new_tokens"
        )
    if meta.prompt_tokens not in (None, asked.num_prompt):
        return f"it answers a prompt of {meta.prompt_tokens} tokens, expected {asked.num_prompt}"
    if meta.completion_tokens not in (None, count):
        return f"it has {count} tokens, and says that it has {meta.completion_tokens}"
    if len(rows) != count:
        return f"it has {count} tokens, but {len(rows)} log-probabilities"
    if [row[1] for row in rows] != sample.output_ids:
        return "its log-probabilities belong to other tokens than it has"
    return None


def token_versions(meta: MetaInfo, num_tokens: int, late_tokens: int = 0) -> NDArray[np.int64]:
    """Return the policy version of each response token; of `late_tokens` see Asked.

    Older engines answer no spans. There, every token counts as of the version with which the sample ended.
    """
    spans = meta.weight_versions
    if spans is None:
        return np.broadcast_to(np.int64(policy_version(meta.weight_version)), num_tokens)
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != num_tokens or edges != sorted(edges):
        raise BadAnswerError(
            f"its version spans end at {quoted(edges[1:])} and do not follow one another over {num_tokens} tokens"
        )
    if not num_tokens:
        return np.zeros(0, np.int64)
    if len(spans) == 1:
        return np.broadcast_to(np.int64(policy_version(spans[0].version)), num_tokens)
    begin = np.minimum(np.array(edges[1:-1]) + late_tokens, num_tokens)
    counts = np.diff([0, *begin, num_tokens])
    return np.repeat(np.array([policy_version(span.version) for span in spans], np.int64), counts)


def _kept(sample: Generated) -> KeptSets:
    """Return the kept sets. A request without tokens, which was aborted, comes without them."""
    meta, tokens = sample.meta_info, sample.output_ids
    masks, logprobs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if not tokens:
        return KeptSets.empty(0)
    if masks is None or logprobs is None:
        raise BadAnswerError(
            "engine did not say which tokens top_p and top_k left; serve with SGLang 0.5.23, or set rollout.kept_set "
            "to false"
        )
    if len(masks) != len(tokens) or len(logprobs) != len(tokens):
        raise BadAnswerError(
            f"engine answered {len(masks)} kept sets and {len(logprobs)} log-probabilities for {len(tokens)} response "
            "tokens"
        )
    if max(map(len, masks)) > MOST_KEPT_IDS:
        raise BadAnswerError(f"a kept set has {max(map(len, masks))} ids, expected at most {MOST_KEPT_IDS}")
    try:
        kept = KeptSets.of(masks)
        kept.check(np.array(tokens, np.int32), np.ones(len(tokens), np.bool_))
    except (ValueError, OverflowError) as error:
        raise BadAnswerError(f"engine answered kept sets that cannot be: {error}") from error
    return kept


def _routes(sample: Generated, versions: NDArray[np.integer], asked: Asked) -> RoutedExperts | None:
    """Return the experts of prompt and response. An aborted request comes without them: its routes are unknown."""
    meta, shape = sample.meta_info, asked.sampling.experts
    if shape is None:
        return None
    num_tokens = asked.num_prompt + len(versions)
    if meta.routed_experts is None and meta.finish_reason.type == "abort":
        return RoutedExperts.unknown(num_tokens, shape)
    if meta.routed_experts is None or meta.num_retractions is None:
        raise BadAnswerError(
            "engine did not say which experts its tokens went to; start it with --enable-return-routed-experts "
            "(SGLang 0.5.23), or set rollout.replay_experts to false"
        )
    try:
        rows = decode_engine_rows(meta.routed_experts, num_tokens, shape)
    except ValueError as error:
        raise BadAnswerError(f"engine answered {error}") from error
    if asked.keeps_kv:  # a retraction is for want of memory then, at a place that the answer does not tell
        return rows.forget(len(rows)) if meta.num_retractions else rows
    return rows_still_true(rows, asked.num_prompt, versions, meta.num_retractions)


def aborted_completion(engine: int, elapsed_s: float) -> Completion:
    """Return the record of a sample that was aborted, and of which nothing can be stored."""
    nothing = Completion.given((), ())
    return replace(nothing, finish="abort", engine=engine, queued_s=elapsed_s)


_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_CASE_BIT = np.uint8(0x20)
"""Of ASCII: with it set, [ is {, and ] is }."""
_OPENING, _CLOSING = ord("{"), ord("}")


class ElementCutter:
    """Of a JSON list of lists or objects. What lies between its elements is looked at, what lies in them is not."""

    def __init__(self, *, most: int, element_bytes: int) -> None:
        """Up to `most` elements of up to `element_bytes` each are expected."""
        self.count = 0
        """Elements that have begun."""
        self._most = most
        self._element_bytes = element_bytes
        self._depth = self._quotes_before = self._backslashes_before = 0
        self._open: bytearray | None = None
        """What there is of an element that has not ended; None between two."""
        self._between = b""
        """What was seen since the last element, without blanks."""

    def add(self, part: bytes) -> Iterator[bytes]:
        """Yield the elements that end in `part`, which follows the parts before it; all are to be taken before the next
        one is added. Raises NoListError when this can be no such list, or is a larger one than was expected."""
        done = 0
        for edge in self._edges(part):
            opened = self._keep(part[done:edge])
            if opened is not None:
                yield bytes(opened)
                self._open = None
            else:
                if self._between != (b"," if self.count else b"["):
                    raise NoListError("it is no JSON list of objects")
                if self.count == self._most:
                    raise NoListError(f"it has more than {self._most} elements")
                self.count += 1
                self._open, self._between = bytearray(), b""
            done = edge
        self._keep(part[done:])

    def end(self) -> None:
        """End the list: there are no more parts. Raises NoListError unless the list has ended with them."""
        if self._open is not None or self._between != (b"]" if self.count else b"[]"):
            raise NoListError("it is no JSON list of objects, or not a whole one")

    def _keep(self, piece: bytes) -> bytearray | None:
        """Add bytes to the element that is open, and return it; None between two, where few bytes are right."""
        if self._open is None:
            self._between += b"".join(piece.split())
            if len(self._between) > 2:
                raise NoListError("it is no JSON list of objects")
            return None
        if len(self._open) + len(piece) > self._element_bytes:
            raise NoListError(f"its element {self.count - 1} has more than {self._element_bytes} bytes")
        self._open += piece
        return self._open

    def _edges(self, part: bytes) -> list[int]:
        """Where elements begin and end, by turns: the places of brackets that lead into depth 2, and behind those that
        lead out of it."""
        block = np.frombuffer(part, np.uint8)
        quotes = np.flatnonzero(block == _QUOTE)
        plain, backslashes = block != _BACKSLASH, self._backslashes_before
        self._backslashes_before = 0
        if backslashes or not plain.all():
            others = np.flatnonzero(plain)
            # The last byte before each quote that is no backslash; the ones of the block before count as bytes before
            # byte 0. A quote after an odd number of backslashes is part of its text.
            last = np.concatenate([[-1 - backslashes], others])[np.searchsorted(others, quotes)]
            self._backslashes_before = len(block) - 1 - int(others[-1]) if len(others) else len(block) + backslashes
            quotes = quotes[(quotes - 1 - last) % 2 == 0]
        folded = block | _CASE_BIT
        places = np.flatnonzero((folded == _OPENING) | (folded == _CLOSING))
        if len(quotes) or self._quotes_before % 2:
            places = places[(np.searchsorted(quotes, places) + self._quotes_before) % 2 == 0]
        opens = folded[places] == _OPENING
        depths = self._depth + np.cumsum(np.where(opens, 1, -1))
        self._quotes_before += len(quotes)
        self._depth = int(depths[-1]) if len(depths) else self._depth
        is_edge = np.where(opens, depths == 2, depths == 1)
        return list(map(int, (places + ~opens)[is_edge]))


PIECE_BYTES = 1 << 16
"""What is read at once. Where an answer has no more, it is read on the loop, which takes about a millisecond."""


async def read_answer(parts: AsyncIterator[bytes], reader: SampleReader[T]) -> list[T]:
    """Return what `reader` makes of the samples of an answer that comes in `parts`. Raises what the reader raises."""
    held, is_small = bytearray(), True
    async for part in parts:
        held += part
        if len(held) > PIECE_BYTES:
            is_small = False
            await beside_loop(reader.add, bytes(held))
            held.clear()
    if is_small:
        reader.add(bytes(held))
    else:
        await beside_loop(reader.add, bytes(held))
    return reader.end()


_WHOLE = 1e-3
"""How far the probabilities of a whole distribution may be from 1 in all."""


def input_logprobs(row: Sequence[int], sample: Generated) -> NDArray[np.float32]:
    """[n - 1] of tokens 1 … n - 1. Raises BadAnswerError. Nobody sampled these tokens: one may be as unlikely as
    float32 can say."""
    scored = sample.meta_info.input_token_logprobs or []
    # SGLang names the last id of the vocabulary 0 here (it clips the ids of image tokens), yet scores the real one.
    foreign = sum(named not in (token, 0) for token, (_, named, _) in zip(row, scored, strict=False))
    values = [value for value, _, _ in scored[1:] if value is not None]
    if foreign or len(scored) != len(row) or len(values) != len(row) - 1:
        raise BadAnswerError(f"it scored {len(values)} of {len(row) - 1} tokens, {foreign} of them others than asked")
    found = as_float32(values)
    if not np.all(np.isfinite(found) & (found <= HIGHEST_LOGPROB)):
        raise BadAnswerError(
            f"it scored a token by {found[~(np.isfinite(found) & (found <= HIGHEST_LOGPROB))][0]:g}, expected a "
            "log-probability"
        )
    return found


def tempered_totals(
    row: Sequence[int], sample: Generated, temperature: float, kept: Sequence[NDArray[np.int32]]
) -> NDArray[np.float64]:
    """For each of tokens 1 … n-1, log sum p^(1/T) over the distribution from which it came, or what was kept of it."""
    distributions = (sample.meta_info.input_top_logprobs or [])[1:]
    if len(distributions) != len(row) - 1 or not all(distributions):
        raise BadAnswerError(f"it gave {len(distributions)} of {len(row) - 1} distributions")
    totals = []
    for place, distribution in enumerate(distributions):
        answered = [(value, token) for value, token, _ in distribution or () if value is not None]
        logprobs = np.array([value for value, _ in answered], np.float64)
        with np.errstate(over="ignore"):
            whole = float(np.exp(logprobs).sum())
        if not abs(whole - 1.0) <= _WHOLE:
            raise BadAnswerError(
                f"it gave distributions of {whole:.4g} in all, expected 1; start it with a larger limit for "
                "top_logprobs_num"
            )
        if kept and len(kept[place]):
            logprobs = logprobs[np.isin([token for _, token in answered], kept[place])]
        totals.append(np.logaddexp.reduce(logprobs / temperature))
    return np.array(totals)
