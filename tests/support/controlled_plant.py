"""A run as the controller sees it, in numbers alone: causes that drift, decisions that take effect late, noisy ESS.

The loss -ln ESS of a batch is the sum of staleness, of the groups that the engines quantize, of a rest that nothing
helps against, and of what one bad engine adds. What the controller does not know is drawn at random: how much a rung
helps, how much of the quantization the emulation sees, how long engines take to restart.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from precision.controller.policy import ControllerSettings, Decision, EngineEvidence, Evidence, Ladder, State, decide
from precision.ratios import lr_factor

Drift = Callable[[int], float]
"""Factor on a cause at a step."""


def steady(_: int) -> float:
    return 1.0


def drift(kind: str, begins: int, ends: int, factor: float, period: int) -> Drift:
    """From 1 to `factor` between two steps; what oscillates or spikes rests at 1 afterwards."""

    def at(step: int) -> float:
        done = min(1.0, max(0.0, (step - begins) / (ends - begins)))
        swing = 0.5 - 0.5 * math.cos(2 * math.pi * (step - begins) / period)
        share = {
            "sudden": float(step >= begins),
            "slow": done,
            "oscillating": swing * (begins <= step < ends),
            "spike": float(begins <= step < begins + 2),
        }[kind]
        return 1.0 + (factor - 1.0) * share

    return at


@dataclass
class Plant:
    """One run under control."""

    settings: ControllerSettings
    ladder: Ladder
    damage: Mapping[str, float]
    """Loss by group."""
    staleness: float = 0.0
    """Loss at the run's own lag and learning rate."""
    rest: float = 0.0
    staleness_drift: Drift = steady
    group_drifts: Mapping[str, Drift] = field(default_factory=dict)
    lag_power: float = 1.0
    """Staleness goes with lag to this power."""
    lr_power: float = 1.5
    """… and with the learning rate to this."""
    emulation_sees: float = 1.0
    transition_steps: int = 1
    noise: float = 0.0
    seed: int = 0
    num_engines: int = 1
    bad_engine: int | None = None
    bad_from: int = 0
    bad_loss: float = 0.0
    bad_after_restart: bool = False
    state: State = field(default_factory=State)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """What the controller saw."""
    _rungs: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """(first batch, rung against staleness)."""
    _served: tuple[str, ...] = ()
    _served_from: int = 0
    _restarts: int = 0

    def run(self, steps: int) -> Plant:
        random_source = random.Random(self.seed)
        for step in range(steps):
            self._step(step, random_source)
        return self

    def true_loss(self, step: int, rung: int, promoted: frozenset[str]) -> float:
        """Of a batch under a configuration, without a bad engine."""
        return self._staleness(step, rung) + self._quantization(step, promoted) + self.rest

    def loss_of_kind(self, step: int, kind: int) -> float:
        """The lowest loss that rungs up to a kind can reach; kinds as `Plant.kind` counts them. More rungs never raise
        the loss, so it is that of all of them."""
        last = len(self.ladder.staleness) - 1
        kept = min(self.damage, key=lambda group: self._group(step, group))
        promoted = {3: frozenset(self.damage) - {kept}, 4: frozenset(self.damage)}.get(kind, frozenset())
        return self.true_loss(step, {0: 0, 1: min(1, last)}.get(kind, last), promoted)

    def kind(self, rung: int, promoted: frozenset[str]) -> int:
        """0 objective's cap, 1 learning rate, 2 lag, 3 promotion, 4 unquantized rollouts."""
        if promoted:
            return 4 if len(promoted) == len(self.damage) else 3
        return min(rung, 2)

    def given_back(self, step: int, rung: int, promoted: frozenset[str]) -> float:
        """The lowest loss of a configuration that has one rung or one group less; infinite where there is none. To give
        back more never lowers the loss."""
        less = [self.true_loss(step, rung, promoted - {group}) for group in promoted]
        less += [self.true_loss(step, rung - 1, promoted)] if rung else []
        return min(less, default=math.inf)

    def _age(self, rung: int) -> float:
        return float(self.ladder.staleness[rung].lag)

    def _staleness(self, step: int, rung: int) -> float:
        if not self.ladder.lag:
            return 0.0
        chosen = self.ladder.staleness[rung]
        factor = lr_factor(chosen.lag) ** self.lr_power if chosen.lr_by_age else 1.0
        lag = (chosen.lag / self.ladder.lag) ** self.lag_power
        return self.staleness * self.staleness_drift(step) * factor * lag

    def _group(self, step: int, group: str) -> float:
        return self.damage[group] * self.group_drifts.get(group, steady)(step)

    def _quantization(self, step: int, promoted: frozenset[str] | tuple[str, ...]) -> float:
        return sum(self._group(step, group) for group in self.damage if group not in promoted)

    def _step(self, step: int, random_source: random.Random) -> None:
        rung = next(rung for first, rung in reversed(self._rungs) if step >= first)
        in_transition = self._served != self.state.promoted and step < self._served_from
        if not in_transition:
            self._served = self.state.promoted
        common = self.true_loss(step, rung, frozenset(self._served))
        noisy = common * math.exp(random_source.gauss(0.0, self.noise))
        is_bad = self.bad_engine is not None and step >= self.bad_from
        is_bad &= self.bad_after_restart or self._restarts == 0
        extra = self.bad_loss if is_bad else 0.0
        engines: dict[int, EngineEvidence] = {}
        for index in range(self.num_engines if self.num_engines > 1 else 0):
            bad = index == self.bad_engine
            others = noisy if bad else noisy + extra / (self.num_engines - 1)
            engines[index] = EngineEvidence(loss=noisy + extra * bad, loss_of_others=others, start=self._restarts)
        seen = noisy + extra / self.num_engines
        self.losses.append(seen)
        evidence = Evidence(step=step, loss=seen, age=self._age(rung), engines=engines, in_transition=in_transition)
        self._decide(evidence, random_source)

    def _decide(self, evidence: Evidence, random_source: random.Random) -> None:
        step = evidence.step
        while True:
            outcome = decide(self.settings, self.ladder, self.state, evidence)
            sees = self.emulation_sees * math.exp(random_source.gauss(0.0, self.noise / 2))
            if outcome.needs == "quantization":
                term = sees * self._quantization(step, self._served)
                evidence = evidence.model_copy(update=dict(quantization=term))
            elif outcome.needs == "groups":
                groups = {group: sees * self._group(step, group) for group in outcome.groups}
                evidence = evidence.model_copy(update=dict(groups=groups))
            else:
                break
        before, self.state = self.state, outcome.state
        self.states.append(self.state)
        if outcome.decision is not None:
            self.decisions.append((step, outcome.decision))
            if self.state.staleness != before.staleness:
                first = step + 1 + self.ladder.in_force(before).lag
                self._rungs.append((first, self.state.staleness))
            if self.state.promoted != before.promoted:
                self._served_from = step + 1 + self.transition_steps
            self._restarts += outcome.decision.action == "restart_engine"
