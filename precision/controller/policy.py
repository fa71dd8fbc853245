"""Decide how to keep a run's ESS above its floor: one trained batch in, at most one decision out, as a pure function.

    window ──▶ loss > allowed? ──▶ one engine alone? ─▶ start it again
     of 3           │              what is to blame? ─▶ staleness    ─▶ next rung against it
    batches         │                                └▶ quantization ─▶ promote the most damaging groups
                    └▶ loss < comfortable? ──▶ give back what costs most and is not needed any more

*Allowed* is the loss -ln ESS at the floor, *comfortable* a part of it (ControllerSettings.headroom): between the two
nothing moves. The median of the latest batches counts, so a single odd batch moves nothing. In a staged run, batches
grow older from the first to the last of a stage. There a window is whole stages, and decisions fall at a stage's end.

It climbs the cheapest rung that can help. A rung can help when its cause alone explains the excess of the loss;
otherwise the larger cause comes first. Where both together explain less than half of the excess (the rest is kernels
and decoding), no rung would bring the ESS near the floor: nothing is done, and `State.cannot_help` is set.

Quantization is measured. Staleness is not: it is the rest of the loss, which may be kernels and decoding. So the rungs
against staleness must show that they help. A rung that lowers nothing is given back, and so are all of them where the
last one leaves more than half of the excess.

It descends when there is room. The cost of a promoted group is measured beforehand, by emulation. The cost of staleness
is unknown, so a lower rung is tried. A rung that was given back too early is tried again only after a pause that
doubles with each failure. So a steady run ends at the cheapest rung that holds, and swinging causes are not followed.

Evidence, state and decisions are plain JSON, and all numbers come back bit by bit. All losses are -ln ESS, nats. For
independent lognormal ratios the ESS is exp(-variance) of the log-ratio, so the losses of independent causes add up: a
batch's loss is about the sum of those of its terms.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from pydantic import Field, PositiveInt

from precision.settings import Settings

Cause = Literal["staleness", "quantization", "engine"]
Measurement = Literal["quantization", "groups"]
"""Evidence that is measured only on demand, because it costs passes over the model."""
MEASUREMENTS: tuple[Measurement, ...] = get_args(Measurement)


class EngineEvidence(Settings):
    """One engine's share of a batch."""

    loss: float
    """Loss of the tokens that the engine sampled."""
    loss_of_others: float
    """Loss of all other tokens."""
    start: int = 0
    """Number of the engine's announced start (pipeline.data.membership)."""


class Evidence(Settings):
    """Measurements of one trained batch. The ESS compares the learner before the step with the engines."""

    step: int
    loss: float
    """-ln of the batch's token ESS."""
    age: float = 0.0
    """Mean optimizer steps between the sampling of a token and the step that trains on it."""
    engines: Mapping[int, EngineEvidence] = {}
    """Evidence by engine index, where batches record engines and there are two or more."""
    in_transition: bool = False
    """Whether an earlier decision has not reached all engines yet."""
    quantization: float | None = None
    """Loss of the learner against itself with the present map emulated, on tokens of the batch; None: not measured."""
    groups: Mapping[str, float] | None = None
    """The same for each quantizable group, quantized alone; None: not measured."""
    unmeasurable: bool = False
    """Whether the learner cannot emulate the engines' formats."""

    @property
    def ess(self) -> float:
        return math.exp(-self.loss)


class Failure(Settings):
    """Failed attempts: a rung given back too early, an engine restarted, or a climb."""

    times: int
    retry_at: int
    """First step at which it may be tried again."""


class Trial(Settings):
    """A rung or group that was given back and may be needed."""

    cause: Cause
    until: int
    """Last step at which a climb back counts as a failure."""


class Climb(Settings):
    """Rungs against staleness that were climbed in a row and have not reached the floor yet. Losses are medians."""

    rung: int
    """Rung in force before the climb."""
    loss: float
    """Loss at that rung, nats."""
    reached: float | None = None
    """Loss with the climbed rungs, once they were given back as useless; until then None."""


