"""The rungs of a run, by cost: what can be done against staleness, and what against quantization.

    0  the objective's own cap       always there; costs nothing
    1  learning rate by age          lr × (1 + age)^(-1/2): the policy leaves more slowly what older weights sampled
    2  lower lag                     the engines wait for newer weights; each such rung halves the lag, the last is 0
    3  promotion                     the most damaging groups of layers are held unquantized by the engines
    4  unquantized rollouts          all groups are

Rungs 1 and 2 help against staleness, 3 and 4 against quantization. Why the learning rate: with AdamW a factor on the
loss cancels out, one on the rate does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from precision.controller.records import State


@dataclass(frozen=True)
class StalenessRung:
    """One setting against staleness."""

    name: str
    lr_by_age: bool
    lag: int


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What the controller of a run may do."""

    lag: int = 0
    """Versions, of the run's schedule."""
    lag_may_change: bool = False
    """Whether the schedule has a lag (`async`)."""
    stage: int = 1
    """Batches of a stage, of a `staged` run; their ages rise from its first to its last."""
    has_age: bool = False
    """Whether batches are ever trained with other weights than sampled them."""
    lr_may_change: bool = True
    """Whether the learning rate does not go by age anyhow."""
    engines_may_restart: bool = True
    """Whether one engine may be started again while the run goes on."""
    groups: tuple[str, ...] = ()
    """Names of the groups that the engines quantize and could hold unquantized."""

    @property
    def staleness(self) -> tuple[StalenessRung, ...]:
        """From the cheapest, which is the run's own setting."""
        rungs = [StalenessRung("objective's cap", False, self.lag)]
        if self.has_age and self.lr_may_change:
            rungs.append(StalenessRung("learning rate by age", True, self.lag))
        lag = self.lag if self.lag_may_change else 0
        while lag > 0:
            lag //= 2
            rungs.append(StalenessRung(f"lag {lag}", True, lag))
        return tuple(rungs)

    def whole_stages(self, batches: int) -> int:
        """Batches of as many stages as hold so many."""
        return -(-batches // self.stage) * self.stage

    def in_force(self, state: State) -> StalenessRung:
        """The rung against staleness that a run is on."""
        return self.staleness[state.staleness]

    def rungs_of(self, state: State) -> tuple[str, ...]:
        """The names of all that is in use beyond the objective's cap, cheapest first."""
        names = [rung.name for rung in self.staleness[1 : state.staleness + 1]]
        if state.promoted:
            whole = len(state.promoted) == len(self.groups)
            names.append("unquantized rollouts" if whole else f"{len(state.promoted)} groups promoted")
        return tuple(names)
