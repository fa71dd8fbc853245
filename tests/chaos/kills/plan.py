"""Which faults are tried, in which runs: process × point × schedule × channel, each pair of them at least once.

A run is one case: some twenty short steps, and a fault at about every second one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

SEED = 13
PROCESSES = (
    "supervisor",
    "collector",
    "learner",
    "rank-0",
    "rank-1",
    "engine-role-0",
    "engine-0",
    "scheduler",
    "router",
    "verifier",
)
EVENTS = ("issued", "committed", "consumed", "published", "saved", "evaluated")
HALVES = ("batch", "evaluation", "logprobs", "pointer", "policy", "checkpoint", "commit", "metrics", "event")
NAMES = ("batch", "policy", "checkpoint", "pointer")
AT_STARTS = {"half:epoch": "collector", "half:member": "engine-role-1", "half:update": "rank-1"}
"""Point that is reached when a role starts → the process that is killed first, so that it is."""
POINTS = (*EVENTS, *(f"half:{kind}" for kind in HALVES), *(f"name:{kind}" for kind in NAMES), *AT_STARTS)
SCHEDULES = ("sync", "async", "staged")
CHANNELS = ("disk", "broadcast", "ipc")
LAYOUTS = ("tensor_parallel", "data_parallel")
STEPS_A_FAULT = 3
"""A checkpoint, a stage and an evaluation come every two steps: each point is reached within three."""
Action = Literal["kill", "stop", "full", "clock", "fill", "strike"]
"""strike: a kill at a moment that nothing in the run decides."""
EPISODES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "environment": (dict(environment="tests.support.environments:Echo"), ("host", "episode")),
    "agent": (dict(agent="tests.support.environments:asking_twice"), ("host", "episode")),
    "tools": (dict(tools=["python"], turns=4), ("host", "episode")),
    "command": (dict(command=["python", "-I", "-S", "tests/support/black_box.py"]), ("agent",)),
}
"""Kind of a run of episodes → its section, and the processes that it has beside the others."""
STUCK: dict[str, dict[str, Any]] = {
    "environment": dict(options=dict(stuck=True), step_s=2.0),
    "command": dict(command=["python", "-I", "-S", "tests/support/black_box.py", "stuck"], agent_s=3.0),
}
"""Kind → what makes the episodes of prompts that begin with 9 never end."""
NUM_EPISODE_RUNS = 60


@dataclass(frozen=True)
class Fault:
    """At a point of the run, something happens to processes of it (tests.chaos.kills.hooks)."""

    id: str
    point: str
    victims: tuple[str, ...]
    action: Action = "kill"
    apart_s: float = 0.0
    """Between two victims."""
    lasts_s: float = 0.0
    """Of a stop, of a wrong clock, and of the time from the point of a strike, a number of steps, to the strike."""
    jump_s: float = 0.0
    """Of a clock."""
    first: str = ""
    """Killed by the driver beforehand, so that the point is reached."""

    def order(self) -> dict[str, Any]:
        """For the processes of the run."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """One run and its faults."""

    id: str
    schedule: str
    channel: str
    layout: str
    faults: tuple[Fault, ...]
    forked: bool = True
    """Else every program is started by exec, ranks by torchrun."""
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)
    disk_mib: int = 0
    """The run lies on a file system of its own, of this size; needs root."""

    @property
    def steps(self) -> int:
        spare = 4 if "episode" in self.overrides else 0  # until the process that a strike seeks is there
        return self.steps_a_fault * (len(self.faults) + 1) + spare

    @property
    def steps_a_fault(self) -> int:
        """Steps that the learner may take, for each fault."""
        return 2 if "episode" in self.overrides else STEPS_A_FAULT


def plans() -> list[Plan]:
    """All of them; those that say most come first."""
    return [
        *matrix(),
        *pairs(),
        *stops(),
        full_disks(),
        full_file_system(),
        clocks(),
        *by_exec(),
        deltas(),
        *episodes(),
    ]


def matrix() -> Iterator[Plan]:
    """One kill for every process at every point, spread so that each point meets every schedule with every channel."""
    ways = list(product(SCHEDULES, CHANNELS))
    rng = random.Random(SEED)
    runs: list[list[tuple[str, str]]] = [[] for _ in range(2 * len(ways))]
    for offset, point in enumerate(POINTS):
        victims = list(PROCESSES)
        rng.shuffle(victims)
        for place, victim in enumerate(victims):
            way = (place + offset) % len(ways)
            both = runs[way], runs[way + len(ways)]
            min(both, key=len).append((point, victim))
    for number, found in enumerate(runs):
        schedule, channel = ways[number % len(ways)]
        rng.shuffle(found)
        faults = tuple(_kill(place, point, victim) for place, (point, victim) in enumerate(found))
        yield Plan(f"kills-{number:02d}-{schedule}-{channel}", schedule, channel, LAYOUTS[number % 2], faults)


def _kill(place: int, point: str, victim: str) -> Fault:
    if point in EVENTS:  # the line before, and the line after
        point = f"{'before' if place % 2 else 'after'}:{point}"
    first = AT_STARTS.get(point, "")
    if (first, victim) == ("collector", "verifier"):
        first = "engine-role-1"  # a collector that starts has no verifier yet
    return Fault(f"{place:02d}-{victim}-at-{_word(point)}", point, (victim,), first=first)


def pairs() -> Iterator[Plan]:
    """Two processes within 100 ms."""
    rng = random.Random(SEED + 1)
    found = [(a, b) for a in PROCESSES for b in PROCESSES if a < b and "supervisor" not in (a, b)]
    rng.shuffle(found)
    points = [point for point in POINTS if point not in AT_STARTS]
    for number, (schedule, channel) in enumerate(zip(SCHEDULES, CHANNELS, strict=True)):
        faults = []
        for place, victims in enumerate(found[number::3]):
            point = rng.choice(points)
            point = f"after:{point}" if point in EVENTS else point
            apart = round(rng.uniform(0.0, 0.1), 3)
            faults.append(Fault(f"{place:02d}-{'-and-'.join(victims)}", point, victims, apart_s=apart))
        yield Plan(f"pairs-{schedule}-{channel}", schedule, channel, LAYOUTS[number % 2], tuple(faults))


def stops() -> Iterator[Plan]:
    """SIGSTOP, then SIGCONT: of one process, and of a role with all below it."""
    rng = random.Random(SEED + 2)
    single = [name for name in PROCESSES if name != "verifier"]
    roles = ["collector*", "learner*", "engine-role-0*", "router*"]
    for number, (victims, lasts) in enumerate(((single, 4.0), (roles, 25.0))):
        faults = []
        for place, victim in enumerate(victims):
            point = rng.choice(("before:consumed", "after:committed", "after:published", "half:batch", "half:policy"))
            faults.append(Fault(f"{place:02d}-stop-{_word(victim)}", point, (victim,), action="stop", lasts_s=lasts))
        yield Plan(
            f"stops-{'roles' if number else 'single'}",
            SCHEDULES[number],
            CHANNELS[number],
            LAYOUTS[number],
            tuple(faults),
        )


def full_disks() -> Plan:
    """Half a file is written, then the disk is full; a moment later it has room again."""
    points = [*(f"half:{kind}" for kind in (*HALVES, "epoch", "member", "update"))]
    faults = tuple(
        Fault(f"{place:02d}-full-{_word(point)}", point, ("self",), action="full", first=AT_STARTS.get(point, ""))
        for place, point in enumerate(points)
    )
    return Plan("full-disk-at-each-writer", "async", "disk", LAYOUTS[0], faults)


def full_file_system() -> Plan:
    """The run's file system is really full for a while, whoever writes then."""
    faults = tuple(
        Fault(f"{place:02d}-fill", "", (), "fill", lasts_s=lasts) for place, lasts in enumerate((3.0, 15.0, 30.0))
    )
    return Plan("full-file-system", "async", "disk", LAYOUTS[0], faults, disk_mib=256)