class Observation(Settings):
    loss: float
    engines: Mapping[int, EngineEvidence] = {}


class State(Settings):
    """The place of a run on the ladder, and the controller's memory. The first step begins with the defaults."""

    staleness: int = 0
    """Rungs in use against staleness (Ladder.staleness)."""
    climb: Climb | None = None
    """Latest climb, while it is not known yet whether it helps."""
    promoted: tuple[str, ...] = ()
    """Groups that the engines hold unquantized by decision, in the order of their promotion."""
    quant_map: int = 0
    """Number of the quant map in force; 0 is the recipe's. It grows with every decision that changes `promoted`."""
    acted: int | None = None
    quiet_until: int = 0
    """First step whose batch shows the effect of the last decision."""
    window: tuple[Observation, ...] = ()
    """Latest batches since then; in a staged run, of whole stages."""
    measured: Mapping[Measurement, int] = {}
    """Step at which each measurement was last made, or found to be impossible."""
    trials: Mapping[str, Trial] = {}
    """Rungs and groups that were given back a short while ago, the latest last."""
    failures: Mapping[str, Failure] = {}
    """Rungs and groups that were given back too early, and climbs against staleness that were in vain."""
    suspects: Mapping[int, Failure] = {}
    """Engines that were restarted because they alone were bad."""
    cannot_help: bool = False
    """Whether the ESS is below the floor and no rung is left that could raise it."""


class Decision(Settings):
    action: Literal["climb", "descend", "restart_engine"]
    cause: Cause
    rung: str
    """Name as in `Ladder.rungs_of`; of an engine: `engine 3`."""
    groups: tuple[str, ...] = ()
    """Groups promoted, or quantized again."""
    engine: int | None = None
    engine_start: int | None = None
    """Number of the engine's bad start; a later start is not meant."""
    because: str = Field(min_length=1)
    """One sentence with the numbers."""


class Outcome(Settings):
    """The state and the decision that follow from a batch."""

    state: State
    decision: Decision | None = None
    needs: Measurement | None = None
    """Measurement to make before asking again; `state` is then not to be used."""
    groups: tuple[str, ...] = ()
    """Groups that `Evidence.groups` is needed for."""


class ControllerSettings(Settings):
    """Keeps the token ESS of the batches above a floor. Without this section nothing is controlled. The effect of
    quantization is measured by emulating the engines' formats in the learner. Transformer Engine layers, the usual ones
    on GPUs, cannot emulate them. There either cause may be all of it: first staleness is lowered rung by rung, then all
    layers are promoted at once. They are given back at once too."""

    ess_floor: float = Field(0.95, gt=0.0, lt=1.0, description="Lowest token ESS of a batch that is accepted.")
    cooldown_steps: PositiveInt = Field(
        5, description="Steps between two decisions, at least; in a staged run, whole stages that hold them."
    )
    headroom: float = Field(
        0.3,
        gt=0.0,
        lt=1.0,
        description="Share of the allowed loss -ln(ess_floor) that must be free before a rung is given back.",
    )
    evidence_tokens: PositiveInt = Field(
        4096,
        description="Sampled tokens of a batch that are scored again, behind their prompts, to see what quantization "
        "does to them. No sample gives more than a sixteenth of them: of a longer response it is the beginning.",
    )

    @property
    def allowed_loss(self) -> float:
        """Loss -ln ESS at the floor, nats."""
        return -math.log(self.ess_floor)

    @property
    def comfortable_loss(self) -> float:
        """Loss below which a rung may be given back, nats."""
        return (1.0 - self.headroom) * self.allowed_loss


WINDOW = 3
"""Batches whose median counts; in a staged run, their least number."""


ENOUGH = 0.5
"""Share of the excess that causes must explain to be worth a rung, which otherwise would not bring the ESS near the
floor. More is not required, as a term is measured on some tokens only."""


