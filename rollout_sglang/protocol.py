"""What SGLang and its router answer, as far as it is read here. Unknown fields are ignored, missing ones refused."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter

from pipeline.data.kept_sets import KeptSets
from pipeline.data.records import Completion, FinishReason
from pipeline.data.routed_experts import ExpertShape, RoutedExperts, decode_engine_rows, rows_still_true
from pipeline.errors import EngineUnavailableError, EngineVersionError

UNKNOWN_ENGINE = 2**16 - 1
"""Index of the engine of a completion that came through a router, which does not say who answered."""

UNVERIFIED = "unverified-"
"""Begins the weight version of an engine that has not been verified yet; the policy version follows."""
INVALIDATED = "unverified"
"""Weight version of an engine that failed its check: it must be given weights again."""


class Answer(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class VersionSpan(Answer):
    """Response tokens start ≤ i < end were sampled with the weights named `version`."""

    version: str
    start: int
    end: int


class Finish(Answer):
    """Why a sample ended: stop, length or abort."""

    type: str
    message: str | None = None


TokenLogprob = Annotated[tuple[float | None, int, str | None], "log-probability (None for a first token), id, text"]


class MetaInfo(Answer):
    """What SGLang reports about one sample. Only these fields are there for one that was aborted while it waited."""

    finish_reason: Finish
    weight_version: str
    weight_versions: tuple[VersionSpan, ...] | None = None
    """Absent before 0.5.19."""
    input_token_logprobs: tuple[TokenLogprob, ...] | None = None
    input_top_logprobs: tuple[tuple[TokenLogprob, ...] | None, ...] | None = None
    """For each input token, the likeliest tokens in its place."""
    output_token_logprobs: tuple[TokenLogprob, ...] | None = None
    e2e_latency: float
    """Seconds in the engine, its own queue included."""
    queue_time: float | None = None
    """Seconds in the engine's queue; only with --enable-metrics."""
    routed_experts: str | None = None
    """See pipeline.data.routed_experts.decode_engine_rows; only when asked for, with --enable-return-routed-experts."""
    output_token_sampling_mask: tuple[tuple[int, ...], ...] | None = None
    """The kept set of each response token, most likely token first; only when asked for (return_sampling_mask)."""
    output_token_sampling_logprobs: tuple[float, ...] | None = None
    """Natural log of each response token's probability, renormalized over its kept set; with the former."""
    num_retractions: int | None = None
    """How often the request lost its keys and values and was prefilled again, also for an update of the weights."""


class Generated(Answer):
    """One sample of POST /generate."""

    output_ids: tuple[int, ...]
    meta_info: MetaInfo


class ModelInfo(Answer):
    """GET /model_info."""

    model_path: str
    weight_version: str


class Updated(Answer):
    """POST /update_weights_from_disk, with status 200 as with 400."""

    success: bool
    message: str


class Placement(Answer):
    """Which part of a model a process of an engine holds."""

    tp_rank: int
    tp_size: int


def _as_list(found: Any) -> Any:
    return [found] if isinstance(found, dict) else found


class RankChecksums(Answer):
    """The checksums of one process of an engine, by name of parameter."""

    checksums: dict[str, str]
    parallelism_info: Annotated[tuple[Placement, ...], BeforeValidator(_as_list)]
    """One entry for each model of the process (the policy and, with speculative decoding, its drafts); before 0.5.21
    that of the policy alone."""


class Checksums(Answer):
    """POST /weights_checker, with status 200 as with 400."""

    success: bool
    message: str
    ranks: tuple[RankChecksums, ...] = ()


class Worker(Answer):
    """An engine as the router knows it."""

    id: str
    url: str
    is_healthy: bool


class Workers(Answer):
    """GET /workers of the router."""

    workers: tuple[Worker, ...]


GENERATED_LIST = TypeAdapter(list[Generated])


def policy_version(weight_version: str) -> int:
    """The policy version that SGLang's `weight_version` stands for. Raises EngineVersionError when it is not one of
    ours, or unverified."""
    try:
        return int(weight_version)
    except ValueError:
        raise EngineVersionError(
            f"engine serves weight_version {weight_version!r}, expected a verified policy version such as '12'; "
            "it gets no requests until it is verified that it holds the published policy"
        ) from None


def claimed_version(weight_version: str) -> int | None:
    """The policy version that an engine claims to hold, verified or not; None when it is none of ours."""
    try:
        return int(weight_version.removeprefix(UNVERIFIED))
    except ValueError:
        return None


