"""Parse the answers of SGLang and its router. Unknown fields are ignored, missing ones refused.

Types are strict: `true` and "5" are no numbers, 5.0 is no integer, and no number is NaN or infinite.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from pipeline.errors import EngineVersionError
from precision.text import quoted

UNKNOWN_ENGINE = 2**16 - 1
"""Engine index of a completion that came through a router, which does not name the engine."""

UNVERIFIED = "unverified-"
"""Prefix of the weight version of an engine that is not verified yet; the policy version follows."""
ASLEEP = "asleep"
"""Weight version of an engine that has given its GPU's memory to the learner, until the learner's next publish."""
INVALIDATED = "unverified"
"""Weight version of an engine that failed its check and must be given weights again."""

FORMATS, STATISTICS, MOVED, NCCL = "formats", "statistics", "moved", "nccl"
"""Actions of POST /weights_checker that rollout_sglang.server.format_report adds."""
STAGE = "stage "
"""Beginning of the action that rollout_sglang.cpu.staging adds; JSON follows."""


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class VersionSpan(Answer):
    """A span of response tokens, start ≤ i < end, sampled with the weights named `version`."""

    version: str
    start: Count
    end: Count


class Finish(Answer):
    """The reason why a sample ended: stop, length or abort."""

    type: str
    message: str | None = None
    matched: int | str | list[int] | None = None
    """The token or text that ended it."""


Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Field(ge=0.0)]
TokenLogprob = Annotated[tuple[float | None, int, str | None], "log-probability (None for a first token), id, text"]


class MetaInfo(Answer):
    """SGLang's report about one sample. A sample aborted while it waited has only the fields without a default."""

    finish_reason: Finish
    weight_version: str
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None
    """Tokens of the prompt whose keys and values were in the cache."""
    weight_versions: list[VersionSpan] | None = None
    """Absent before 0.5.19."""
    input_token_logprobs: list[TokenLogprob] | None = None
    input_top_logprobs: list[list[TokenLogprob] | None] | None = None
    """For each input token, the likeliest tokens in its place."""
    output_token_logprobs: list[TokenLogprob] | None = None
    e2e_latency: Seconds
    """Seconds in the engine, its own queue included."""
    queue_time: Seconds | None = None
    """Seconds in the engine's queue; only with --enable-metrics."""
    routed_experts: str | None = None
    """See pipeline.data.routed_experts.decode_engine_rows; only on request, with --enable-return-routed-experts."""
    output_token_sampling_mask: list[list[int]] | None = None
    """The kept set of each response token, most likely token first; only on request (return_sampling_mask)."""
    output_token_sampling_logprobs: list[float] | None = None
    """Natural log of each response token's probability, renormalized over its kept set; only with the kept sets."""
    num_retractions: Count | None = None
    """How often the request lost its keys and values and was prefilled again, weight updates included."""


class Generated(Answer):
    """One sample of POST /generate."""

    output_ids: list[int]
    meta_info: MetaInfo


class ModelInfo(Answer):
    """GET /model_info."""

    model_path: str
    weight_version: str


class RankLoad(Answer):
    """What one data-parallel rank of an engine has to do."""

    num_running_reqs: Count
    num_waiting_reqs: Count
    num_used_tokens: Count
    max_total_num_tokens: Count
    token_usage: Annotated[float, Field(ge=0.0)]


class Loads(Answer):
    """GET /v1/loads; every supported version has it, with and without --enable-metrics."""

    loads: tuple[RankLoad, ...]


class Tokenized(Answer):
    """POST /tokenize."""

    tokens: list[int]


class Updated(Answer):
    """POST /update_weights_from_disk, with status 200 or 400."""

    success: bool
    message: str


class Placement(Answer):
    """The part of a model that a process of an engine holds."""

    tp_rank: Count
    tp_size: Count


class RankChecksums(Answer):
    """The checksums of one process of an engine: parameter name → digest."""

    checksums: dict[str, str]
    parallelism_info: Annotated[
        list[Placement],
        BeforeValidator(lambda said: said if isinstance(said, list) else [said]),
        Field(min_length=1),
    ]
    """One entry for each model of the process: the policy, then its drafts for speculative decoding."""


