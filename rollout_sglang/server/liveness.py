"""Detect a hung server from its own machine within seconds, and say why it is hung.

    one of its processes is stopped (SIGSTOP, a debugger) for STOPPED_S     hung, whatever its HTTP process answers
    its HTTP process has answered nothing for SILENCE_S                     hung

SGLang has an HTTP process, a scheduler per rank, and a detokenizer. While a scheduler is stopped, /health answers as
usual and requests wait without end. Waiting requests alone prove nothing: a prefill, a compilation or a load of weights
may block a scheduler for a minute. SGLang's own watchdog ends a running scheduler that makes no progress
(--watchdog-timeout, 300 s for one step). `Presence` judges a run's engines from other machines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from pipeline.data.epochs import epoch_folder
from pipeline.data.files import changed_ns
from pipeline.data.membership import Member
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EvenKeelError
from rollout_sglang.client import EngineClient
from rollout_sglang.protocol import INVALIDATED
from rollout_sglang.transport import LOOK_DEADLINE_S

STOPPED_S = 2.0
"""A shorter stop may come from a tool that inspects the process."""
SILENCE_S = 8.0
STOPPED_GRACE_S = 30.0
"""How long a server with a stopped process may recover before it is ended."""
SILENT_GRACE_S = 90.0
"""The same for a server that answers nothing though all its processes run: the machine may be busy."""
_FIND_S = 5.0
"""Interval at which the processes of the server are listed again."""
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class Liveness:
    def __init__(
        self, pid: int, answers: Callable[[], bool] | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`answers` queries the HTTP process; None where the process runs on another host."""
        self._pid, self._answers, self._clock = pid, answers, clock
        self._answered = self._well = clock()
        self._is_stopped = False
        self._found_at = float("-inf")
        self._processes: list[psutil.Process] = []
        self._stopped: dict[int, float] = {}
        """Process id → time of the first look since which every look has seen it stopped."""

    def look(self) -> str | None:
        """Return why the server is hung; None when no sign of it is visible."""
        now = self._clock()
        if now - self._found_at >= _FIND_S:
            self._found_at = now
            with suppress(psutil.Error):
                top = psutil.Process(self._pid)
                self._processes = [top, *top.children(recursive=True)]
        stopped: dict[int, str] = {}
        for process in self._processes:
            with suppress(psutil.Error):
                if process.status() in _STOPPED:
                    stopped[process.pid] = process.name()
        self._stopped = {pid: self._stopped.get(pid, now) for pid in stopped}
        long_stopped = (pid for pid, since in self._stopped.items() if now - since >= STOPPED_S)
        reason = next((f"its process {pid} ({stopped[pid]}) is stopped" for pid in long_stopped), None)
        self._is_stopped = reason is not None
        if reason is None and self._answers is not None:
            if self._answers():
                self._answered = self._clock()
            silent_s = self._clock() - self._answered
            reason = f"it has answered nothing for {silent_s:.0f} s" if silent_s > SILENCE_S else None
        if reason is None:
            self._well = self._clock()
        return reason

    @property
    def is_lost(self) -> bool:
        """Whether the server has hung for so long that it must be ended."""
        return self.hung_s > (STOPPED_GRACE_S if self._is_stopped else SILENT_GRACE_S)

    @property
    def hung_s(self) -> float:
        """Seconds since the last look at which the server was well."""
        return self._clock() - self._well


Look = Callable[[Member], str | None]
"""Engine → the name of its weights; None where it does not answer."""


def look_with(api_key: str | None) -> Look:
    """Return a function that asks an engine's own server, for LOOK_DEADLINE_S at most. Not for use in an event loop."""

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
    """The presence of a run's engines, as other machines see it."""

    run: RunDirectory
    start_deadline_s: float
    look: Look

    def serves(self, member: Member) -> bool:
        """Return whether the engine answers, with verified weights."""
        name = self.look(member)
        return name is not None and not name.startswith(INVALIDATED)

    def is_lost(self, index: int, member: Member | None) -> bool:
        """Return whether waiting for engine `index` is pointless; `member` is its announcement, if there is one."""
        signs = changed_ns(self.run.membership().folder), changed_ns(epoch_folder(self.run.path, "engine", index))
        if time.time() - max(signs) / 1e9 <= self.start_deadline_s:
            return False
        return member is None or self.look(member) is None