def token_versions(meta: MetaInfo, num_tokens: int) -> tuple[int, ...]:
    """Policy version of each response token.

    Older engines answer no spans. There, every token counts as of the version with which the sample ended.
    """
    if meta.weight_versions is None:
        return (policy_version(meta.weight_version),) * num_tokens
    versions = tuple(policy_version(s.version) for s in meta.weight_versions for _ in range(s.start, s.end))
    if len(versions) != num_tokens:
        raise EngineUnavailableError(
            f"engine answered version spans over {len(versions)} tokens for {num_tokens} response tokens; "
            "the answer is damaged, ask again"
        )
    return versions


def completion_of(
    sample: Generated,
    *,
    engine: int,
    elapsed_s: float,
    num_prompt: int = 0,
    experts: ExpertShape | None = None,
    kept_set: bool = False,
) -> Completion:
    """The record of one sample, for which the caller waited `elapsed_s`. With `experts`, its routes too, of a prompt of
    `num_prompt` tokens and of the response. With `kept_set`, its kept sets and the log-probabilities over them. Raises
    EngineUnavailableError on a bad one."""
    meta, tokens = sample.meta_info, sample.output_ids
    logprobs = meta.output_token_logprobs or ()
    values = tuple(value for value, _, _ in logprobs if value is not None)
    if tuple(token for _, token, _ in logprobs) != tokens or len(values) != len(tokens):
        raise EngineUnavailableError(
            f"engine answered {len(tokens)} tokens, but {len(values)} log-probabilities that do not belong to them; "
            "ask again"
        )
    kept = None
    if kept_set:
        values, kept = _kept(meta, tokens)
    generated_s = meta.e2e_latency - (meta.queue_time or 0.0)
    versions = token_versions(meta, len(tokens))
    return Completion(
        tokens=tokens,
        logprobs=values,
        versions=versions,
        finish=_finish_reason(meta.finish_reason),
        engine=engine,
        queued_s=max(0.0, elapsed_s - generated_s),
        generated_s=generated_s,
        experts=None if experts is None else _routes(meta, num_prompt, versions, experts),
        kept=kept,
    )


def _kept(meta: MetaInfo, tokens: tuple[int, ...]) -> tuple[tuple[float, ...], KeptSets]:
    """Log-probabilities over the kept sets, and these. An aborted request without tokens comes without them."""
    masks, logprobs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if not tokens:
        return (), KeptSets.empty(0)
    if masks is None or logprobs is None:
        raise EngineUnavailableError(
            "engine did not say which tokens top_p and top_k left; serve with SGLang 0.5.23, or set rollout.kept_set "
            "to false"
        )
    if len(masks) != len(tokens) or len(logprobs) != len(tokens):
        raise EngineUnavailableError(
            f"engine answered {len(masks)} kept sets and {len(logprobs)} log-probabilities for {len(tokens)} response "
            "tokens; ask again"
        )
    try:
        kept = KeptSets.of(masks)
        kept.check(np.array(tokens, np.int32), np.ones(len(tokens), np.bool_))
    except (ValueError, OverflowError) as error:
        raise EngineUnavailableError(f"engine answered kept sets that cannot be: {error}; ask again") from error
    return logprobs, kept


def _routes(meta: MetaInfo, num_prompt: int, versions: tuple[int, ...], shape: ExpertShape) -> RoutedExperts:
    """Of prompt and response. An aborted request comes without them: its routes are unknown."""
    num_tokens = num_prompt + len(versions)
    if meta.routed_experts is None and meta.finish_reason.type == "abort":
        return RoutedExperts.unknown(num_tokens, shape)
    if meta.routed_experts is None or meta.num_retractions is None:
        raise EngineUnavailableError(
            "engine did not say which experts its tokens went to; start it with --enable-return-routed-experts "
            "(SGLang 0.5.23), or set rollout.replay_experts to false"
        )
    try:
        rows = decode_engine_rows(meta.routed_experts, num_tokens, shape)
    except ValueError as error:
        raise EngineUnavailableError(f"engine answered {error}; ask again") from error
    return rows_still_true(rows, num_prompt, versions, meta.num_retractions)


def aborted_completion(engine: int, elapsed_s: float) -> Completion:
    """The record of a sample that was aborted before the engine took it up."""
    return Completion(
        tokens=(), logprobs=(), versions=(), finish="abort", engine=engine, queued_s=elapsed_s, generated_s=0.0
    )


def _finish_reason(finish: Finish) -> FinishReason:
    reasons: tuple[FinishReason, ...] = get_args(FinishReason)
    for reason in reasons:
        if finish.type == reason:
            return reason
    raise EngineUnavailableError(
        f"engine ended a sample with {finish.type!r} ({finish.message}), expected one of {', '.join(reasons)}"
    )