MOST_OF_A_TERM = 0.9
"""Share of quantization's loss to promote away: the groups that do the rest are many, and do little."""


HELPS = 0.1
"""Share of the excess that a rung must take off; one that takes off less shows that staleness is not to blame."""


@dataclass(frozen=True)
class StalenessRung:
    name: str
    lr_by_age: bool
    lag: int


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rungs of a run, by cost.

        0  the objective's own cap       always there; costs nothing
        1  learning rate by age          lr × (1 + age)^(-1/2): the policy leaves older samples more slowly
        2  lower lag                     the engines wait for newer weights; each rung halves the lag, the last is 0
        3  promotion                     the engines hold the most damaging groups of layers unquantized
        4  unquantized rollouts          the engines hold all groups unquantized

    Rungs 1 and 2 help against staleness, 3 and 4 against quantization. Rung 1 scales the learning rate and not the
    loss: with AdamW a factor on the loss cancels out.
    """

    lag: int = 0
    """Versions, in the run's schedule."""
    lag_may_change: bool = False
    """Whether the schedule has a lag (`async`)."""
    stage: int = 1
    """Batches of a stage, in a `staged` run; their ages rise from the first to the last."""
    has_age: bool = False
    """Whether batches are ever trained with other weights than those that sampled them."""
    lr_may_change: bool = True
    """Whether the learning rate may follow age; False where the recipe's does already."""
    engines_may_restart: bool = True
    """Whether one engine may be restarted during the run."""
    groups: tuple[str, ...] = ()
    """Names of the groups that the engines quantize and could hold unquantized."""

    @property
    def staleness(self) -> tuple[StalenessRung, ...]:
        """Rungs against staleness, from the cheapest, which is the run's own setting."""
        rungs = [StalenessRung("objective's cap", False, self.lag)]
        if self.has_age and self.lr_may_change:
            rungs.append(StalenessRung("learning rate by age", True, self.lag))
        lag = self.lag if self.lag_may_change else 0
        while lag > 0:
            lag //= 2
            rungs.append(StalenessRung(f"lag {lag}", True, lag))
        return tuple(rungs)

    def whole_stages(self, batches: int) -> int:
        """Return the number of batches in the fewest stages that hold `batches`."""
        return -(-batches // self.stage) * self.stage

    def in_force(self, state: State) -> StalenessRung:
        return self.staleness[state.staleness]

    def rungs_of(self, state: State) -> tuple[str, ...]:
        """Return the names of all rungs in use beyond the objective's cap, cheapest first."""
        names = [rung.name for rung in self.staleness[1 : state.staleness + 1]]
        if state.promoted:
            whole = len(state.promoted) == len(self.groups)
            names.append("unquantized rollouts" if whole else f"{len(state.promoted)} groups promoted")
        return tuple(names)


def decide(settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence) -> Outcome:
    """Return the outcome of the batch of `evidence`, which follows the batch that made `state`. Where the outcome
    `needs` a measurement, make it on this batch, put it into the evidence, and ask again with the same state. Decisions
    are at least `settings.cooldown_steps` steps apart."""
    settings = settings.model_copy(update=dict(cooldown_steps=ladder.whole_stages(settings.cooldown_steps)))
    step = evidence.step
    if evidence.in_transition:  # the batch does not show the configuration in force
        quiet = max(state.quiet_until, step + 2 + ladder.in_force(state).lag)
        return Outcome(state=state.model_copy(update=dict(window=(), quiet_until=quiet)))
    if step < state.quiet_until:
        return Outcome(state=state.model_copy(update=dict(window=())))
    # A restarted engine that is still bad must not move a rung before it may be restarted again.
    waiting = {index for index, suspect in state.suspects.items() if step < suspect.retry_at}
    bad = [one for index, one in evidence.engines.items() if index in waiting and one.loss > settings.allowed_loss]
    least = min([evidence.loss, *(engine.loss_of_others for engine in bad)])
    observation = Observation(loss=least, engines=evidence.engines)
    window = (*state.window, observation)[-ladder.whole_stages(WINDOW) :]
    measured = {what: step for what in MEASUREMENTS if evidence.unmeasurable or getattr(evidence, what) is not None}
    seen = state.model_copy(update=dict(window=window, measured={**state.measured, **measured}))
    if len(window) < ladder.whole_stages(WINDOW) or (step + 1) % ladder.stage:
        return Outcome(state=seen)
    if seen.acted is not None and step - seen.acted < settings.cooldown_steps:
        return Outcome(state=seen)
    # Forget the failures of engines that are well, and of rungs and groups that were given back and not needed.
    latest = seen.window[-1].engines
    well = [i for i, one in latest.items() if one.loss <= settings.allowed_loss and i in seen.suspects]
    if any(step >= seen.suspects[index].retry_at for index in well):
        kept = {i: one for i, one in seen.suspects.items() if i not in well or step < one.retry_at}
        seen = seen.model_copy(update=dict(suspects=kept))
    if over := [key for key, trial in seen.trials.items() if step > trial.until]:
        seen = _forget(seen, over, over)
    loss = median(observation.loss for observation in seen.window)
    if loss > settings.allowed_loss:
        return _climb(settings, ladder, seen, evidence, loss)
    # The climb that led above the floor, if there was one, has helped.
    helped = seen.climb is not None and seen.climb.reached is None
    seen = (_forget(seen, (), [CLIMB]) if helped else seen).model_copy(update=dict(climb=None, cannot_help=False))
    if loss < settings.comfortable_loss:
        return _descend(settings, ladder, seen, evidence, loss)
    return Outcome(state=seen)


def _climb(settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence, loss: float) -> Outcome:
    # Find the engine without which the floor would hold in most batches of the window.
    alone_bad = Counter[int]()
    for observation in state.window:
        bad = [
            index
            for index, engine in observation.engines.items()
            if engine.loss > settings.allowed_loss >= engine.loss_of_others
        ]
        alone_bad.update(bad if len(bad) == 1 else [])
    often = [index for index, times in alone_bad.items() if 2 * times > len(state.window)]
    if often:
        if not ladder.engines_may_restart:
            return Outcome(state=state.model_copy(update=dict(cannot_help=True)))
        return _restart(settings, ladder, state, evidence, often[0], loss)
    # As far above the allowed loss as the comfortable loss is below it: from there on, a rung's effect stands out.
    clear_loss = (1.0 + settings.headroom) * settings.allowed_loss
    can_lower = state.staleness + 1 < len(ladder.staleness) and evidence.age > 0
    if (climb := state.climb) is not None and climb.reached is not None:
        # Compare with the mean of before and after: a loss that rises by itself hides a rung's effect.
        seen = 0.5 * (climb.loss + loss)
        helped = not _is_in_vain(settings, seen, climb.reached, HELPS)
        state = (_forget(state, (), [CLIMB]) if helped else state).model_copy(update=dict(climb=None))
    elif climb is not None and not can_lower and _is_in_vain(settings, climb.loss, loss, ENOUGH):
        return _give_up(settings, ladder, state, evidence.step, loss, certain=True)
    elif climb is not None and climb.loss > clear_loss and _is_in_vain(settings, climb.loss, loss, HELPS):
        return _give_up(settings, ladder, state, evidence.step, loss, certain=False)
    if evidence.quantization is None and not evidence.unmeasurable:
        # Once in a cool-down, since a measurement costs passes over the model.
        measured = state.measured.get("quantization")
        if state.cannot_help and measured is not None and evidence.step - measured < settings.cooldown_steps:
            return Outcome(state=state)
        return Outcome(state=state, needs="quantization")
    excess = loss - settings.allowed_loss
    # How much of the loss each cause explains, at most: where quantization cannot be measured, each may be all of it.
    if evidence.unmeasurable:
        terms = dict(staleness=loss if evidence.age > 0 else 0.0, quantization=loss if ladder.groups else 0.0)
    else:
        quantization = min(loss, evidence.quantization or 0.0)
        terms = dict(staleness=loss - quantization if evidence.age > 0 else 0.0, quantization=quantization)
    able = {
        "staleness": can_lower and _may_try(state, CLIMB, evidence.step),
        "quantization": len(state.promoted) < len(ladder.groups),
    }
    possible = {cause: terms[cause] for cause, is_able in able.items() if is_able and terms[cause] > 0}
    alone = [cause for cause, term in possible.items() if term >= excess]
    relief = 0.0  # the part of the loss that the other cause could remove
    tried = next((trial.cause for trial in reversed([*state.trials.values()])), None)
    if alone:
        # Take back what was given back last. Otherwise staleness comes first: its rungs cost less.
        cause = tried if tried in alone else alone[0]
    elif sum(possible.values()) >= ENOUGH * excess:
        cause = max(possible, key=possible.__getitem__)
        relief = sum(possible.values()) - possible[cause]
    else:
        return Outcome(state=state.model_copy(update=dict(cannot_help=True)))
    parts = (*terms.items(), ("the rest", max(0.0, loss - sum(terms.values()))))
    said = f"ESS {_ess(loss)} is below the floor {settings.ess_floor:g}; of the loss: "
    said += ", ".join(f"{name} {value / loss:.0%}" for name, value in parts)
    if cause == "staleness":
        missed = [key for key in (f"staleness {state.staleness}",) if key in state.trials]
        failed = _note_failed(settings, state, evidence.step, missed)
        climb = state.climb or Climb(rung=state.staleness, loss=loss)
        climbed = failed.model_copy(update=dict(staleness=state.staleness + 1, climb=climb))
        rung = ladder.in_force(climbed).name
        decision = Decision(action="climb", cause="staleness", rung=rung, because=f"{said}.")
        # Batches under way were sampled on the rung before.
        return Outcome(state=_acted(ladder, climbed, evidence.step, state), decision=decision)
    return _promote(settings, ladder, state, evidence, said, loss - relief)


def _is_in_vain(settings: ControllerSettings, without: float, reached: float, share: float) -> bool:
    """Return whether rungs have taken less than `share` of the excess off the loss."""
    return without - reached < share * (without - settings.allowed_loss)


def _give_up(
    settings: ControllerSettings, ladder: Ladder, state: State, step: int, loss: float, *, certain: bool
) -> Outcome:
    """Give back all rungs of a climb that was in vain: they cost and do not help. Unless that is certain, keep the
    climb in the state to judge it by what follows."""
    climb, left = state.climb, ladder.in_force(state)
    assert climb is not None
    given_back = None if certain else climb.model_copy(update=dict(reached=loss))
    back = state.model_copy(update=dict(staleness=climb.rung, climb=given_back))
    lower = _note_failed(settings, back, step, [CLIMB])
    decision = Decision(
        action="descend",
        cause="staleness",
        rung=ladder.in_force(lower).name,
        because=(
            f"ESS {_ess(loss)} is below the floor {settings.ess_floor:g}, and was {_ess(climb.loss)} before "
            f"{left.name}: staleness is not to blame."
        ),
    )
    return Outcome(state=_acted(ladder, lower, step, lower), decision=decision)


def _promote(
    settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence, said: str, loss: float
) -> Outcome:
    left = [group for group in ladder.groups if group not in state.promoted]
    if evidence.unmeasurable:
        chosen = left
    elif evidence.groups is None:
        return Outcome(state=state, needs="groups", groups=tuple(left))
    else:
        term = evidence.quantization or 0.0
        # Down to the comfortable loss, but by no more than the excess or nearly all of the term.
        excess = loss - settings.allowed_loss
        needed = max(excess if excess <= term else 0.0, MOST_OF_A_TERM * term)
        needed = min(loss - settings.comfortable_loss, needed)
        # Take the fewest groups that remove this much, or all. A group's share of the term is its share of the sum.
        damage = {group: evidence.groups[group] for group in left}
        total, chosen = sum(damage.values()), []
        for group in sorted(damage, key=lambda group: (-damage[group], group)):
            if needed <= 0:
                break
            chosen.append(group)
            needed -= (term / total if total > 0 else 0.0) * damage[group]
    failed = _note_failed(settings, state, evidence.step, [group for group in chosen if group in state.trials])
    # From now on the promotion hides the effect of the climb.
    now = dict(promoted=(*state.promoted, *chosen), quant_map=state.quant_map + 1, climb=None)
    promoted = failed.model_copy(update=now)
    after = _acted(ladder, promoted, evidence.step, state)
    decision = Decision(
        action="climb",
        cause="quantization",
        rung=ladder.rungs_of(after)[-1],
        groups=tuple(chosen),
        because=f"{said}. {_damage_of(chosen, evidence.groups)}",
    )
    return Outcome(state=after, decision=decision)


def _restart(
    settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence, index: int, loss: float
) -> Outcome:
    engine = next(seen.engines[index] for seen in reversed(state.window) if index in seen.engines)
    known = state.suspects.get(index)
    times = 1 + (0 if known is None else known.times)
    suspect = Failure(times=times, retry_at=evidence.step + _pause(settings, times))
    suspected = state.model_copy(update=dict(suspects={**state.suspects, index: suspect}))
    after = _acted(ladder, suspected, evidence.step, state)
    decision = Decision(
        action="restart_engine",
        cause="engine",
        rung=f"engine {index}",
        engine=index,
        engine_start=engine.start,
        because=(
            f"ESS {_ess(loss)} is below the floor {settings.ess_floor:g}: that of engine {index}'s tokens is "
            f"{_ess(engine.loss)}, that of all others {_ess(engine.loss_of_others)}."
        ),
    )
    return Outcome(state=after, decision=decision)


def _descend(settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence, loss: float) -> Outcome:
    step = evidence.step
    if state.acted is not None and step - state.acted < 2 * settings.cooldown_steps:
        return Outcome(state=state)
    # Groups that are no longer on the ladder belong to engines that keep their formats.
    ready = [group for group in state.promoted if group in ladder.groups and _may_try(state, group, step)]
    # Their cost is measured, so half of the headroom is enough.
    room = 0.5 * (settings.comfortable_loss + settings.allowed_loss) - loss
    if ready and evidence.unmeasurable:
        return _demote(settings, ladder, state, evidence, loss, ready)
    measured = state.measured.get("groups")
    is_turn = measured is None or step - measured >= settings.cooldown_steps  # since it costs passes over the model
    if ready and evidence.groups is None and is_turn:
        return Outcome(state=state, needs="groups", groups=tuple(ready))
    damage = {} if evidence.groups is None else {group: evidence.groups[group] for group in ready}
    chosen: list[str] = []  # the most groups that add no more than the room to the loss
    for group in sorted(damage, key=lambda group: (damage[group], group)):
        room -= damage[group]
        if room < 0:
            break
        chosen.append(group)
    if chosen:
        return _demote(settings, ladder, state, evidence, loss, chosen)
    if state.staleness > 0 and _may_try(state, f"staleness {state.staleness - 1}", step):
        left = ladder.in_force(state)
        lower = state.model_copy(update=dict(staleness=state.staleness - 1))
        tried = _note_given_back(settings, lower, step, "staleness", (f"staleness {lower.staleness}",))
        after = _acted(ladder, tried, step, lower)
        decision = Decision(
            action="descend",
            cause="staleness",
            rung=ladder.in_force(lower).name,
            because=f"ESS {_ess(loss)} leaves room above the floor {settings.ess_floor:g}; {left.name} is given back.",
        )
        return Outcome(state=after, decision=decision)
    return Outcome(state=state)


def _demote(
    settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence, loss: float, chosen: Iterable[str]
) -> Outcome:
    given_back = tuple(chosen)
    kept = tuple(group for group in state.promoted if group not in given_back)
    lower = state.model_copy(update=dict(promoted=kept, quant_map=state.quant_map + 1))
    tried = _note_given_back(settings, lower, evidence.step, "quantization", given_back)
    after = _acted(ladder, tried, evidence.step, lower)
    decision = Decision(
        action="descend",
        cause="quantization",
        rung=next(iter(reversed(ladder.rungs_of(after))), ladder.staleness[0].name),
        groups=given_back,
        because=(
            f"ESS {_ess(loss)} leaves room above the floor {settings.ess_floor:g}. "
            f"{_damage_of(given_back, evidence.groups)}"
        ),
    )
    return Outcome(state=after, decision=decision)


def _acted(ladder: Ladder, state: State, step: int, under_way: State) -> State:
    """Return the state after a decision. Batches under way, one and those of the lag, began in the other state."""
    quiet_until = step + 2 + ladder.in_force(under_way).lag
    return state.model_copy(update=dict(acted=step, quiet_until=quiet_until, window=(), cannot_help=False))


def _ess(loss: float) -> str:
    return f"{math.exp(-loss):.4f}" if loss > 1e-3 else f"{math.exp(-loss):.6f}"


def _damage_of(groups: Iterable[str], damage: Mapping[str, float] | None) -> str:
    if damage is None:
        return "What single groups do could not be measured."
    return "Quantized alone: " + ", ".join(f"{group} ESS {_ess(damage[group])}" for group in groups) + "."


FIRST_PAUSE = 4
"""Cool-downs before the first retry after a failure; doubled with each failure."""


TRIAL = 4
"""Pauses that a trial lasts: giving back has failed if the rung or group is needed again by then."""


LONGEST_PAUSE = 64


CLIMB = "climb"
"""Key of climbs against staleness among the failures."""


def _forget(state: State, trials: Iterable[str], failures: Iterable[str]) -> State:
    left = {key: trial for key, trial in state.trials.items() if key not in set(trials)}
    failed = {key: failure for key, failure in state.failures.items() if key not in set(failures)}
    return state.model_copy(update=dict(trials=left, failures=failed))


def _note_given_back(settings: ControllerSettings, state: State, step: int, cause: Cause, keys: Iterable[str]) -> State:
    """Return the state with `keys` given back, on trial."""
    times = {key: 1 + (state.failures[key].times if key in state.failures else 0) for key in keys}
    trials = {key: Trial(cause=cause, until=step + TRIAL * _pause(settings, count)) for key, count in times.items()}
    earlier = {key: trial for key, trial in state.trials.items() if key not in trials}
    return state.model_copy(update=dict(trials=earlier | trials))


def _may_try(state: State, key: str, step: int) -> bool:
    failure = state.failures.get(key)
    return failure is None or step >= failure.retry_at


def _note_failed(settings: ControllerSettings, state: State, step: int, keys: list[str]) -> State:
    """Return the state in which `keys` have failed, and are no longer on trial: trials taken back, or a climb."""
    times = {key: 1 + (state.failures[key].times if key in state.failures else 0) for key in keys}
    failures = {key: Failure(times=count, retry_at=step + _pause(settings, count)) for key, count in times.items()}
    left = {key: trial for key, trial in state.trials.items() if key not in keys}
    return state.model_copy(update=dict(trials=left, failures={**state.failures, **failures}))


def _pause(settings: ControllerSettings, times: int) -> int:
    return settings.cooldown_steps * min(LONGEST_PAUSE, FIRST_PAUSE << (times - 1))
