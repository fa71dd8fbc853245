"""Check the folder and ports that a run on several hosts needs: `evenkeel doctor --hosts A,B FOLDER`.

Agents on all hosts (launch.doctor.agent) work in a new folder below the shared FOLDER. They find who wins an exclusive
creation, how late other hosts see a change, and which ports are reached (ops/assumptions.md). A check fails if a run
could lose or repeat something or cannot start; it warns if a run is only slower.
"""

from __future__ import annotations

import json
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from launch.doctor.machine import GIB, MIN_DISK_GIB, WANTED_DISK_GIB, Check, Status, report
from pipeline.child_process import kill_and_wait
from pipeline.data.files import unique_suffix
from pipeline.errors import EvenKeelError
from precision.text import JsonError, parse_object

ANSWER_S = 60.0
"""Longest wait for the answer to a quick order: a program on another host may start slowly."""
RACE_ROUNDS, RACE_EVERY_S, RACE_STARTS_IN_S = 100, 0.02, 0.5
POLL_S = 0.01
SOON_S = 2.0
"""A change that is seen within this time delays a run by less than a step."""
AGENT = "launch.doctor.agent"
DEFAULT_VIA = "ssh {host}"
ANOTHER = "put the run on another file system (NFS 4, Lustre, GPFS, CephFS)"
CACHES = (
    "every publish and every batch is seen that much later; mount with short attribute caching: NFS "
    "actimeo=1,lookupcache=positive; FUSE attr_timeout=1,entry_timeout=1,negative_timeout=0"
)
_STOP_S = 5.0
_MOST_CHARACTERS = 1 << 20
"""Longest line; a longer one counts as several."""
T = TypeVar("T")


class HostError(EvenKeelError):
    """A host cannot be reached, or an order failed there."""


@dataclass(frozen=True)
class Host:
    name: str
    """Name for --via, which starts programs there."""
    address: str
    """Address at which other hosts reach it."""


def words_of(via: str, host: str) -> list[str]:
    """Return the command that --via gives for a host. Raises HostError."""
    try:
        return [word.format(host=host) for word in shlex.split(via)]
    except (ValueError, LookupError, AttributeError):
        raise HostError(
            f"--via is {via!r}, expected a command with {{host}} in it, such as {DEFAULT_VIA!r}; close every quote, "
            "and write other braces twice"
        ) from None


