"""Whether an engine is there, as far as processes can tell that hold no fleet.

Only an engine's own role takes back its announcement. So an announcement may outlive the engine for ever, and an engine
that is away may be starting or gone. It counts as lost once it does not answer, and nothing was heard of any start of
it, nor of any engine that came or left, for as long as a start may take.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.epochs import epoch_folder
from pipeline.data.membership import Member
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EvenKeelError
from rollout_sglang.client import EngineClient
from rollout_sglang.protocol import INVALIDATED
from rollout_sglang.transport import LOOK_DEADLINE_S

Look = Callable[[Member], str | None]
"""Engine → the name of its weights; None where it does not answer."""


def look_with(api_key: str | None) -> Look:
    """A look at the engine's own server, for LOOK_DEADLINE_S at most. Not from within an event loop."""

    async def look(member: Member) -> str | None:
        client = EngineClient(member.url, api_key, index=member.index, request_deadline_s=LOOK_DEADLINE_S)
        try:
            return (await client.model_info(LOOK_DEADLINE_S)).weight_version
        except EvenKeelError:
            return None
        finally:
            await client.close()

    return lambda member: asyncio.run(look(member))


@dataclass(frozen=True)
class Presence:
    """Of the engines of a run."""

    run: RunDirectory
    start_deadline_s: float
    """What a start may take."""
    look: Look

    def serves(self, member: Member) -> bool:
        """Whether the engine answers, with weights that were verified."""
        name = self.look(member)
        return name is not None and not name.startswith(INVALIDATED)

    def is_lost(self, index: int, member: Member | None) -> bool:
        """Whether nobody needs to wait for engine `index`; `member` is its announcement, where there is one."""
        signs = (_changed(self.run.membership().folder), _changed(epoch_folder(self.run.path, "engine", index)))
        if time.time() - max(signs) <= self.start_deadline_s:
            return False
        return member is None or self.look(member) is None


def _changed(folder: Path) -> float:
    """When a file of the folder came, went or was replaced last, seconds since 1970; 0 where there is no folder."""
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0
