"""An engine takes weights while it serves, where its server can (rollout_sglang.cpu.staging).

    begin ─▶ receive, receive_shared … ─▶ finish ─▶ EngineClient.pause, update_from_disk(version, the same folder)
    folder ──────────────────────────────────┴▶

What an engine cannot stage, it is given while it is paused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.errors import EngineUnavailableError, EngineVersionError
from pipeline.ports.weights import TensorSpec
from precision.text import one_line
from rollout_sglang.protocol import Checksums
from rollout_sglang.transport import Transport

PREFIX = "stage "
"""As in rollout_sglang.cpu.staging, which loads torch."""
_FIRST_POLL_S, _LONGEST_POLL_S = 0.004, 0.05


@dataclass(frozen=True)
class Stage:
    """Where one server takes its next weights. Methods raise EngineUnavailableError as Transport.call does, and
    EngineVersionError when weights could not be staged, or a later weight update has overtaken this one."""

    transport: Transport
    control_deadline_s: float

    async def begin(self) -> bool:
        """Forget what was staged before. False where the server cannot stage."""
        return await self._order({"do": "begin"}) is not None

    async def is_member(self, group: str) -> bool:
        """Whether the server has this process group."""
        return (await self._known({"do": "member", "group": group}))["member"] == "True"

    async def receive(self, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """Take part in one broadcast of these tensors, flattened; returns when they are loaded."""
        names, dtypes, shapes = zip(*((one.name, one.dtype, list(one.shape)) for one in tensors), strict=True)
        await self._known({"do": "group", "group": group, "names": names, "dtypes": dtypes, "shapes": shapes})
        await self._done(deadline_s)

    async def receive_shared(self, bucket: str, deadline_s: float) -> None:
        """Take a bucket (base64) from memory of another process; returns when that memory is let go."""
        await self._known({"do": "bucket", "bucket": bucket})
        await self._done(deadline_s)

    async def finish(self, folder: Path, deadline_s: float) -> None:
        """Wait until all is loaded and hashed, under the name of the folder that it is, or will be, of."""
        await self._known({"do": "finish", "folder": str(folder.absolute())})
        await self._done(deadline_s)

    async def folder(self, folder: Path, deadline_s: float) -> bool:
        """Load and hash a folder. False where the server cannot stage."""
        if await self._order({"do": "folder", "folder": str(folder.absolute())}) is None:
            return False
        await self._done(deadline_s)
        return True

    async def _done(self, deadline_s: float) -> None:
        poll_s = _FIRST_POLL_S
        try:
            async with asyncio.timeout(deadline_s):
                while (await self._known({"do": "wait"}))["pending"] != "0":
                    await asyncio.sleep(poll_s)
                    poll_s = min(1.5 * poll_s, _LONGEST_POLL_S)
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.transport.url} did not stage the weights within {deadline_s:g} s; it hangs or is overloaded"
            ) from None

    async def _known(self, order: dict[str, Any]) -> dict[str, str]:
        state = await self._order(order)
        if state is None:
            raise EngineVersionError(f"{self.transport.url} does not stage weights any more; it was started again")
        return state

    async def _order(self, order: dict[str, Any]) -> dict[str, str] | None:
        """The state of the slowest of the engine's ranks; None where the server knows no such order."""
        answer = await self.transport.call(
            "POST",
            "/weights_checker",
            deadline_s=self.control_deadline_s,
            json={"action": PREFIX + json.dumps(order)},
            accept=(400, 404),
            repeatable=False,
        )
        if answer.status_code == 404:
            return None
        try:
            found = Checksums.model_validate_json(answer.content)
            states = [rank.checksums for rank in found.ranks]
            failures = [state["failure"] for state in states if state["failure"]]
            slowest = max(states, key=lambda state: int(state["pending"]), default=None)
        except (ValidationError, KeyError, ValueError):
            raise EngineUnavailableError(
                f"{self.transport.url}/weights_checker answered something else than was asked; check the server"
            ) from None
        if failures:
            raise EngineVersionError(f"{self.transport.url} cannot stage weights: {one_line(failures[0], 300)}")
        return slowest if found.success else None
