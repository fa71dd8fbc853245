"""A run over several hosts, each role started again by a small loop when it ends: what a scheduler does, and no more.

The hosts share the run directory (with model and recipe beside it) and the network. The API key lies in a file of each
host's own /tmp.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.run_directory import RunDirectory
from tests.cluster.rig import Hosts
from tests.support.runs import ROOT, evenkeel_json

ENGINE_PORT, ROUTER_PORT, LEARNER_PORT = 30000, 8000, 29500
KEY_FILE = "/tmp/evenkeel-api-key"
KEEP = """
while :; do
  echo; echo "@keep $(date +%s.%N) start"
  "$@"; code=$?
  echo; echo "@keep $(date +%s.%N) $code"
  case $code in 0 | 64 | 65) exit $code ;; esac
  sleep 1
done
"""
"""Starts a role again unless it is finished (0), cannot go on (64) or was superseded (65)."""
CALL = """
import sys, urllib.request, urllib.error
method, url, key, body = sys.argv[1:5]
headers = {"Content-Type": "application/json"}
if key == "-file":
    key = open(sys.argv[5]).read().strip()
if key:
    headers["Authorization"] = "Bearer " + key
request = urllib.request.Request(url, data=body.encode() if body else None, method=method, headers=headers)
try:
    with urllib.request.urlopen(request, timeout=10) as answer:
        print(answer.status); print(answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code); print(error.read().decode(errors="replace"))
