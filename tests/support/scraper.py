"""Prometheus in small: reads /metrics of several ports again and again while something runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import httpx

from pipeline.errors import PortInUseError
from rollout_sglang.server.start import check_port_free, free_port
from tests.support.promql import shown

PERIOD_S = 0.25


class Scraper:
    """A context manager; `seen` are the names of all samples that each port has shown."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.seen: list[list[str]] = [[] for _ in ports]
        self._ports = ports
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._scrape)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _scrape(self) -> None:
        with httpx.Client(timeout=5.0) as client:  # made once: reading certificates takes longer than a scrape
            while not self._end.wait(PERIOD_S):
                for place, port in enumerate(self._ports):
                    try:
                        text = client.get(f"http://127.0.0.1:{port}/metrics").text
                    except httpx.TransportError:
                        continue  # it has not started yet, or has ended
                    self.seen[place] = sorted({*self.seen[place], *shown(text)})


def free_run_of_ports(count: int) -> int:
    """The first of `count` neighboring ports that are free now."""
    while True:
        first = free_port()
        try:
            for port in range(first, first + count):
                check_port_free(port)
        except PortInUseError:
            continue
        return first
