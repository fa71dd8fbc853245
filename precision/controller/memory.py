"""What the controller remembers of what it has tried, and for how long.

    given back, and missed soon after             not given back again before a pause is over
    climbed against staleness, and in vain        given back; not climbed again before a pause is over
    an engine started again, and bad still        not started again before a pause is over

A pause doubles with each failure.
"""

from __future__ import annotations

from collections.abc import Iterable

from precision.controller.records import Cause, Failure, State, Trial
from precision.controller.settings import ControllerSettings

FIRST_PAUSE = 4
"""Cool-downs in which what has failed is not tried again. It doubles with each failure."""
TRIAL = 4
"""Pauses. What was given back, and is needed again within so many of its next pause, has failed."""
LONGEST_PAUSE = 64
"""Cool-downs; a pause does not double beyond it."""
CLIMB = "climb"
"""Among the failures: climbs against staleness."""


def settled(settings: ControllerSettings, state: State, step: int) -> State:
    """Failures are forgotten: of what was given back long enough ago and is not missed, of engines that are well."""
    well = [
        i for i, one in state.window[-1].engines.items() if one.loss <= settings.allowed_loss and i in state.suspects
    ]
    if any(step >= state.suspects[index].retry_at for index in well):
        kept = {i: suspect for i, suspect in state.suspects.items() if i not in well or step < suspect.retry_at}
        state = state.model_copy(update=dict(suspects=kept))
    over = [key for key, trial in state.trials.items() if step > trial.until]
    return without(state, over, over) if over else state


def without(state: State, trials: Iterable[str], failures: Iterable[str]) -> State:
    """The state that has forgotten some trials and some failures."""
    left = {key: trial for key, trial in state.trials.items() if key not in set(trials)}
    failed = {key: failure for key, failure in state.failures.items() if key not in set(failures)}
    return state.model_copy(update=dict(trials=left, failures=failed))


def tried(settings: ControllerSettings, state: State, step: int, cause: Cause, keys: Iterable[str]) -> State:
    """The state after these were given back."""
    times = {key: 1 + (state.failures[key].times if key in state.failures else 0) for key in keys}
    trials = {key: Trial(cause=cause, until=step + TRIAL * pause(settings, count)) for key, count in times.items()}
    earlier = {key: trial for key, trial in state.trials.items() if key not in trials}
    return state.model_copy(update=dict(trials=earlier | trials))


def may_try(state: State, key: str, step: int) -> bool:
    failure = state.failures.get(key)
    return failure is None or step >= failure.retry_at


def failed(settings: ControllerSettings, state: State, step: int, keys: Iterable[str]) -> State:
    """The state in which what was given back a short while ago is taken back."""
    missed = [key for key in keys if key in state.trials]
    return _with_failures(settings, without(state, missed, ()), step, missed)


def gave_up(settings: ControllerSettings, state: State, step: int) -> State:
    """The state after a climb that seems to be in vain."""
    return _with_failures(settings, state, step, [CLIMB])


def judged(state: State, *, helped: bool) -> State:
    """The state that knows what a climb has done."""
    known = without(state, (), [CLIMB]) if helped else state
    return known.model_copy(update=dict(climb=None))


def held(state: State) -> State:
    """The state in a batch above the floor: the climb that led there, if there was one, has helped."""
    helped = state.climb is not None and state.climb.reached is None
    return judged(state, helped=helped).model_copy(update=dict(cannot_help=False))


def _with_failures(settings: ControllerSettings, state: State, step: int, keys: Iterable[str]) -> State:
    times = {key: 1 + (state.failures[key].times if key in state.failures else 0) for key in keys}
    failures = {key: Failure(times=count, retry_at=step + pause(settings, count)) for key, count in times.items()}
    return state.model_copy(update=dict(failures={**state.failures, **failures}))


def pause(settings: ControllerSettings, times: int) -> int:
    return settings.cooldown_steps * min(LONGEST_PAUSE, FIRST_PAUSE << (times - 1))


def staleness_key(rung: int) -> str:
    return f"staleness {rung}"
