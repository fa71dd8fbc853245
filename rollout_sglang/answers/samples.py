"""From the bytes of an answer to completions: what cannot be is refused here, with the sample and the reason.

    bytes ──element_spans──▶ samples, counted and measured ──pydantic, one by one──▶ Generated
          ──counts against what was asked, shapes──▶ flat arrays ──pipeline.data.border.values──▶ completions

Every size is compared before memory is taken for it. `read_completions` is made to run in a thread: no single step of
it holds Python's lock for longer than one sample takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import get_args

import numpy as np
from pydantic import ValidationError

from pipeline.data.border.attributes import problem_of
from pipeline.data.border.values import Limits, Responses, as_float32, response_faults
from pipeline.data.kept_sets import KeptSets
from pipeline.data.records import Completion, FinishReason
from pipeline.data.routed_experts import RoutedExperts, decode_engine_rows, rows_still_true
from pipeline.errors import BadAnswerError
from pipeline.ports.engines import Sampling
from precision.text.short import quoted
from rollout_sglang.answers.json_scan import element_spans
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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asked for."""

    num_prompt: int
    num_samples: int
    sampling: Sampling

    @property
    def sample_bytes(self) -> int:
        """More than any right answer has for a sample."""
        sampling, tokens = self.sampling, self.sampling.max_new_tokens
        found = SAMPLE_BYTES + tokens * TOKEN_BYTES
        if sampling.kept_set:
            found += tokens * (MOST_KEPT_IDS * ID_BYTES + SCORE_BYTES)
        if (shape := sampling.experts) is not None:
            found += 6 * (self.num_prompt + tokens) * shape.num_layers * shape.per_token  # base64 of int32
        return found

    @property
    def most_bytes(self) -> int:
        """More than any right answer has."""
        return SAMPLE_BYTES + self.num_samples * self.sample_bytes


def scoring_bytes(num_tokens: int, vocab_size: int = 0) -> int:
    """More than any right answer has for the scores of a row of tokens, of each `vocab_size` candidates, too."""
    return SAMPLE_BYTES + num_tokens * (TOKEN_BYTES + (1 + vocab_size) * SCORE_BYTES)


def read_samples(body: bytes, *, expected: int, sample_bytes: int) -> list[Generated]:
    """The samples of an answer. Raises BadAnswerError unless they are `expected`, each of `sample_bytes` at most."""
    try:
        spans = element_spans(body, expected)
    except ValueError as error:
        raise BadAnswerError(f"it answered something else than SGLang's protocol: {error}") from None
    if len(spans) != expected:
        raise BadAnswerError(f"it answered {len(spans)} samples, expected {expected}")
    found = []
    for number, (start, end) in enumerate(spans):
        if end - start > sample_bytes:
            raise BadAnswerError(f"sample {number} has {end - start} bytes, expected at most {sample_bytes}")
        try:
            found.append(GENERATED.validate_json(body[start:end]))
        except ValidationError as error:
            raise BadAnswerError(
                f"sample {number} is something else than SGLang's protocol ({problem_of(error)})"
            ) from None
    return found


def read_completions(body: bytes, asked: Asked, *, engine: int, elapsed_s: float) -> list[Completion]:
    """The records of the samples that `body` holds, for which the caller waited `elapsed_s`. Raises BadAnswerError for
    what cannot be, and EngineVersionError for tokens of weights that are none of ours."""
    samples = read_samples(body, expected=asked.num_samples, sample_bytes=asked.sample_bytes)
    for number, sample in enumerate(samples):
        if (what := _shape_fault(sample, asked)) is not None:
            raise BadAnswerError(f"sample {number}: {what}")
    lengths = [len(sample.output_ids) for sample in samples]
    seconds = [_seconds(sample.meta_info, elapsed_s) for sample in samples]
    versions = [token_versions(sample.meta_info, length) for sample, length in zip(samples, lengths, strict=True)]
    kept = [_kept(sample) if asked.sampling.kept_set else None for sample in samples]
    logprobs = [_logprobs(sample, asked.sampling.kept_set) for sample in samples]
    _check_values(samples, logprobs, versions, seconds, kept, asked)
    return [
        Completion(
            tokens=tuple(sample.output_ids),
            logprobs=tuple(logprobs[number]),
            versions=tuple(versions[number]),
            finish=_finish(sample),
            engine=engine,
            queued_s=seconds[number][0],
            generated_s=seconds[number][1],
            experts=_routes(sample, versions[number], asked),
            kept=kept[number],
        )
        for number, sample in enumerate(samples)
    ]