def clocks() -> Plan:
    """The clock of a role jumps, forwards and back, and stays wrong for a while."""
    jumps = (3600.0, -3600.0, 86400.0 * 400, -86400.0 * 400)
    roles = ("collector", "rank", "learner", "engine", "router", "supervisor", "")
    faults = tuple(
        Fault(
            f"{place:02d}-clock-{role or 'all'}",
            "after:consumed",
            (role,),
            "clock",
            lasts_s=6.0,
            jump_s=jumps[place % 4],
        )
        for place, role in enumerate(roles)
    )
    return Plan("clocks", "async", "disk", LAYOUTS[1], faults)


def by_exec() -> Iterator[Plan]:
    """The same without forks: exec, torchrun, and death with the parent as the product has them."""
    rng = random.Random(SEED + 3)
    for number, (schedule, channel) in enumerate(zip(SCHEDULES, reversed(CHANNELS), strict=True)):
        points = rng.sample([*EVENTS, "half:batch", "half:checkpoint", "half:policy"], 4)
        victims = rng.sample(PROCESSES, 4)
        faults = tuple(
            _kill(place, point, victim) for place, (point, victim) in enumerate(zip(points, victims, strict=True))
        )
        yield Plan(f"exec-{schedule}-{channel}", schedule, channel, LAYOUTS[number % 2], faults, forked=False)