class Agent:
    """A running agent, as a context manager; for one thread at a time."""

    def __init__(self, host: Host, via: str, program: Sequence[str] = ()) -> None:
        """Start the agent by `program`, by default this Python at the same path."""
        self.host = host
        self._command = [*words_of(via, host.name), *(program or (sys.executable, "-P", "-m", AGENT))]
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise HostError(f"{shlex.join(self._command)} cannot be started ({error.strerror}); see --via") from None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._complaints: list[str | None] = []
        self._readers = [
            threading.Thread(target=_read, args=given, daemon=True)
            for given in ((self._process.stdout, self._lines.put), (self._process.stderr, self._complaints.append))
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the agent's input, and kill an agent that does not end."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            kill_and_wait(self._process)
        for reader, stream in zip(self._readers, (self._process.stdout, self._process.stderr), strict=True):
            reader.join(_STOP_S)
            assert stream is not None
            if not reader.is_alive():  # otherwise `close` would wait for its read
                stream.close()

    def ask(self, do: str, *, deadline_s: float = ANSWER_S, **order: Any) -> dict[str, Any]:
        """Give an order and return the answer. Raises HostError, also without an answer within `deadline_s`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dict(do=do, **order)) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        answer: dict[str, Any] = {}
        while not answer.pop("done", False):  # skip a greeting of the shell there
            try:
                line = self._lines.get(timeout=deadline_s)
            except queue.Empty:
                raise HostError(
                    f"host {self.host.name} did not answer `{do}` within {deadline_s:g} s; try by hand: "
                    f"{shlex.join(self._command)}"
                ) from None
            if line is None:
                raise self._ended()
            try:
                answer = parse_object(line)
            except JsonError:
                answer = {}
        if error := answer.pop("error", None):
            raise HostError(f"host {self.host.name}: {do}: {error}")
        return answer

    def _ended(self) -> HostError:
        for reader in self._readers:
            reader.join(_STOP_S)
        complaints = [line.strip() for line in self._complaints if line and line.strip()]
        said = " | ".join(complaints[-3:]) or "it said nothing"
        return HostError(
            f"the agent on host {self.host.name} ended ({said}); it was started by: {shlex.join(self._command)}; give "
            "another --via, or --python where Even Keel is installed there"
        )


def _read(stream: IO[str], take: Callable[[str | None], None]) -> None:
    while line := stream.readline(_MOST_CHARACTERS):
        take(line)
    take(None)


def check_hosts(
    hosts: str, folder: Path, as_json: bool, via: str, python: str | None, ports: str, visible_within_s: float
) -> int:
    """Print the findings for the options as typed; return 1 if a check failed. Raises HostError for bad options."""
    given = []
    for text in hosts.split(","):
        name, _, address = text.strip().partition("=")
        if not name:
            raise HostError(f"--hosts has {text!r}, expected NAME or NAME=ADDRESS; write for example --hosts a,b")
        words_of(via, name)
        given.append(Host(name, address or name))
    numbers = [port.strip() for port in ports.split(",") if port.strip()]
    if not numbers or not all(port.isdecimal() and int(port) <= 65535 for port in numbers):
        raise HostError(
            f"--ports is {ports!r}, expected numbers from 0 (any free port) to 65535 with commas between them, such as "
            "29500,30000"
        )
    program = (python, "-P", "-m", AGENT) if python else ()
    listened = tuple(map(int, numbers))
    checks = diagnose_hosts(given, folder, via, program, ports=listened, visible_within_s=visible_within_s)
    return report(checks, as_json, f"evenkeel doctor: {folder} between {', '.join(host.name for host in given)}")


def diagnose_hosts(
    hosts: Sequence[Host],
    folder: Path,
    via: str = DEFAULT_VIA,
    program: Sequence[str] = (),
    *,
    ports: Sequence[int] = (29500, 30000),
    visible_within_s: float = 60.0,
) -> list[Check]:
    """Return the findings between hosts. `via` runs `program`, by default this Python, as the agent on `{host}`. Each
    host should reach `ports` of every other host. A change not seen within `visible_within_s` counts as lost. Raises
    HostError for fewer than two hosts, or a repeated host."""
    if len({host.name for host in hosts}) != len(hosts) or len(hosts) < 2:
        raise HostError(f"--hosts has {', '.join(host.name for host in hosts)}; give two or more different hosts")
    place = folder.absolute() / f".doctor-{unique_suffix()}"
    with ExitStack() as stack:
        try:
            agents = [stack.enter_context(Agent(host, via, program)) for host in hosts]
            return Visit(agents, place, ports, visible_within_s).checks()
        except HostError as error:
            return [Check("agents", "fail", str(error), "each host must start a program and reach the folder")]


class Visit:
    """A round of measurements by running agents in the new folder `place`."""

    def __init__(
        self, agents: Sequence[Agent], place: Path, ports: Sequence[int], visible_within_s: float = 60.0
    ) -> None:
        self.agents, self.place, self.ports, self.visible_within_s = agents, str(place), ports, visible_within_s

    def checks(self) -> list[Check]:
        """Return all findings, and delete what was written."""
        found = []
        for host, seen in zip(self.agents, self._each(lambda one: one.ask("look", folder=self.place)), strict=True):
            free = seen["free"] / GIB
            status: Status = "ok" if free >= WANTED_DISK_GIB else "warn" if free >= MIN_DISK_GIB else "fail"
            least = f"{WANTED_DISK_GIB:g} GiB are the least for a small run; see `evenkeel plan`"
            says = f"{seen['kind']} ({seen['options']}), {free:.1f} GiB free"
            found.append(Check(f"folder on {host.host.name}", status, says, "" if status == "ok" else least))
        try:
            found += [check for writer in self.agents for check in self._visibility(writer)]
            if not any(check.status == "fail" for check in found):  # two folders instead of a shared one would fail it
                order: dict[str, Any] = dict(rounds=RACE_ROUNDS, start_in_s=RACE_STARTS_IN_S, every_s=RACE_EVERY_S)
                won = self._each(lambda agent: set(agent.ask("race", folder=self.place, **order)["won"]))
                found.append(judge_exclusive(RACE_ROUNDS, won))
            listening = self._each(lambda agent: agent.ask("listen", ports=list(self.ports)))
            for target, ports in zip(self.agents, (answer["ports"] for answer in listening), strict=True):
                for source in self.agents:
                    if source is target:
                        continue
                    deadline_s, address = ANSWER_S + 10 * len(ports), target.host.address
                    answer = source.ask("connect", address=address, ports=ports, deadline_s=deadline_s)
                    name = f"{source.host.name} connects to {target.host.name}"
                    failed = [f"port {port}: {problem}" for port, problem in answer["problems"].items() if problem]
                    advice = (
                        "open these ports between the hosts, or name "
                        f"{target.host.name} by an address that they reach: NAME=ADDRESS"
                    )
                    if failed:
                        found.append(Check(name, "fail", "; ".join(failed), advice))
                    else:
                        found.append(Check(name, "ok", f"ports {', '.join(answer['problems'])}"))
            return found
        finally:
            self._each(lambda agent: agent.ask("remove", folder=self.place))

    def _visibility(self, writer: Agent) -> list[Check]:
        readers = [agent for agent in self.agents if agent is not writer]
        folder = f"{self.place}/seen-{self.agents.index(writer)}"
        writer.ask("write", path=f"{folder}/old", text="1")
        began = time.monotonic()
        with ThreadPoolExecutor(len(readers)) as pool:
            arrived = list(pool.map(lambda reader: self._delays(reader, folder, {"old": "1"}, began), readers))
            lost = [reader for reader, delays in zip(readers, arrived, strict=True) if None in delays.values()]
            if lost:
                within = f"{self.visible_within_s:g} s"
                return [
                    Check(
                        f"{writer.host.name} writes, {reader.host.name} reads",
                        "fail",
                        f"{reader.host.name} did not see a new folder of {writer.host.name} within {within}",
                        "the folder must be one shared file system, mounted at the same path on every host",
                    )
                    for reader in lost
                ]
            # A reader may remember for a while that a file was missing.
            list(pool.map(lambda reader: reader.ask("read", folder=folder, names=["old", "new"]), readers))
            for name in ("new", "old"):
                writer.ask("write", path=f"{folder}/{name}", text="2")
            written = time.monotonic()
            seen = pool.map(lambda reader: self._delays(reader, folder, {"new": "2", "old": "2"}, written), readers)
            within_s = self.visible_within_s
            return [
                judge_visibility(writer.host.name, reader.host.name, delays, within_s)
                for reader, delays in zip(readers, seen, strict=True)
            ]

    def _delays(self, reader: Agent, folder: str, wanted: Mapping[str, str], since: float) -> dict[str, float | None]:
        """Return the seconds until a reader saw each text by opening it and by listing the folder; None for never."""
        delays: dict[str, float | None] = {f"{how} {name}": None for name in wanted for how in ("open", "list")}
        while None in delays.values() and time.monotonic() - since < self.visible_within_s:
            answer, now = reader.ask("read", folder=folder, names=list(wanted)), time.monotonic() - since
            for name, text in wanted.items():
                if answer["texts"][name] == text and delays[f"open {name}"] is None:
                    delays[f"open {name}"] = now
                if name in answer["listed"] and delays[f"list {name}"] is None:
                    delays[f"list {name}"] = now
            time.sleep(POLL_S)
        return delays

    def _each(self, call: Callable[[Agent], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.agents)) as pool:
            return list(pool.map(call, self.agents))


def judge_visibility(writer: str, reader: str, delays: Mapping[str, float | None], deadline_s: float) -> Check:
    """Return the finding on how late another host's change is seen."""
    name = f"{writer} writes, {reader} reads"
    unseen = sorted(what for what, delay in delays.items() if delay is None)
    if unseen:
        return Check(name, "fail", f"not seen within {deadline_s:g} s: {', '.join(unseen)}", ANOTHER)
    seen = {what: delay for what, delay in delays.items() if delay is not None}
    found = "seen after " + ", ".join(f"{delay:.2f} s ({what})" for what, delay in sorted(seen.items()))
    late = max(seen.values()) > SOON_S
    return Check(name, "warn" if late else "ok", found, CACHES if late else "")


def judge_exclusive(rounds: int, won: Sequence[set[int]]) -> Check:
    """Return the finding on races by hard links, each of which must have one winner."""
    winners = [sum(number in mine for mine in won) for number in range(rounds)]
    twice, never = sum(count > 1 for count in winners), winners.count(0)
    shares = " : ".join(str(len(mine)) for mine in won)
    if twice or never:
        found = f"of {rounds} files that all hosts created at once, {twice} had several winners, {never} had none"
        return Check("exclusive creation", "fail", found, f"two collectors could commit one batch: {ANOTHER}")
    return Check("exclusive creation", "ok", f"{rounds} races by hard link, one winner each ({shares})")
