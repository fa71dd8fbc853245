"""The controller against causes that drift (tests/support/controlled_plant.py): 20 random drifts here, 1,000 in slow.

Each drift ends in a rest, and then the run must be where it should be.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from precision.controller.ladder import Ladder
from precision.controller.settings import ControllerSettings
from tests.support.controlled_plant import Plant, drift

STEPS, LAST = 500, 100
CAUSES = ("staleness", "layer", "layers", "engine", "both")


def random_plant(seed: int) -> Plant:
    """Floor, ladder, causes, noise and delays at random; one kind of drift, of one cause or of two."""
    draw = random.Random(seed)
    lag, groups = draw.choice([0, 0, 1, 2, 4, 8]), tuple(f"g{i}" for i in range(draw.choice([4, 6, 8])))
    settings = ControllerSettings(ess_floor=draw.choice([0.9, 0.95, 0.98]), cooldown_steps=draw.choice([3, 5, 8]))
    allowed, cause = settings.allowed_loss, draw.choice(CAUSES)
    kind = draw.choice(["sudden", "slow", "oscillating", "spike"])
    begins = draw.randint(10, 60)
    ends = begins + draw.randint(40, 150)

    def drifting(least: float, most: float) -> dict[str, float | int | str]:
        period = draw.choice([6, 14, 30, 60])
        return dict(kind=kind, begins=begins, ends=ends, factor=draw.uniform(least, most), period=period)

    plant = Plant(
        settings,
        Ladder(lag=lag, lag_may_change=lag > 0, has_age=lag > 0, groups=groups),
        damage={group: draw.uniform(0.2, 1.0) * 0.3 * allowed / len(groups) for group in groups},
        staleness=draw.uniform(0.1, 0.5) * allowed,
        rest=draw.uniform(0.0, 0.1) * allowed,
        lag_power=draw.uniform(0.6, 1.6),
        lr_power=draw.uniform(0.5, 2.0),
        emulation_sees=draw.uniform(0.75, 1.1),
        transition_steps=draw.randint(1, 6),
        noise=draw.uniform(0.0, 0.08),
        seed=seed,
        num_engines=draw.choice([1, 2, 4]),
    )
    if cause in ("staleness", "both"):
        plant.staleness_drift = drift(**drifting(2, 20))  # type: ignore[arg-type]
    if cause in ("layer", "both"):
        plant.group_drifts = {draw.choice(groups): drift(**drifting(5, 100))}  # type: ignore[arg-type]
    if cause == "layers":
        several = draw.sample(groups, len(groups) // 2)
        plant.group_drifts = {group: drift(**drifting(2, 20)) for group in several}  # type: ignore[arg-type]
    if cause == "engine":
        plant.num_engines = max(2, plant.num_engines)
        plant.bad_engine, plant.bad_from = draw.randrange(plant.num_engines), begins
        plant.bad_loss = draw.uniform(2, 10) * allowed * plant.num_engines
        plant.bad_after_restart = draw.random() < 0.3
    return plant


def check(seed: int) -> int:
    """Run one drift and check what the controller promises; the number of decisions."""
    plant = random_plant(seed).run(STEPS)
    steps = [step for step, _ in plant.decisions]
    cooldown = plant.settings.cooldown_steps
    assert all(later - earlier >= cooldown for earlier, later in itertools.pairwise(steps)), seed

    used = Counter((state.staleness, frozenset(state.promoted)) for state in plant.states[-LAST:])
    rung, promoted = used.most_common(1)[0][0]
    assert sum(step >= STEPS - LAST for step in steps) <= 4, f"{seed}: restless at the end"
    # The median of three noisy batches may be this far off.
    allowed, noise = plant.settings.allowed_loss, math.exp(3.0 * plant.noise)
    clearly = plant.settings.comfortable_loss / noise
    loss = plant.true_loss(STEPS, rung, promoted)
    if plant.loss_of_kind(STEPS, 4) <= clearly:
        assert loss <= allowed * noise, f"{seed}: the floor could be held"
    if loss <= allowed * noise:
        assert plant.given_back(STEPS, rung, promoted) > clearly, f"{seed}: not all of it is needed"
        cheaper = [kind for kind in range(plant.kind(rung, promoted)) if plant.loss_of_kind(STEPS, kind) <= clearly]
        assert not cheaper, f"{seed}: rungs of kind {cheaper} would do"
    if plant.bad_engine is not None:
        assert not plant.state.promoted, f"{seed}: one bad engine is no reason to promote layers"
    return len(plant.decisions)


def test_random_drifts() -> None:
    decisions = [check(seed) for seed in range(20)]
    assert sum(decisions) > 20, "the drifts asked for something"


@pytest.mark.slow
@pytest.mark.repeated
def test_a_thousand_random_drifts() -> None:
    for seed in range(1000):
        check(seed)


def plant(**values: object) -> Plant:
    settings = ControllerSettings(ess_floor=math.exp(-0.05), cooldown_steps=5)
    ladder = Ladder(lag=4, lag_may_change=True, has_age=True, groups=tuple("abcdef"))
    defaults: dict[str, object] = dict(damage=dict.fromkeys("abcdef", 0.001), staleness=0.01, noise=0.05)
    return Plant(settings, ladder, **defaults | values)  # type: ignore[arg-type]


def test_layers_that_become_bad_at_once_are_promoted_within_five_steps() -> None:
    bad = drift("sudden", 50, 51, 100.0, 1)
    run = plant(group_drifts=dict(b=bad, e=bad)).run(200)
    assert [(step, set(decision.groups)) for step, decision in run.decisions] == [(51, {"b", "e"})]
    assert max(run.losses[60:]) < 0.05 < min(run.losses[50:52])


def test_a_slow_drift_is_met_rung_by_rung_and_given_back_when_it_ends() -> None:
    def slow(step: int) -> float:
        return 1.0 + 14.0 * max(0.0, 1.0 - abs(step - 200) / 150)

    run = plant(staleness_drift=slow).run(700)
    names = [decision.rung for _, decision in run.decisions]
    assert names[0] == "learning rate by age"
    assert {decision.cause for _, decision in run.decisions} == {"staleness"}
    assert max(state.staleness for state in run.states) >= 2
    assert run.state.staleness == 0
    # Whoever follows a drift is late, by the window and the batches under way.
    assert sum(loss > 0.05 for loss in run.losses) < 0.15 * len(run.losses)


def test_what_oscillates_for_ever_is_not_followed() -> None:
    """Swings of every length, above and below the floor: as many decisions as pauses that double fit into the run."""
    for period in (12, 80):
        bad = drift("oscillating", 20, 10**9, 60.0, period)
        run = plant(group_drifts=dict(c=bad), staleness_drift=drift("oscillating", 20, 10**9, 8.0, period)).run(2000)
        assert len(run.decisions) <= 45, period
        later = [step for step, _ in run.decisions if step >= 1000]
        assert len(later) <= 16, (period, later)


def test_an_engine_that_stays_bad_does_not_move_the_others() -> None:
    run = plant(num_engines=4, bad_engine=2, bad_from=30, bad_loss=0.8, bad_after_restart=True).run(300)
    assert {decision.rung for _, decision in run.decisions} == {"engine 2"}
    assert 2 <= len(run.decisions) <= 6


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_a_gap_of_kernels_does_not_take_the_lag_of_an_async_run(noise: float) -> None:
    """The loss is .15 whatever the lag is. Each cause but quantization looks like staleness until a rung shows that it
    is not."""
    ladder = Ladder(lag=8, lag_may_change=True, has_age=True, groups=tuple("abcdef"))
    run = Plant(ControllerSettings(), ladder, damage=dict.fromkeys("abcdef", 0.0), rest=0.15, noise=noise, seed=1).run(
        600
    )
    assert run.state.cannot_help
    assert ladder.in_force(run.state).lag == 8
    lags = [ladder.in_force(state).lag for state in run.states]
    assert sum(lag < 8 for lag in lags) < 0.05 * len(lags), "one rung says enough"
    own = [state.staleness == 0 for state in run.states[-300:]]
    assert sum(own) > 0.9 * len(own)
