"""One SGLang server taking weights over a process group: the calls from `begin_weight_update`, where it has one, to the
end."""

from __future__ import annotations

import base64
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline.errors import EngineUnavailableError, EngineVersionError
from pipeline.ports.weights import ProcessGroupSpec, TensorSpec
from rollout_sglang.protocol import INVALIDATED, UNVERIFIED, Updated
from rollout_sglang.server.sglang_compat import DialectOf
from rollout_sglang.transport import Lost, Transport
from rollout_sglang.weights.staging import Stage

T = TypeVar("T")


class Receiver:
    """The weight update calls of a server at `url`.

    Methods raise EngineUnavailableError when the server refuses, drops or never answers, and EngineVersionError when it
    answers that it could not do it. No call is repeated: it would wait for a second broadcast.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        control_deadline_s: float,
        update: int | None = None,
        lost: Lost = lambda: None,
        keeps_kv: bool = False,
    ) -> None:
        """`keeps_kv`: see EngineClient."""
        self.url, self.lost = url, lost
        self._keeps_kv = keeps_kv
        self._deadline_s = control_deadline_s
        self._transport = Transport(url, api_key)
        self._transport.update = update
        self._dialect = DialectOf(self._transport, control_deadline_s)
        self._stage = Stage(self._transport, control_deadline_s)
        self._staging = False

    def take_part(self, update: int, *, staging: bool = False) -> None:
        """From now on, calls belong to another weight update (rollout_sglang.weights.update_lease); `staging` says
        whether another sender has had the engine `stage`."""
        self._transport.update, self._staging = update, staging

    async def while_alive(self, call: Coroutine[Any, Any, T]) -> T:
        """See Transport.while_alive; `lost` is this receiver's."""
        return await self._transport.while_alive(call, self.lost)

    async def stage(self) -> bool:
        """Have the engine take its next weights while it serves, with the version that it has. False where it cannot;
        then it is paused, and `begin` comes next."""
        try:
            self._staging = (await self._dialect()).stages and await self._stage.begin()
        except EngineVersionError:
            self._staging = False
        return self._staging

    async def finish_stage(self, folder: Path, deadline_s: float) -> None:
        """All tensors came: returns when they are loaded and hashed, as the weights of a folder that there will be."""
        await self._stage.finish(folder, deadline_s)

    async def begin(self) -> None:
        """Make a paused engine's weights loadable and take its version away. Requests under way keep waiting."""
        dialect = await self._dialect()
        if dialect.no_tensors:
            raise EngineVersionError(f"{self.url}: {dialect.no_tensors}")
        if dialect.sessions:
            await self._open_session()
        await self._name(INVALIDATED)

    async def _open_session(self) -> None:
        if not (await self._ask("/begin_weight_update", {})).success:
            # A sender that died left its session open.
            await self._do("/end_weight_update", {})
            await self._do("/begin_weight_update", {})

    async def join(self, group_spec: ProcessGroupSpec, world_size: int, deadline_s: float) -> None:
        """The engine's ranks join the group as ranks 1, 2, …"""
        request = {
            "master_address": group_spec.address,
            "master_port": group_spec.port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": group_spec.group,
            "backend": group_spec.backend,
        }
        await self._do("/init_weights_update_group", request, deadline_s)

    async def is_member(self, group: str) -> bool:
        """Whether the server still has the group. It is asked by an update of no tensors, for which nothing is sent.

        A server without sessions would end at that call if it had no such group. It is told to leave the group instead,
        and joins it again.
        """
        if self._staging:
            return await self._stage.is_member(group)
        if not (await self._dialect()).sessions:
            await self._ask("/destroy_weights_update_group", {"group_name": group})
            return False
        return (await self._ask("/update_weights_from_distributed", _update(group, ()))).success

    async def leave(self, group: str) -> None:
        """Forget the group."""
        await self._do("/destroy_weights_update_group", {"group_name": group})

    async def receive(self, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """Take part in one broadcast of the flattened tensors, load them, and drop what other weights have cached,
        unless it is kept."""
        if self._staging:
            await self._stage.receive(group, tensors, deadline_s)
            return
        # The cache is flushed with every bucket, because no sender knows which is the engine's last. That costs less
        # than one call of /flush_cache, which also gives memory back to the system.
        request = _update(group, tensors) | {"load_format": "flattened_bucket", "flush_cache": not self._keeps_kv}
        await self._do("/update_weights_from_distributed", request, deadline_s)

    async def receive_shared(self, bucket: bytes, ranks: int, deadline_s: float) -> None:
        """Open a bucket in the memory of another process of the machine (one copy of the pickle for each rank), load
        its tensors, and drop what was cached with other weights, unless it is kept."""
        text = base64.b64encode(bucket).decode()
        if self._staging:
            await self._stage.receive_shared(text, deadline_s)
            return
        request = {
            "serialized_named_tensors": [text] * ranks,
            "load_format": "flattened_bucket",
            "flush_cache": not self._keeps_kv,
        }
        await self._do("/update_weights_from_tensor", request, deadline_s)

    async def end(self, version: int, deadline_s: float) -> None:
        """All tensors came: finish the weights (quantize, repack), claim `version` unverified."""
        if (await self._dialect()).sessions:
            await self._do("/end_weight_update", {}, deadline_s)
        await self._name(f"{UNVERIFIED}{version}")

    async def give_up(self) -> None:
        """Not all tensors came: close the session only."""
        if not self._staging and (await self._dialect()).sessions:
            await self._ask("/end_weight_update", {})

    async def close(self) -> None:
        """Release the connections."""
        await self._transport.close()

    async def _name(self, version: str) -> None:
        await self._do("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def _do(self, path: str, request: dict[str, Any], deadline_s: float | None = None) -> None:
        answer = await self._ask(path, request, deadline_s)
        if not answer.success:
            raise EngineVersionError(f"{self.url}{path} failed: {' '.join(answer.message.split())[:300]}; see its log")

    async def _ask(self, path: str, request: dict[str, Any], deadline_s: float | None = None) -> Updated:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        answer = await self._transport.call(
            "POST", path, deadline_s=deadline_s, json=request, accept=(400,), repeatable=False
        )
        try:
            return Updated.model_validate_json(answer.content)
        except ValidationError:
            raise EngineUnavailableError(
                f"{self.url}{path} answered something else than SGLang's protocol; check the version of the server"
            ) from None


def _update(group: str, tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    return {
        "names": [tensor.name for tensor in tensors],
        "dtypes": [tensor.dtype for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
        "group_name": group,
        "flush_cache": False,
    }
