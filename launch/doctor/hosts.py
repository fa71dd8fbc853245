"""`evenkeel doctor --hosts A,B FOLDER`: does what a run over several hosts rests on hold between these hosts?

Each host runs an agent (launch.doctor.agent). They work on one new folder below FOLDER, the shared one: who wins an
exclusive creation, is a replaced file ever torn, how late is a change seen elsewhere, which ports are reached. What
each guarantee needs is in ops/assumptions.md. A finding fails where a run could lose or repeat something, or cannot
start; it warns where a run is only slower.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from launch.doctor import judge
from launch.doctor.agent import Answer
from launch.doctor.connection import AGENT, ANSWER_S, DEFAULT_VIA, Agent, Host, HostError, words_of
from launch.doctor.machine import Check, render
from pipeline.data.files import unique_suffix

RACE_ROUNDS, RACE_EVERY_S, RACE_STARTS_IN_S = 100, 0.02, 0.5
REPLACE_S = 2.0
APPENDED_LINES, APPENDED_LENGTH = 400, 5000
"""Longer than a page, shorter than a line of metrics with a large histogram."""
SYNCS, SYNC_BYTES = 15, 1 << 20
CLOCK_TRIES = 5
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HostsSettings:
    """What the user may choose."""

    via: str = DEFAULT_VIA
    """Command that runs a program on `{host}`."""
    program: tuple[str, ...] = ()
    """Command of the agent there; by default this Python."""
    ports: tuple[int, ...] = (29500, 30000)
    """Which every host should reach on every other one."""
    visible_within_s: float = 60.0
    """A change that is not seen by then is called lost."""


def check_hosts(
    hosts: str, folder: Path, as_json: bool, via: str, python: str | None, ports: str, visible_within_s: float
) -> int:
    """The command, with its options as they were typed. Raises HostError for what cannot be meant."""
    given = [Host.parse(text) for text in hosts.split(",")]
    for host in given:
        words_of(via, host.name)
    settings = HostsSettings(
        via=via,
        program=(python, "-P", "-m", AGENT) if python else (),
        ports=_parse_ports(ports),
        visible_within_s=visible_within_s,
    )
    return run_hosts_doctor(given, folder, as_json, settings)


def _parse_ports(text: str) -> tuple[int, ...]:
    ports = [port.strip() for port in text.split(",") if port]
    if not all(port.isdecimal() and int(port) <= 65535 for port in ports):
        raise HostError(
            f"--ports is {text!r}, expected numbers from 0 (any free port) to 65535 with commas between them, such as "
            "29500,30000"
        )
    return tuple(int(port) for port in ports)


def run_hosts_doctor(hosts: Sequence[Host], folder: Path, as_json: bool, settings: HostsSettings) -> int:
    """Print the findings and return the exit code: 1 when something fails."""
    checks = diagnose_hosts(hosts, folder, settings)
    code = int(any(check.status == "fail" for check in checks))
    if as_json:
        print(json.dumps(dict(ok=code == 0, checks=[asdict(check) for check in checks])))
    else:
        Console().print(render(checks, title=f"evenkeel doctor: {folder} between {', '.join(h.name for h in hosts)}"))
    return code


def diagnose_hosts(hosts: Sequence[Host], folder: Path, settings: HostsSettings) -> list[Check]:
    """Every check. Raises HostError for fewer than two hosts or the same twice."""
    if len({host.name for host in hosts}) != len(hosts) or len(hosts) < 2:
        raise HostError(f"--hosts has {', '.join(host.name for host in hosts)}; give two or more different hosts")
    place = folder.absolute() / f".doctor-{unique_suffix()}"
    with ExitStack() as stack:
        try:
            agents = [stack.enter_context(Agent(host, settings.via, settings.program)) for host in hosts]
            return Visit(agents, place, settings).checks()
        except HostError as error:
            return [Check("agents", "fail", str(error), "each host must start a program and reach the folder")]


class Visit:
    """One round of measurements with agents that run, in the new folder `place`."""

    def __init__(self, agents: Sequence[Agent], place: Path, settings: HostsSettings) -> None:
        self.agents, self.place, self.settings = agents, place, settings

    def checks(self) -> list[Check]:
        """All findings. Deletes what was written."""
        found = self._each(lambda agent: judge.clock(agent.host.name, *clock_of(agent)))
        try:
            found += self._each(lambda agent: judge.file_system(agent.host.name, agent.ask("look", folder=self._at())))
            found += self._visibility()
            if any(check.status == "fail" for check in found):
                return found + self._reachable()  # one folder that is two would fail everything below
            return [
                *found,
                self._exclusive(),
                *self._replacing(),
                self._appending(),
                *self._fsync(),
                *self._reachable(),
            ]
        finally:
            self._all("remove", folder=self._at())

    def _visibility(self) -> list[Check]:
        """Each host writes in turn, and all others look."""
        return [check for writer in self.agents for check in self._seen_from(writer)]

    def _seen_from(self, writer: Agent) -> list[Check]:
        readers = [agent for agent in self.agents if agent is not writer]
        within_s = self.settings.visible_within_s
        folder = f"{self._at()}/seen-{self.agents.index(writer)}"
        writer.ask("write", path=f"{folder}/old", text="1")
        arrived = [self._arrival(reader, f"{folder}/old") for reader in readers]
        if lost := [reader.host.name for reader, delay in zip(readers, arrived, strict=True) if delay is None]:
            return [judge.not_shared(writer.host.name, name, self.settings.visible_within_s) for name in lost]
        watches = [
            reader.answers(
                "watch", folder=folder, new=["new"], replaced=["old"], within_s=within_s, deadline_s=within_s + ANSWER_S
            )
            for reader in readers
        ]
        with ThreadPoolExecutor(len(readers)) as pool:
            for ready in pool.map(next, watches):
                assert "looking" in ready
            for name in ("new", "old"):
                writer.ask("write", path=f"{folder}/{name}", text="2")
            written = time.monotonic()
            delays = list(pool.map(lambda watch: delays_of(watch, written), watches))
        return [
            judge.visibility(writer.host.name, reader.host.name, delay, self.settings.visible_within_s)
            for reader, delay in zip(readers, delays, strict=True)
        ]

    def _arrival(self, reader: Agent, path: str) -> float | None:
        """Seconds until a reader sees a folder that is new to it; None when it never does."""
        folder, name, started = str(Path(path).parent), Path(path).name, time.monotonic()
        while time.monotonic() - started < self.settings.visible_within_s:
            if reader.ask("watch_once", folder=folder, name=name)["seen"]:
                return time.monotonic() - started
        return None

    def _exclusive(self) -> Check:
        order: dict[str, Any] = dict(
            rounds=RACE_ROUNDS, start_in_s=RACE_STARTS_IN_S, every_s=RACE_EVERY_S, folder=self._at()
        )
        return judge.exclusive(RACE_ROUNDS, [set(answer["won"]) for answer in self._all("race", **order)])

    def _replacing(self) -> list[Check]:
        path = f"{self._at()}/replaced"
        self.agents[0].ask("replace", path=path, seconds=0.05)
        readers = self.agents[1:]
        for reader in readers:
            self._arrival(reader, path)
        with ThreadPoolExecutor(len(self.agents)) as pool:
            writing = pool.submit(lambda: self.agents[0].ask("replace", path=path, seconds=REPLACE_S))
            reading = pool.map(lambda agent: agent.ask("reread", path=path, seconds=REPLACE_S), readers)
            counts = [answer["counts"] for answer in reading]
            times = writing.result()["times"]
        return [judge.replaced(agent.host.name, times, count) for agent, count in zip(readers, counts, strict=True)]

    def _appending(self) -> Check:
        path = f"{self._at()}/appended"
        self._all("append", path=path, lines=APPENDED_LINES, length=APPENDED_LENGTH)
        whole = self.agents[0].ask("count_lines", path=path, length=APPENDED_LENGTH)["whole"]
        return judge.appended(APPENDED_LINES * len(self.agents), whole)

    def _fsync(self) -> list[Check]:
        order: dict[str, Any] = dict(folder=self._at(), times=SYNCS, size=SYNC_BYTES)
        return self._each(lambda agent: judge.fsync(agent.host.name, agent.ask("sync", **order)["seconds"]))

    def _reachable(self) -> list[Check]:
        listening = self._all("listen", ports=list(self.settings.ports))
        found = []
        for agent, ports in zip(self.agents, (answer["ports"] for answer in listening), strict=True):
            for other in self.agents:
                if other is not agent:
                    problems = other.ask(
                        "connect", address=agent.host.address, ports=ports, deadline_s=ANSWER_S + 10 * len(ports)
                    )["problems"]
                    found.append(judge.ports(other.host.name, agent.host.name, problems))
        return found

    def _all(self, do: str, **order: Any) -> list[Answer]:
        """The same order to all agents at once."""
        return self._each(lambda agent: agent.ask(do, **order))

    def _each(self, call: Callable[[Agent], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.agents)) as pool:
            return list(pool.map(call, self.agents))

    def _at(self) -> str:
        return str(self.place)


def clock_of(agent: Agent) -> tuple[float, float]:
    """By how many seconds the host's clock is ahead of this one, and by how much that may be wrong."""
    best = (0.0, float("inf"))
    for _ in range(CLOCK_TRIES):
        asked = time.time()
        there = float(agent.ask("hello")["time"])
        answered = time.time()
        half = (answered - asked) / 2
        best = min(best, (there - asked - half, half), key=lambda found: found[1])
    return best


def delays_of(watch: Any, written: float) -> dict[str, float | None]:
    """Seconds from the write until the reader saw it, by what was looked at; None for what it never saw."""
    delays: dict[str, float | None] = {}
    for answer in watch:
        if "seen" in answer:
            delays[f"{answer['by']} {answer['seen']}"] = max(0.0, time.monotonic() - written)
        for how, name in answer.get("unseen", ()):
            delays[f"{how} {name}"] = None
    return delays
