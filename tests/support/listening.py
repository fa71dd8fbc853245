"""Where processes listen."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Addresses and ports at which they, and all below them, accept connections."""
    found: set[tuple[str, int]] = set()
    for process in {one for top in processes for one in [top, *top.children(recursive=True)]}:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue  # it has ended meanwhile
        found |= {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}
    return found


def beyond_loopback(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Those that other hosts could reach."""
    return {(ip, port) for ip, port in listening(processes) if not ipaddress.ip_address(ip).is_loopback}


class ListeningWatch:
    """While the block runs: where the children of this process listen, also those that come and go."""

    PERIOD_S = 1.0

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()
        self.beyond: set[tuple[str, int]] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self.PERIOD_S):
            with suppress(psutil.NoSuchProcess):  # one ended under this look; the next comes in a second
                children = psutil.Process().children()
                self.seen |= listening(children)
                self.beyond |= beyond_loopback(children)