class Checksums(Answer):
    """POST /weights_checker, with status 200 or 400."""

    success: bool
    message: str
    ranks: tuple[RankChecksums, ...] = ()


class Worker(Answer):
    """An engine in the router's list."""

    id: str
    url: str
    is_healthy: bool


class Workers(Answer):
    """GET /workers of the router."""

    workers: tuple[Worker, ...]


GENERATED = TypeAdapter(Generated)
_VERSION = re.compile(r"0|[1-9][0-9]{0,8}")
"""`int` would also accept "1_2", " 12" and digits of other scripts. Versions are stored as int32."""


def policy_version(weight_version: str) -> int:
    """Return the policy version in SGLang's `weight_version`. Raises EngineVersionError if unverified or not ours."""
    if _VERSION.fullmatch(weight_version):
        return int(weight_version)
    raise EngineVersionError(
        f"engine serves weight_version {quoted(weight_version)}, expected a verified policy version such as '12'; "
        "it gets no requests until it is verified that it holds the published policy"
    )


def claimed_version(weight_version: str) -> int | None:
    """Return the policy version that an engine claims to hold, verified or not; None when it is not one of ours."""
    name = weight_version.removeprefix(UNVERIFIED)
    return int(name) if _VERSION.fullmatch(name) else None


SPANS_SINCE = (0, 5, 19)
SESSIONS_SINCE = (0, 5, 21)
EXPERTS_SINCE = (0, 5, 23)
ABORTED = 499
"""Status of a request that was aborted before the engine took it up; SGLang 0.5.17 only."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The abilities of one server, as far as SGLang's versions differ."""

    version: str
    pause: Literal["retract", "abort"]
    """How the server is paused for new weights."""
    sessions: bool
    """Whether tensor updates are framed by begin_weight_update and end_weight_update."""
    records_experts: bool
    """Whether it can report the experts of each token."""
    quantizes: bool
    """Whether the engine quantizes the weights that it receives (`--quantization`)."""
    overlaps: bool
    """Whether it notes the tokens of a step while the next step computes. When stopped in place, it has then sampled
    one token of each request that it has not noted. True unless started with --disable-overlap-schedule."""

    stages: bool
    """Whether it may be asked to take weights while it serves."""

    graphs: bool
    """Whether its steps of decoding may replay CUDA graphs, which read weights where they lay at the capture."""

    sleeps: bool
    """Whether it can give up its memory and take it back; on a CPU the calls are there and free nothing."""

    no_tensors: str
    """Why the engine cannot be sent tensors; empty when it can."""


class ServerInfo(BaseModel):
    """GET /server_info; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Annotated[str, Field(max_length=100)]
    quantization: Annotated[str, Field(max_length=100)] | None = None
    disable_overlap_schedule: bool = False
    enable_memory_saver: bool = False
    device: Annotated[str, Field(max_length=100)] | None = None


def dialect_of(info: ServerInfo) -> Dialect:
    """Return a server's dialect. A version that is no release (`0.0.0.dev0`, built from source) is the newest."""
    found = re.match(r"([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})", info.version)
    number = tuple(map(int, found.groups())) if found else (0, 0, 0)
    released = number if any(number) else EXPERTS_SINCE
    sessions = released >= SESSIONS_SINCE
    no_tensors = (
        f"SGLang {info.version} cannot be sent tensors for weights that it quantizes itself, "
        f"{'.'.join(map(str, SESSIONS_SINCE))} can; use weights.channel disk, rollout.precision fp8_block, or a newer "
        "SGLang"
    )
    return Dialect(
        version=info.version,
        pause="retract" if released >= SPANS_SINCE else "abort",
        sessions=sessions,
        records_experts=released >= EXPERTS_SINCE,
        quantizes=info.quantization is not None,
        no_tensors="" if sessions or info.quantization is None else no_tensors,
        overlaps=not info.disable_overlap_schedule,
        stages=info.device == "cpu",
        graphs=info.device == "cuda",
        sleeps=info.enable_memory_saver or info.device == "cpu",
    )
