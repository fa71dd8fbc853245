"""How far does it scale? The run of ops/scale/model.py played against one file server, and docs/scale.md made of it.

    python -m ops.scale.simulate                          prints the tables for 1,024 engines and 4,096 ranks
    python -m ops.scale.simulate --engines 64 --ranks 256
    python -m ops.scale.simulate --write                  puts them into docs/scale.md

Every process that polls asks a server that takes one request after the other. So bursts queue: all ranks open the
batch of a step at the same moment, all ranks make their checkpoint files at the same moment, and meanwhile an engine
asks whether it was superseded.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import simpy

from launch.cluster.roles.base import EPOCH_POLL_S
from ops.scale import model
from ops.scale.model import Size
from ops.scale.operations import measured
from rollout_sglang.monitor import PERIOD_S

PAGE = Path(__file__).parents[2] / "docs/scale.md"
MARKS = ("<!-- made by ops/scale/simulate.py -->", "<!-- end -->")
LARGEST = Size(1024, 4096)
SIZES = (Size(8, 32), Size(64, 256), Size(256, 1024), LARGEST, Size(1024, 32))
SIMULATED_S = 60.0
STEP_AT_S, SAVE_AT_S = 20.0, 40.0
STEPS = 400


@dataclass
class Waited:
    """Seconds from a request to its answer."""

    quiet: list[float] = field(default_factory=list)
    """Of checks for a later start, outside the bursts."""
    step: list[float] = field(default_factory=list)
    """Of ranks that open the batch of a step."""
    save: list[float] = field(default_factory=list)
    """Of ranks that make their files of a checkpoint."""
    burst: list[float] = field(default_factory=list)
    """Of checks for a later start during the bursts."""
    looks: list[float] = field(default_factory=list)
    """From one look of the collector to the next."""


class FileServer:
    """Takes one request after the other."""

    def __init__(self, world: simpy.Environment) -> None:
        self.world = world
        self.queue = simpy.Resource(world)
        self.busy_s = 0.0

    def ask(self, requests: float) -> Generator[Any, Any, float]:
        """Seconds until `requests` requests, one after the other, are answered."""
        began = self.world.now
        with self.queue.request() as turn:
            yield turn
            self.busy_s += requests / model.METADATA_S
            yield self.world.timeout(requests / model.METADATA_S)
        yield self.world.timeout(requests * model.ROUND_TRIP_S)
        return float(self.world.now - began)


def play(size: Size, requests: dict[str, float], seed: int = 0) -> tuple[Waited, float]:
    """A minute of a run, and the share of it in which the file server was busy."""
    world, waited, rng = simpy.Environment(), Waited(), random.Random(seed)
    server = FileServer(world)

    def watcher() -> Generator[Any, Any, None]:
        yield world.timeout(rng.uniform(0, EPOCH_POLL_S))
        while True:
            began = world.now
            seconds = yield from server.ask(requests["epoch check"])
            burst = any(start <= began < start + 10 for start in (STEP_AT_S, SAVE_AT_S))
            (waited.burst if burst else waited.quiet).append(seconds)
            yield world.timeout(EPOCH_POLL_S)

    def monitor() -> Generator[Any, Any, None]:
        last = world.now
        while True:
            for _ in range(size.engines):
                yield from server.ask(requests["engines listed, each"])
            yield from server.ask(requests["engines listed"])
            yield world.timeout(size.engines * model.CALL_S + PERIOD_S)
            waited.looks.append(world.now - last)
            last = world.now

    def rank(at: float, cost: float, found: list[float]) -> Generator[Any, Any, None]:
        yield world.timeout(at)
        found.append((yield from server.ask(cost)))

    for _ in range(size.engines + size.learner_hosts):
        world.process(watcher())
    world.process(monitor())
    for _ in range(size.ranks):
        world.process(rank(STEP_AT_S, requests["batch opened"], waited.step))
        world.process(rank(SAVE_AT_S, 2 * requests["file replaced"], waited.save))
    world.run(until=SIMULATED_S)
    return waited, server.busy_s / SIMULATED_S


def tables(size: Size) -> str:
    """What docs/scale.md shows."""
    requests = measured()
    waited, busy = play(size, requests)
    parts = [
        f"### {size.engines:,} engines and {size.ranks:,} learner ranks: what is full first\n",
        *limit_lines(size, requests),
        "\n### Requests a second on the shared file system\n",
        *request_lines(size, requests),
        "\n### One file server, played for a minute with a step and a checkpoint in it\n",
        *queue_lines(waited, busy),
        "\n### A publish of 34 GB: seconds of its bytes\n",
        *publish_lines(),
        f"\n### Files after {STEPS} steps\n",
        *file_lines(size),
        "\n### What one action asks of the file system\n",
        "| action | requests |\n|---|---|",
        *(f"| {name} | {number:g} |" for name, number in requests.items()),
    ]
    return "\n".join(parts) + "\n"


def limit_lines(size: Size, requests: dict[str, float]) -> list[str]:
    found = sorted(model.limits(size, requests), key=lambda limit: -limit.load)
    rows = [f"| {one.part} | {one.load:.0%} | {one.breaks_at(size.engines):,} engines | {one.note} |" for one in found]
    return ["| part | in use | full at | |\n|---|---|---|---|", *rows]


def request_lines(size: Size, requests: dict[str, float]) -> list[str]:
    found = model.metadata_requests_s(size, requests)
    rows = [f"| {who} | {number:,.0f} |" for who, number in found.items()]
    return ["| who asks | requests a second |\n|---|---|", *rows, f"| together | {sum(found.values()):,.0f} |"]


def queue_lines(waited: Waited, busy: float) -> list[str]:
    rows = {
        "file server busy": f"{busy:.0%} of the minute",
        "an engine asks whether it is superseded": f"{_p99(waited.quiet) * 1e3:.0f} ms (99 %)",
        "the same while all ranks open a batch or save": f"{_p99(waited.burst):.1f} s (99 %)",
        "all ranks have opened the batch of a step": f"{max(waited.step):.1f} s after the first",
        "all ranks have made their checkpoint's files": f"{max(waited.save):.1f} s after the first",
        "the collector looks at every engine": f"every {sum(waited.looks) / len(waited.looks):.1f} s",
    }
    return ["| | |\n|---|---|", *(f"| {what} | {how} |" for what, how in rows.items())]


def publish_lines() -> list[str]:
    rows = []
    for size in SIZES:
        seconds = model.publish_s(size)
        calls = size.engines * model.PUBLISH_CALLS * model.CALL_S
        numbers = " | ".join(f"{seconds[way]:.1f}" for way in ("groups", "tree", "disk"))
        rows.append(f"| {size.engines:,} | {size.ranks:,} | {numbers} | {calls:.1f} |")
    return ["| engines | ranks | groups (built) | tree | disk | rank 0's calls |\n|---|---|---|---|---|---|", *rows]


def file_lines(size: Size) -> list[str]:
    found = model.files(size, STEPS)
    rows = [f"| {what} | {number:,} |" for what, number in found.items()]
    return ["| what | files |\n|---|---|", *rows, f"| together | {sum(found.values()):,} |"]


def page_with(made: str, page: str) -> str:
    """The page, with the tables between its two marks replaced."""
    begin, end = map(re.escape, MARKS)
    return re.sub(f"{begin}.*{end}", lambda _: f"{MARKS[0]}\n{made}{MARKS[1]}", page, flags=re.DOTALL)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else 0.0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What breaks first when a run grows.")
    parser.add_argument("--engines", type=int, default=LARGEST.engines)
    parser.add_argument("--ranks", type=int, default=LARGEST.ranks)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    given = parser.parse_args()
    made = tables(Size(given.engines, given.ranks))
    if given.write:
        PAGE.write_text(page_with(made, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(made, end="")


if __name__ == "__main__":
    main()
