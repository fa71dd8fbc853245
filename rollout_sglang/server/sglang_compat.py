"""What differs between the supported versions of SGLang. No other module knows a server's version.

    since 0.5.19   an answer names the weights of each token, so a request may go on over an update of the weights
    since 0.5.21   begin_weight_update and end_weight_update stand around an update by tensors: a layer that knows how
                   makes loadable before what it has repacked, and again after what it multiplies by. Layers that
                   quantize to FP8 themselves do not on a GPU, by disk neither (fp8_tensor is refused there); those of
                   our CPU engine do
    since 0.5.23   an answer can say which experts each token went to (older releases may; theirs were not compared)

An engine on a CPU, which this package starts, can stage weights (rollout_sglang.cpu.staging). Any other server refuses
that with an exception in its log, so it is never asked.

An older server names only the weights with which a sample ended, so no request may be under way while they change. It
is paused by `abort`: every request is answered with what there is, and its sender asks again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import EngineUnavailableError
from rollout_sglang.transport import Transport

SPANS_SINCE = (0, 5, 19)
SESSIONS_SINCE = (0, 5, 21)
EXPERTS_SINCE = (0, 5, 23)
_SESSIONS_SINCE = ".".join(map(str, SESSIONS_SINCE))
ABORTED = 499
"""Status of a request that was aborted before the engine took it up; 0.5.17 only."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What one server can do, as far as versions differ."""

    version: str
    pause: Literal["retract", "abort"]
    """How it is paused for new weights."""
    sessions: bool
    """Whether updates by tensors stand between begin_weight_update and end_weight_update."""
    records_experts: bool
    """Whether it can say which experts each token went to."""
    quantizes: bool
    """Whether the engine quantizes the weights that it is given (`--quantization`)."""
    overlaps: bool
    """Whether it notes what a step has sampled while the next one computes: a server stopped in place has then sampled
    one token of each request that it has not noted. It does, unless started with --disable-overlap-schedule."""

    stages: bool
    """Whether it may be asked to take weights while it serves."""

    @property
    def no_tensors(self) -> str:
        """Why the engine cannot be sent tensors; empty when it can."""
        if self.sessions or not self.quantizes:
            return ""
        return (
            f"SGLang {self.version} cannot be sent tensors for weights that it quantizes itself, {_SESSIONS_SINCE} "
            "can; use weights.channel disk, rollout.precision fp8_block, or a newer SGLang"
        )


class ServerInfo(BaseModel):
    """GET /server_info, as far as it is read here."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Annotated[str, Field(max_length=100)]
    quantization: Annotated[str, Field(max_length=100)] | None = None
    disable_overlap_schedule: bool = False
    device: Annotated[str, Field(max_length=100)] | None = None


def dialect_of(info: ServerInfo) -> Dialect:
    """A version that is no release (`0.0.0.dev0`, a build from source) counts as the newest."""
    found = re.match(r"([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})", info.version)
    number = tuple(map(int, found.groups())) if found else (0, 0, 0)
    released = number if any(number) else EXPERTS_SINCE
    return Dialect(
        version=info.version,
        pause="retract" if released >= SPANS_SINCE else "abort",
        sessions=released >= SESSIONS_SINCE,
        records_experts=released >= EXPERTS_SINCE,
        quantizes=info.quantization is not None,
        overlaps=not info.disable_overlap_schedule,
        stages=info.device == "cpu",
    )


class DialectOf:
    """The dialect of the server behind a transport; the server is asked once."""

    def __init__(self, transport: Transport, deadline_s: float) -> None:
        self._transport = transport
        self._deadline_s = deadline_s
        self._found: Dialect | None = None

    async def __call__(self) -> Dialect:
        """Raises EngineUnavailableError when the server does not say."""
        if self._found is None:
            answer = await self._transport.call("GET", "/server_info", deadline_s=self._deadline_s)
            try:
                self._found = dialect_of(ServerInfo.model_validate_json(answer.content))
            except ValidationError:
                raise EngineUnavailableError(
                    f"{self._transport.url}/server_info names no version of SGLang; see what listens there"
                ) from None
        return self._found