"""


@dataclass(frozen=True)
class Layout:
    """Which role runs on which host."""

    learner: tuple[str, ...] = ("h1", "h2")
    engines: tuple[str, ...] = ("h3", "h4")
    router: str = "h1"
    collector: str = "h1"


@dataclass
class Role:
    """A role that is kept alive on a host."""

    name: str
    host: str
    log: Path
    keeper: subprocess.Popen[bytes]

    def ends(self) -> list[tuple[float, int]]:
        """When the role ended, and with which exit status."""
        lines = self.log.read_text(errors="replace").splitlines()
        said = [line.split()[1:] for line in lines if line.startswith("@keep ")]
        return [(float(when), int(what)) for when, what in said if what != "start"]

    def tail(self, lines: int = 15) -> str:
        """The end of its log, for messages."""
        text = self.log.read_text(errors="replace") if self.log.exists() else "(no log)"
        return f"--- {self.name} on {self.host}, ended {self.ends()}\n" + "\n".join(text.splitlines()[-lines:])


class Watched:
    """A run that is watched from outside, by its directory."""

    path: Path
    steps: int
    groups: int | None = None
    """Of a batch; None where they are not counted."""

    def gave_up(self) -> str:
        """Which role cannot go on; empty while all can."""
        raise NotImplementedError

    def tails(self) -> str:
        """The end of every log."""
        raise NotImplementedError

    def trained(self) -> int:
        """Steps that were trained."""
        return len(read_metrics(self.path)) if self.path.exists() else 0

    def published(self) -> int:
        """The version that the run serves; -1 before the first."""
        run = RunDirectory(self.path)
        return run.published_version() if run.is_published() else -1

    def wait(self, condition: Callable[[], Any], what: str, deadline_s: float = 120.0) -> Any:
        """Until the condition holds; returns what it found. Fails at once when a role has given up."""
        give_up = time.monotonic() + deadline_s
        while not (found := condition()):
            assert not (failed := self.gave_up()), f"{failed} while we waited for {what}\n{self.tails()}"
            if time.monotonic() > give_up:
                raise AssertionError(f"waited {deadline_s:g} s for {what}; {self.trained()} steps\n{self.tails()}")
            time.sleep(0.1)
        return found

    def wait_steps(self, steps: int, deadline_s: float = 180.0) -> None:
        self.wait(lambda: self.trained() >= steps, f"step {steps}", deadline_s)

    def end(self) -> dict[str, Any]:
        """What `verify history` and a replay on one machine say of it."""
        audit = evenkeel_json("verify", "history", self.path)
        replay = evenkeel_json("train", "--replay", self.path, in_process=False, timeout=900)
        return audit | {"bit_identical": replay["bit_identical"], "differing_tensors": replay["differing_tensors"]}

    def check_sound(self, end: dict[str, Any] | None = None) -> None:
        """What every run must end with, whatever happened to it."""
        end = end or self.end()
        assert (end["lost"], end["duplicated"], end["version_violations"], end["missing_batches"]) == (0, 0, 0, 0), end
        assert end["batches"] == self.steps
        assert self.groups is None or end["groups"] == self.steps * self.groups
        assert end["bit_identical"], end["differing_tensors"][:5]
        assert [line["step"] for line in read_metrics(self.path)] == list(range(self.steps))


@dataclass
class ClusterRun(Watched):
    """One run; roles start with `start_all` or one by one."""

    hosts: Hosts
    name: str
    model: Path
    logs: Path
    """Of the roles, outside the run directory."""
    layout: Layout = field(default_factory=Layout)
    steps: int = 30
    groups: int | None = 8
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(24))
    roles: dict[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        data: dict[str, dict[str, Any]] = dict(
            run=dict(
                name=self.name, root=str(self.hosts.shared / "runs"), steps=self.steps, wait_deadline_s=240,
                max_restarts=50,
            ),
            model=dict(path=str(self._shared_model())),
            task=dict(name="sort_digits", min_digits=2, max_digits=4),
            rollout=dict(
                precision="fp32", engines=len(self.layout.engines), prompts_per_batch=8, group_size=4,
                max_new_tokens=8,
                context_tokens=64, request_deadline_s=20, start_deadline_s=180,
            ),
            learner=dict(
                precision="fp32", pipeline_parallel=len(self.layout.learner), micro_batch_tokens=512,
                step_deadline_s=60,
                optimizer=dict(lr=4e-4, warmup_steps=5),
            ),
            weights=dict(channel="broadcast", publish_deadline_s=8),
            checkpoint=dict(every=5),
            evaluation=dict(every=1000, prompts=8, samples=2),
        )  # fmt: skip
        for section, values in self.sections.items():
            data[section] = data[section] | values
        self.recipe.write_text(yaml.safe_dump(data))

    def _shared_model(self) -> Path:
        """The model, where all hosts see it."""
        shared = self.hosts.shared / "model"
        if not shared.exists():
            shutil.copytree(self.model, shared)
        return shared

    @property
    def recipe(self) -> Path:
        return self.hosts.shared / f"{self.name}.yaml"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.hosts.shared / "runs" / self.name

    # Roles

    def start_all(self) -> None:
        """Everything at once: no role needs another to have been started before."""
        for index in range(len(self.layout.engines)):
            self.start_engine(index)
        self.start_router()
        self.start_collector()
        for node in range(len(self.layout.learner)):
            self.start_learner(node)

    def start_engine(self, index: int) -> Role:
        host = self.layout.engines[index]
        return self.start(f"engine-{index}", host, "engine", self.path, str(index), "--port", str(ENGINE_PORT))

    def start_router(self) -> Role:
        return self.start("router", self.layout.router, "router", self.path, "--port", str(ROUTER_PORT))

    def start_collector(self, host: str | None = None, name: str = "collector") -> Role:
        return self.start(name, host or self.layout.collector, "collector", self.path)

    def start_learner(self, node: int, host: str | None = None, name: str | None = None) -> Role:
        words = [self.path, str(node), "--nodes", str(len(self.layout.learner)), "--port", str(LEARNER_PORT)]
        words += ["--recipe", self.recipe] if node == 0 else []
        return self.start(name or f"learner-{node}", host or self.layout.learner[node], "learner", *words)

    def start(self, name: str, host: str, *words: str | Path) -> Role:
        """Keep a role alive on a host."""
        self.give_key(host)
        log = self.logs / f"{name}.log"
        role = [sys.executable, "-m", "launch.cli", "role", *map(str, words), "--host", host]
        environment = {
            "EVENKEEL_API_KEY_FILE": KEY_FILE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp",
            "COLUMNS": "200",
        }  # fmt: skip
        keeper = self.hosts.popen(host, "bash", "-c", KEEP, "keep", *role, log=log, env=environment, cwd=ROOT)
        self.roles[name] = Role(name, host, log, keeper)
        return self.roles[name]

    def give_key(self, host: str) -> None:
        """Write the file with the API key; it goes when the host is switched off."""
        script = f"umask 077; cat >{KEY_FILE}"
        self.hosts.run(host, "bash", "-c", script, input=self.key, stdin=None, check=True)

    def on(self, host: str) -> list[Role]:
        """The roles that were started on a host."""
        return [role for role in self.roles.values() if role.host == host]

    def restart_host(self, host: str) -> None:
        """Reboot a host that crashed, and start its roles as its scheduler would."""
        roles = self.on(host)
        self.hosts.reboot(host)
        for name in [role.name for role in roles]:
            kind, _, number = name.partition("-")
            if kind == "engine":
                self.start_engine(int(number))
            elif kind == "learner":
                self.start_learner(int(number))
            else:
                dict(router=self.start_router, collector=self.start_collector)[kind]()

    # What happens

    def gave_up(self) -> str:
        failed = [role.name for role in self.roles.values() if role.keeper.poll() == 64]
        return f"{failed[0]} gave up" if failed else ""

    def events(self, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        """Events of one kind, by time."""
        found = [event for event in read_events(self.path) if event["kind"] == kind and event["time"] >= since]
        return sorted(found, key=lambda event: event["time"])

    def tails(self) -> str:
        """The end of every log."""
        return "\n".join(role.tail() for role in self.roles.values())

    def call(self, here: str, method: str, url: str, *, key: str | None = None, body: str = "") -> tuple[int, str]:
        """Status and body of a request from a host; `key` None: the run's."""
        words = [method, url, "-file" if key is None else key, body, KEY_FILE]
        done = self.hosts.run(here, sys.executable, "-c", CALL, *words)
        assert done.returncode == 0, done.stderr
        status, _, text = done.stdout.partition("\n")
        return int(status), text

    def engine_url(self, index: int) -> str:
        return f"http://{self.layout.engines[index]}:{ENGINE_PORT}"

    @property
    def router_url(self) -> str:
        return f"http://{self.layout.router}:{ROUTER_PORT}"

    def served(self, index: int) -> str | None:
        """The weight version that an engine names; None when it does not answer."""
        try:
            status, text = self.call(self.layout.collector, "GET", f"{self.engine_url(index)}/model_info")
        except AssertionError:
            return None
        return str(json.loads(text)["weight_version"]) if status == 200 else None

    def routed(self) -> list[str]:
        """The engines to which the router sends requests."""
        status, text = self.call(self.layout.router, "GET", f"{self.router_url}/workers")
        assert status == 200, text
        return sorted(worker["url"] for worker in json.loads(text)["workers"] if worker["is_healthy"])

    # The end

    def finish(self, deadline_s: float = 300.0, roles: Sequence[str] = ()) -> dict[str, Any]:
        """Wait for the end of the run; returns what `verify history` and a replay on one machine say."""
        waited = [self.roles[name] for name in roles or ("learner-0", "collector")]
        self.wait(lambda: all(role.keeper.poll() is not None for role in waited), "the end of the run", deadline_s)
        assert [role.keeper.returncode for role in waited] == [0] * len(waited), self.tails()
        return self.end()
