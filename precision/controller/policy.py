"""The controller: one trained batch in, at most one decision out. A pure function, so that a run can be replayed.

    window ──▶ loss > allowed? ──▶ one engine alone? ─▶ start it again
     of 3           │              what is to blame? ─▶ staleness    ─▶ next rung against it
    batches         │                                └▶ quantization ─▶ promote the most damaging groups
                    └▶ loss < comfortable? ──▶ give back what costs most and is not needed any more

*Allowed* is the loss -ln ESS at the floor, *comfortable* a part of it (ControllerSettings.headroom): between the two
nothing moves. What counts is the median of the latest batches, so that a single odd one moves nothing. In a staged run
the batches of a stage are ever older from its first to its last. There a window is whole stages, and what is decided is
decided at the end of one: windows of other parts of a stage are no measure of what a rung does.

It climbs the cheapest rung that can help. A rung can help when its cause alone explains what is too much; otherwise the
larger cause comes first. Where both together explain less than half of it (the rest is kernels and decoding), no rung
would bring the ESS near the floor: then nothing is done, and `State.cannot_help` says so.

Quantization is measured. Staleness is not: it is what quantization leaves, and may be kernels and decoding. So the
rungs against it must show that they help. A rung that lowers nothing is given back, and so are all of them where the
last one leaves more than half of what was too much.

It comes down when there is room. What a promoted group would cost is measured beforehand, by emulation. What staleness
would cost is not known, so it is tried. What was given back too early is tried again only after a pause that doubles
with each failure: a run that rests ends at the cheapest rung that holds, and one whose causes swing does not follow
each swing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

from precision.controller import memory
from precision.controller.ladder import Ladder
from precision.controller.records import (
    MEASUREMENTS,
    Climb,
    Decision,
    Evidence,
    Failure,
    Measurement,
    Observation,
    Outcome,
    State,
)
from precision.controller.settings import ControllerSettings

WINDOW = 3
"""Batches whose median counts; in a staged run at least so many."""
ENOUGH = 0.5
"""Of what is too much: causes that explain less are not worth a rung, which would not bring the ESS near the floor.
More is not asked for, as a term is measured on some tokens only."""
MOST_OF_A_TERM = 0.9
"""Of what quantization does: the groups that do the rest are many, and do little."""
HELPS = 0.1
"""Of what is too much: a rung against staleness that takes off less shows that staleness is not to blame."""


def decide(settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence) -> Outcome:
    """What follows from the batch of `evidence`, the one after that which made `state`.

    Where the outcome `needs` a measurement, measure it on this batch, put it into the evidence, and ask again with the
    same state. Decisions are at least `settings.cooldown_steps` steps apart.
    """
    settings = settings.model_copy(update=dict(cooldown_steps=ladder.whole_stages(settings.cooldown_steps)))
    seen = _observed(settings, ladder, state, evidence)
    if len(seen.window) < ladder.whole_stages(WINDOW) or (evidence.step + 1) % ladder.stage:
        return Outcome(state=seen)
    if _is_cooling(settings, seen, evidence.step):
        return Outcome(state=seen)
    seen = memory.settled(settings, seen, evidence.step)
    loss = _typical(seen)
    if loss > settings.allowed_loss:
        return _climb(settings, ladder, seen, evidence, loss)
    seen = memory.held(seen)
    if loss < settings.comfortable_loss:
        return _descend(settings, ladder, seen, evidence, loss)
    return Outcome(state=seen)


def _observed(settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence) -> State:
    """The state with this batch in its window, when the batch shows the configuration that is in force."""
    step = evidence.step
    if evidence.in_transition:
        quiet = max(state.quiet_until, step + 1 + _batches_under_way(ladder, state))
        return state.model_copy(update=dict(window=(), quiet_until=quiet))
    if step < state.quiet_until:
        return state.model_copy(update=dict(window=()))
    observation = Observation(loss=_loss_but_for_suspects(settings, state, evidence), engines=evidence.engines)
    window = (*state.window, observation)[-ladder.whole_stages(WINDOW) :]
    measured = {what: step for what in MEASUREMENTS if evidence.unmeasurable or getattr(evidence, what) is not None}
    return state.model_copy(update=dict(window=window, measured={**state.measured, **measured}))


def _loss_but_for_suspects(settings: ControllerSettings, state: State, evidence: Evidence) -> float:
    """A bad engine that was started again, and is bad still, must not move the others until it is its turn again."""
    waiting = [
        engine
        for index, engine in evidence.engines.items()
        if index in state.suspects and evidence.step < state.suspects[index].retry_at
    ]
    bad = [engine for engine in waiting if engine.loss > settings.allowed_loss]
    return min([evidence.loss, *(engine.loss_of_others for engine in bad)])


def _is_cooling(settings: ControllerSettings, state: State, step: int) -> bool:
    return state.acted is not None and step - state.acted < settings.cooldown_steps


def _is_turn_to_measure(settings: ControllerSettings, state: State, step: int, what: Measurement) -> bool:
    """Once in a cool-down: a measurement costs passes over the model."""
    return what not in state.measured or step - state.measured[what] >= settings.cooldown_steps


def _typical(state: State) -> float:
    return median(observation.loss for observation in state.window)


def _batches_under_way(ladder: Ladder, state: State) -> int:
    """Batches that may have begun under the configuration before."""
    return 1 + ladder.in_force(state).lag


def _climb(settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence, loss: float) -> Outcome:
    if (engine := _one_bad_engine(settings, state)) is not None:
        if not ladder.engines_may_restart:
            return Outcome(state=state.model_copy(update=dict(cannot_help=True)))
        return _restart(settings, ladder, state, evidence, engine, loss)
    can_lower = state.staleness + 1 < len(ladder.staleness) and evidence.age > 0
    if (climb := state.climb) is not None and climb.reached is not None:
        # Before and after together: a loss that rises by itself hides what a rung does.
        seen = 0.5 * (climb.loss + loss)
        state = memory.judged(state, helped=not _is_in_vain(settings, seen, climb.reached, HELPS))
    elif climb is not None and not can_lower and _is_in_vain(settings, climb.loss, loss, ENOUGH):
        return _give_up(settings, ladder, state, evidence.step, loss, certain=True)
    elif climb is not None and climb.loss > settings.clear_loss and _is_in_vain(settings, climb.loss, loss, HELPS):
        return _give_up(settings, ladder, state, evidence.step, loss, certain=False)
    if evidence.quantization is None and not evidence.unmeasurable:
        if state.cannot_help and not _is_turn_to_measure(settings, state, evidence.step, "quantization"):
            return Outcome(state=state)
        return Outcome(state=state, needs="quantization")
    excess = loss - settings.allowed_loss
    terms = _terms(ladder, evidence, loss)
    able = {
        "staleness": can_lower and memory.may_try(state, memory.CLIMB, evidence.step),
        "quantization": len(state.promoted) < len(ladder.groups),
    }
    possible = {cause: terms[cause] for cause, is_able in able.items() if is_able and terms[cause] > 0}
    alone = [cause for cause, term in possible.items() if term >= excess]
    relief = 0.0  # what the other cause is left to give
    tried = next((trial.cause for trial in reversed([*state.trials.values()])), None)
    if alone:
        # What was given back last is taken back. Otherwise staleness comes first: its rungs cost less.
        cause = tried if tried in alone else alone[0]
    elif sum(possible.values()) >= ENOUGH * excess:
        cause = max(possible, key=possible.__getitem__)
        relief = sum(possible.values()) - possible[cause]
    else:
        return Outcome(state=state.model_copy(update=dict(cannot_help=True)))
    said = f"ESS {_ess(loss)} is below the floor {settings.ess_floor:g}; {_shares(terms, loss)}"
    if cause == "staleness":
        return _climb_staleness(settings, ladder, state, evidence, said, loss)
    return _promote(settings, ladder, state, evidence, said, loss - relief)


def _terms(ladder: Ladder, evidence: Evidence, loss: float) -> dict[str, float]:
    """How much of the loss each cause explains, at most. Where quantization cannot be measured, each may be all of
    it."""
    if evidence.unmeasurable:
        return dict(staleness=loss if evidence.age > 0 else 0.0, quantization=loss if ladder.groups else 0.0)
    quantization = min(loss, evidence.quantization or 0.0)
    return dict(staleness=loss - quantization if evidence.age > 0 else 0.0, quantization=quantization)


def _is_in_vain(settings: ControllerSettings, without: float, reached: float, share: float) -> bool:
    """Whether rungs have taken less than a share of what is too much off the loss."""
    return without - reached < share * (without - settings.allowed_loss)


def _give_up(
    settings: ControllerSettings, ladder: Ladder, state: State, step: int, loss: float, *, certain: bool
) -> Outcome:
    """Give back all rungs of a climb that was in vain: whatever keeps the ESS down, they cost and do not help. Where
    that is not certain, what follows is looked at too."""
    climb, left = state.climb, ladder.in_force(state)
    assert climb is not None
    given_back = None if certain else climb.model_copy(update=dict(reached=loss))
    back = state.model_copy(update=dict(staleness=climb.rung, climb=given_back))
    lower = memory.gave_up(settings, back, step)
    decision = Decision(
        action="descend",
        cause="staleness",
        rung=ladder.in_force(lower).name,
        because=(
            f"ESS {_ess(loss)} is below the floor {settings.ess_floor:g}, and was {_ess(climb.loss)} before "
            f"{left.name}: staleness is not to blame."
        ),
    )
    return Outcome(state=_acted(lower, step, _batches_under_way(ladder, lower)), decision=decision)


def _climb_staleness(
    settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence, said: str, loss: float
) -> Outcome:
    failed = memory.failed(settings, state, evidence.step, (memory.staleness_key(state.staleness),))
    climb = state.climb or Climb(rung=state.staleness, loss=loss)
    climbed = failed.model_copy(update=dict(staleness=state.staleness + 1, climb=climb))
    # What is under way was sampled by the rung before.
    after = _acted(climbed, evidence.step, _batches_under_way(ladder, state))
    rung = ladder.in_force(climbed).name
    return Outcome(state=after, decision=Decision(action="climb", cause="staleness", rung=rung, because=f"{said}."))


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
        # To the comfortable loss, or as far as nearly all of the term goes where other causes stand in the way.
        excess = loss - settings.allowed_loss
        needed = max(excess if excess <= term else 0.0, MOST_OF_A_TERM * term)
        needed = min(loss - settings.comfortable_loss, needed)
        chosen = _most_damaging({group: evidence.groups[group] for group in left}, needed, term)
    failed = memory.failed(settings, state, evidence.step, chosen)
    # What staleness does can no longer be told from what the promotion does.
    now = dict(promoted=(*state.promoted, *chosen), quant_map=state.quant_map + 1, climb=None)
    promoted = failed.model_copy(update=now)
    after = _acted(promoted, evidence.step, _batches_under_way(ladder, state))
    decision = Decision(
        action="climb",
        cause="quantization",
        rung=ladder.rungs_of(after)[-1],
        groups=tuple(chosen),
        because=f"{said}. {_damage_of(chosen, evidence.groups)}",
    )
    return Outcome(state=after, decision=decision)


def _most_damaging(damage: Mapping[str, float], needed: float, whole: float) -> list[str]:
    """The fewest groups that take `needed` off the loss; all, where that is not enough. Each group's share of the
    `whole` term is its share of the sum of all."""
    total = sum(damage.values())
    scale = whole / total if total > 0 else 0.0
    chosen: list[str] = []
    for group in sorted(damage, key=lambda group: (-damage[group], group)):
        if needed <= 0:
            break
        chosen.append(group)
        needed -= scale * damage[group]
    return chosen


def _one_bad_engine(settings: ControllerSettings, state: State) -> int | None:
    """The engine without which the floor would hold, where that is so in most batches of the window."""
    count: dict[int, int] = {}
    for observation in state.window:
        bad = [
            index
            for index, engine in observation.engines.items()
            if engine.loss > settings.allowed_loss >= engine.loss_of_others
        ]
        if len(bad) == 1:
            count[bad[0]] = count.get(bad[0], 0) + 1
    often = [index for index, times in count.items() if 2 * times > len(state.window)]
    return often[0] if often else None


def _restart(
    settings: ControllerSettings, ladder: Ladder, state: State, evidence: Evidence, index: int, loss: float
) -> Outcome:
    engine = next(seen.engines[index] for seen in reversed(state.window) if index in seen.engines)
    known = state.suspects.get(index)
    times = 1 + (0 if known is None else known.times)
    suspect = Failure(times=times, retry_at=evidence.step + memory.pause(settings, times))
    after = _acted(
        state.model_copy(update=dict(suspects={**state.suspects, index: suspect})),
        evidence.step,
        _batches_under_way(ladder, state),
    )
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
    ready = [group for group in state.promoted if group in ladder.groups and memory.may_try(state, group, step)]
    # What they would cost is measured, so that half of the headroom is enough.
    room = 0.5 * (settings.comfortable_loss + settings.allowed_loss) - loss
    if ready and evidence.unmeasurable:
        return _demote(settings, ladder, state, evidence, loss, ready)
    if ready and evidence.groups is None and _is_turn_to_measure(settings, state, step, "groups"):
        return Outcome(state=state, needs="groups", groups=tuple(ready))
    damage = {} if evidence.groups is None else {group: evidence.groups[group] for group in ready}
    if chosen := _least_damaging(damage, room):
        return _demote(settings, ladder, state, evidence, loss, chosen)
    if state.staleness > 0 and memory.may_try(state, memory.staleness_key(state.staleness - 1), step):
        left = ladder.in_force(state)
        lower = state.model_copy(update=dict(staleness=state.staleness - 1))
        tried = memory.tried(settings, lower, step, "staleness", (memory.staleness_key(lower.staleness),))
        after = _acted(tried, step, _batches_under_way(ladder, lower))
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
    tried = memory.tried(settings, lower, evidence.step, "quantization", given_back)
    after = _acted(tried, evidence.step, _batches_under_way(ladder, lower))
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


def _least_damaging(damage: Mapping[str, float], room: float) -> list[str]:
    """The most groups that add no more than `room` to the loss."""
    chosen: list[str] = []
    for group in sorted(damage, key=lambda group: (damage[group], group)):
        room -= damage[group]
        if room < 0:
            break
        chosen.append(group)
    return chosen


def _acted(state: State, step: int, batches_under_way: int) -> State:
    return state.model_copy(
        update=dict(acted=step, quiet_until=step + 1 + batches_under_way, window=(), cannot_help=False)
    )


def _ess(loss: float) -> str:
    """With as many digits as tell it from 1."""
    return f"{math.exp(-loss):.4f}" if loss > 1e-3 else f"{math.exp(-loss):.6f}"


def _shares(terms: Mapping[str, float], loss: float) -> str:
    rest = max(0.0, loss - sum(terms.values()))
    parts = [f"{name} {value / loss:.0%}" for name, value in (*terms.items(), ("the rest", rest))]
    return f"of the loss: {', '.join(parts)}"


def _damage_of(groups: Iterable[str], damage: Mapping[str, float] | None) -> str:
    """What each group alone does to the ESS."""
    if damage is None:
        return "What single groups do could not be measured."
    return "Quantized alone: " + ", ".join(f"{group} ESS {_ess(damage[group])}" for group in groups) + "."
