"""What a seed means: a small run, and the faults that meet it. Everything else is drawn from streams of the same seed.

A fault strikes when its role has reached an operation for the n-th time, whichever start of the role that is. Half of
the faults name the kind of operation, so that rare ones (a link, a rename) are met as often as frequent ones.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Literal

FaultKind = Literal["kill", "kill both", "freeze", "power cut", "full", "clock", "stop"]
RARE = ("link", "rename", "fsync", "mkdir", "unlink", "rmdir", "create", "append", "list", "sleep", "publish", "update")
"""Operations that a fault may wait for; see `Disk` and the doubles for where they are."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`kind` strikes `role` at its operation number `count`."""

    kind: FaultKind
    role: Literal["collector", "learner"]
    operation: str
    count: int
    seconds: float = 0.0
    """freeze: how long. full: how long. clock: by how much time.time changes."""
    replaced: bool = True
    """freeze: whether the role is started elsewhere meanwhile."""

    def __str__(self) -> str:
        more = f" {self.seconds:.1f} s{'' if self.kind != 'freeze' or not self.replaced else ', replaced'}"
        return f"{self.kind}{more if self.seconds else ''} at {self.operation} {self.count} of the {self.role}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One simulation."""

    seed: int
    kind: Literal["sync", "async", "staged"] = "sync"
    steps: int = 5
    lag: int = 1
    stage: int = 2
    prompts: int = 2
    group: int = 2
    refills: int = 0
    window: float = 0.0
    """By how many places an unfinished group may fall behind its turn."""
    solved: bool = False
    interruption: bool = False
    updates_per_batch: int = 1
    old_logprobs: bool = False
    moving_advantage: bool = False
    checkpoint_every: int = 1
    keep_checkpoints: int = 2
    keep_batches: int | None = None
    keep_logprobs: int | None = None
    evaluate_every: int = 2
    streamed: bool = False
    """The weights go to the engines first, and the policy folder is complete later."""
    keep_policies: int = 1
    engines: int = 2
    engine_errors: float = 0.0
    """Share of the requests that fail."""
    engine_stale: float = 0.0
    """Share of the requests that are answered by an older version, or aborted."""
    engine_deaths: float = 0.0
    """How often an engine dies, a thousand virtual seconds."""
    publish_errors: float = 0.0
    """Share of the loads that fail, by engine."""
    preemption: float = 0.0
    """Share of the operations before which others run for a while."""
    journaled: bool = True
    """fsync of anything makes all earlier changes of folders durable, as ext4 does; else only what it names."""
    visible_s: float = 0.0
    """How long a new name stays unseen by other hosts."""
    real_files: bool = False
    """Batches in Zarr, not in the simulation's quick encoding."""
    evaluation_s: float = 0.0
    """Longest time of a held-out answer."""
    faults: tuple[Fault, ...] = field(default=())

    def __str__(self) -> str:
        schedule = {"sync": "sync", "async": f"async lag {self.lag}", "staged": f"staged µ {self.stage}"}[self.kind]
        return f"seed {self.seed}: {schedule}, {self.steps} steps; {'; '.join(map(str, self.faults)) or 'no faults'}"


def plan_of(seed: int, *, harsh: bool = False) -> Plan:
    """The plan of a seed; a `harsh` one has three to five faults."""
    draw = random.Random(f"plan {seed}")
    kind: Literal["sync", "async", "staged"] = draw.choice(("sync", "async", "async", "staged"))
    several = draw.random() < 0.25
    plan = Plan(
        seed=seed,
        kind=kind,
        steps=draw.randint(4, 7),
        lag=draw.randint(1, 3),
        stage=draw.randint(2, 3),
        prompts=draw.randint(1, 3),
        group=2,
        refills=draw.choice((0, 0, 1, 2)),
        solved=draw.random() < 0.35,
        interruption=draw.random() < 0.15,
        updates_per_batch=2 if several else 1,
        old_logprobs=several or kind == "staged",
        moving_advantage=draw.random() < 0.3,
        checkpoint_every=draw.choice((1, 1, 2, 3)),
        keep_checkpoints=draw.choice((1, 2, 3)),
        evaluate_every=draw.choice((1, 2, 3, 100)),
        streamed=draw.random() < 0.4,
        keep_policies=draw.choice((0, 1, 2)),
        engines=draw.randint(1, 3),
        engine_errors=draw.choice((0.0, 0.0, 0.05, 0.3)),
        engine_stale=draw.choice((0.0, 0.0, 0.05, 0.3)),
        engine_deaths=draw.choice((0.0, 0.0, 5.0, 20.0)),
        publish_errors=draw.choice((0.0, 0.0, 0.1, 0.4)),
        preemption=draw.choice((0.0, 0.0, 0.01, 0.1)),
        journaled=draw.random() < 0.5,
        visible_s=draw.choice((0.0, 0.0, 0.0, 2.0, 40.0)),
        real_files=draw.random() < 1 / 64,
    )
    count = draw.choice((0, 1, 1, 2, 2, 3, 4))
    faults = tuple(_fault(draw, plan.steps) for _ in range(3 + count // 2 if harsh else count))
    window = draw.choice((0.0, 0.0, 1.0, 3.0, math.inf))
    evaluation_s = draw.choice((0.0, 0.0, 2.0, 15.0))
    keeps = [draw.choice((None, 1, 2)) for _ in range(2)]  # drawn last: what is drawn before stays as it was
    drawn = dict(window=window, evaluation_s=evaluation_s, keep_batches=keeps[0], keep_logprobs=keeps[1])
    return replace(plan, faults=faults, **drawn)


def _fault(draw: random.Random, steps: int) -> Fault:
    kind: FaultKind = draw.choice(
        ("kill", "kill", "kill", "kill both", "freeze", "freeze", "power cut", "power cut", "full", "clock", "stop")
    )
    role: Literal["collector", "learner"] = draw.choice(("collector", "learner"))
    operation = draw.choice(RARE) if draw.random() < 0.6 else "any"
    count = draw.randint(1, (120 if operation == "any" else 4) * steps)
    seconds = {
        "freeze": 10 ** draw.uniform(0, 2.7),
        "full": 10 ** draw.uniform(-1, 1.7),
        "clock": draw.choice((-86_400.0, -3_600.0, -2.0, 2.0, 3_600.0, 86_400.0)),
    }.get(kind, 0.0)
    return Fault(kind=kind, role=role, operation=operation, count=count, seconds=seconds, replaced=draw.random() < 0.75)