def _shape_fault(sample: Generated, asked: Asked) -> str | None:
    """What is wrong with the counts of a sample; None: nothing. No token is looked at here."""
    meta, count = sample.meta_info, len(sample.output_ids)
    rows = meta.output_token_logprobs or []
    if meta.finish_reason.type not in _REASONS:
        return f"it ended with {quoted(meta.finish_reason.type)}, expected one of {', '.join(_REASONS)}"
    if isinstance(meta.finish_reason.matched, str):
        # SGLang says "NaN happened" here, and puts an end of text in place of the token that it could not sample.
        return f"it was ended by {quoted(meta.finish_reason.matched)}, but no such text was asked for"
    if count > asked.sampling.max_new_tokens:
        return f"it has {count} tokens, at most {asked.sampling.max_new_tokens} were asked for"
    if meta.prompt_tokens not in (None, asked.num_prompt):
        return f"it answers a prompt of {meta.prompt_tokens} tokens, expected {asked.num_prompt}"
    if meta.completion_tokens not in (None, count):
        return f"it has {count} tokens, and says that it has {meta.completion_tokens}"
    if len(rows) != count:
        return f"it has {count} tokens, but {len(rows)} log-probabilities"
    if [row[1] for row in rows] != sample.output_ids:
        return "its log-probabilities belong to other tokens than it has"
    return None


def _check_values(
    samples: Sequence[Generated],
    logprobs: Sequence[Sequence[float | None]],
    versions: Sequence[Sequence[int]],
    seconds: Sequence[tuple[float, float]],
    kept: Sequence[KeptSets | None],
    asked: Asked,
) -> None:
    """Raises BadAnswerError for a number that may not enter the ledger."""
    try:
        tokens = np.array(list(chain.from_iterable(sample.output_ids for sample in samples)), np.int64)
    except OverflowError:
        raise BadAnswerError("a token id does not fit 64 bits") from None
    waited = as_float32(seconds).reshape(-1, 2)
    responses = Responses(
        offsets=np.cumsum([0, *(len(sample.output_ids) for sample in samples)], dtype=np.int64),
        tokens=tokens,
        logprobs=as_float32(list(chain.from_iterable(logprobs))),
        versions=np.array(list(chain.from_iterable(versions)), np.int64),
        sampled=np.ones(len(tokens), np.bool_),
        may_be_empty=np.array([sample.meta_info.finish_reason.type == "abort" for sample in samples], np.bool_),
        queued_s=waited[:, 0],
        generated_s=waited[:, 1],
        kept=KeptSets.joined([sets for sets in kept if sets is not None]) if asked.sampling.kept_set else None,
    )
    limits = Limits(vocab_size=asked.sampling.vocab_size, max_response_tokens=asked.sampling.max_new_tokens)
    for fault in response_faults(responses, limits):
        raise BadAnswerError(str(fault))


def _logprobs(sample: Generated, kept_set: bool) -> Sequence[float]:
    """Those of the tokens. SGLang writes null for NaN."""
    if kept_set:
        return sample.meta_info.output_token_sampling_logprobs or []
    rows = sample.meta_info.output_token_logprobs or []
    return [float("nan") if row[0] is None else row[0] for row in rows]


def _seconds(meta: MetaInfo, elapsed_s: float) -> tuple[float, float]:
    """Queued and generated. An engine cannot have taken longer than its caller waited, whatever its clock says."""
    generated_s = min(elapsed_s, max(0.0, meta.e2e_latency - (meta.queue_time or 0.0)))
    return elapsed_s - generated_s, generated_s


def token_versions(meta: MetaInfo, num_tokens: int) -> list[int]:
    """Policy version of each response token.

    Older engines answer no spans. There, every token counts as of the version with which the sample ended.
    """
    spans = meta.weight_versions
    if spans is None:
        return [policy_version(meta.weight_version)] * num_tokens
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != num_tokens or edges != sorted(edges):
        raise BadAnswerError(
            f"its version spans end at {quoted(edges[1:])} and do not follow one another over {num_tokens} tokens"
        )
    return np.repeat([policy_version(span.version) for span in spans], np.diff(edges)).tolist() if num_tokens else []


def _finish(sample: Generated) -> FinishReason:
    return next(reason for reason in _REASONS if reason == sample.meta_info.finish_reason.type)


def _kept(sample: Generated) -> KeptSets:
    """The kept sets. An aborted request without tokens comes without them."""
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


def _routes(sample: Generated, versions: Sequence[int], asked: Asked) -> RoutedExperts | None:
    """Of prompt and response. An aborted request comes without them: its routes are unknown."""
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
    return rows_still_true(rows, asked.num_prompt, versions, meta.num_retractions)


def aborted_completion(engine: int, elapsed_s: float) -> Completion:
    """The record of a sample that was aborted before the engine took it up."""
    return Completion(
        tokens=(), logprobs=(), versions=(), finish="abort", engine=engine, queued_s=elapsed_s, generated_s=0.0
    )