def deltas() -> Plan:
    """Learner, engine's role and server die while a delta is written, gets its name, is made into a replica, and is
    loaded: with weights.channel delta."""
    strikes = (
        ("half:policy", "rank-0"),
        ("name:policy", "rank-0"),
        ("half:pointer", "rank-0"),
        ("name:pointer", "rank-1"),
        ("half:policy", "engine-role-0"),
        ("name:policy", "engine-role-1"),
        ("half:member", "engine-role-0"),
        ("half:member", "rank-0"),
        ("half:pointer", "engine-0"),
        ("half:member", "scheduler"),
    )
    faults = tuple(
        Fault(f"{place:02d}-{victim}-at-{_word(point)}", point, (victim,))
        for place, (point, victim) in enumerate(strikes)
    )
    overrides = dict(rollout=dict(precision="fp8_block"), learner=dict(optimizer=dict(lr=1e-5, warmup_steps=0)))
    whole = dict(weights=dict(channel="delta", whole_every=4))
    return Plan("deltas", "sync", "delta", LAYOUTS[1], faults, overrides=overrides | whole)


def make_model_of(plan: Plan, folder: Path) -> Path:
    """Return a model for a plan's run, in `folder`; one of episodes knows the characters of roles and calls."""
    from launch.convert.new_model import DEFAULT_CHARACTERS, new_model

    speaks = "episode" in plan.overrides
    model = folder / ("speaker" if speaks else "model")
    if not (model / "config.json").exists():
        new_model(model, characters="0123456789=#>:<!" if speaks else DEFAULT_CHARACTERS)
    return model


def episodes() -> Iterator[Plan]:
    """Runs of episodes: one to three kills at random of the collector, with the gateway that it holds, of an engine or
    a process of it, and of the processes of environments, agents and tools. In every third run of environments and
    agents by command, those of some prompts never end."""
    for number in range(NUM_EPISODE_RUNS):
        rng, kind = random.Random(SEED + 4 + number), list(EPISODES)[number % len(EPISODES)]
        (section, own), engines = EPISODES[kind], 2 if number // len(EPISODES) % 4 == 1 else 1
        if number // len(EPISODES) % 3 == 0:
            section = {**section, **STUCK.get(kind, {})}
        faults = []
        for place in range(rng.choice((1, 1, 1, 2, 2, 3))):
            victim = rng.choice(("collector", rng.choice(("engine-0", "scheduler", "engine-role-0")), *own, *own))
            step, after = rng.randint(0, 2 * (place + 1)), round(rng.uniform(0.0, 2.0), 3)
            faults.append(Fault(f"{place:02d}-strike-{victim}", f"{step}", (victim,), "strike", lasts_s=after))
        overrides = dict(
            episode=section,
            rollout=dict(engines=engines, prompts_per_batch=4, group_size=2, max_new_tokens=8, context_tokens=128),
            learner=dict(tensor_parallel=1, micro_batch_tokens=256),
            evaluation=dict(every=4, prompts=2, samples=1),
        )
        schedule, channel = SCHEDULES[number % 3], CHANNELS[number // 3 % 3]
        yield Plan(
            f"episodes-{number:02d}-{kind}-{schedule}-{channel}",
            schedule,
            channel,
            LAYOUTS[0],
            tuple(faults),
            overrides=overrides,
        )


def in_short() -> Plan:
    """For everyday: each process once, at points that matter."""
    points = (
        "after:committed",
        "half:batch",
        "after:published",
        "half:policy",
        "before:saved",
        "half:checkpoint",
        "name:checkpoint",
        "before:issued",
        "half:metrics",
        "after:evaluated",
    )
    faults = tuple(
        Fault(f"{place:02d}-{victim}-at-{_word(point)}", point, (victim,))
        for place, (victim, point) in enumerate(zip(PROCESSES, points, strict=True))
    )
    return Plan("in-short", "async", "disk", LAYOUTS[0], faults)


def shares() -> Plan:
    """Each of two data-parallel ranks, which read and hold their own samples alone."""
    faults = (
        Fault("00-rank-1-at-after-consumed", "after:consumed", ("rank-1",)),
        Fault("01-rank-0-at-half-checkpoint", "half:checkpoint", ("rank-0",)),
    )
    return Plan("shares", "async", "broadcast", "data_parallel", faults)


def _word(text: str) -> str:
    return text.replace(":", "-").replace("*", "-all")
