"""The controller in the learner's loop: what it sees, writes, repeats after a crash, and tells others by its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.control.step_controller import StepController, engine_evidence, mean_age, ratio_sums
from pipeline.data.batch import Batch
from pipeline.data.event_log import EventLog, read_events
from pipeline.data.membership import Member
from pipeline.data.run_directory import unfenced
from pipeline.errors import StoreError, SupersededError
from pipeline.ports.learner import Update
from pipeline.trainer.batches import MiniBatch, merge_updates
from precision.controller.policy import ControllerSettings, Evidence, Ladder, State
from precision.mismatch.statistics import Mismatch, StepTokens
from precision.ratios import loss_of, token_ess
from tests.support.batches import batch_of_rewards

SETTINGS = ControllerSettings(ess_floor=0.95, cooldown_steps=3)
GROUPS = ("a", "b")
FIRST_BAD = 4


class OneRank:
    def tell(self, action: Callable[[], Any]) -> Any:
        return json.loads(json.dumps(action()))


class Meter:
    """Quantization is all of it; group `a` does most."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, needs: str, batch: Batch, names: Sequence[str]) -> float | dict[str, float]:
        self.calls.append(needs)
        if needs == "groups":
            return {name: dict(a=0.19, b=0.01)[name] for name in names}
        return 0.0 if names else 0.2


def batch(step: int, lag: int = 0) -> Batch:
    made = batch_of_rewards([[1.0, 0.0]] * 20, index=step, seed=step)
    return replace(made, policy_version=np.full(made.num_response_tokens, step - lag, np.int32))


def trained(given: Batch, spread: float) -> Update:
    noise = np.random.default_rng(given.index).normal(-(spread**2) / 2, spread, given.num_response_tokens)
    logprobs = (given.rollout_logprobs + noise).astype(np.float32)
    return Update(metrics={}, histogram=[], device_logprobs=torch.from_numpy(logprobs))


def controller(run: Path, *, ladder: Ladder | None = None, **changes: Any) -> StepController:
    fields: dict[str, Any] = dict(
        settings=SETTINGS,
        ladder=ladder or Ladder(groups=GROUPS),
        learner=OneRank(),
        files=ControlFiles(run / "control", unfenced),
        measure=Meter(),
        members=lambda: [Member(0, "http://x", 1, "map of ")],
        is_lost=lambda member: False,
        digest=lambda groups: "map of " + ",".join(groups),
        use_map=lambda number, modules: None,
        modules_of=lambda groups: tuple(f"{group}.proj" for group in groups),
        updates_per_batch=1,
        event_log=EventLog(run, "learner-000001"),
    )
    return StepController(**fields | changes)


def go(own: StepController, first: int, last: int, lag: int = 0) -> None:
    """Steps `first` to `last`; from FIRST_BAD on the ESS is about .8."""
    for step in range(first, last + 1):
        given = batch(step, lag)
        own.after(given, trained(given, 0.45 if step >= FIRST_BAD else 0.05))


def records(run: Path, last: int) -> list[ControlRecord]:
    files = ControlFiles(run / "control", unfenced)
    return [found for step in range(last + 1) if (found := files.read(step)) is not None]


def test_a_fall_is_seen_measured_and_answered_by_name(tmp_path: Path) -> None:
    used: list[tuple[int, tuple[str, ...]]] = []
    own = controller(tmp_path, use_map=lambda number, modules: used.append((number, tuple(modules))))
    own.restore(0)
    go(own, 0, 6)
    decided = [record for record in records(tmp_path, 6) if record.decision]
    assert [(record.step, record.decision and record.decision.groups) for record in decided] == [(5, ("a",))]
    assert (decided[0].promoted, decided[0].state.quant_map) == (("a.proj",), 1)
    assert own.measure.calls == ["quantization", "groups"]  # type: ignore[attr-defined]
    assert used == [(0, ())] * 6 + [(1, ("a.proj",))] * 2
    (event,) = read_events(tmp_path, "controlled")
    assert (event["step"], event["groups"], event["rung"]) == (5, ["a"], "1 groups promoted")
    assert event["ess"] == decided[0].evidence.ess


def no_meter(*_: object) -> None:
    """Of a learner that cannot emulate the engines' formats."""


def test_what_cannot_be_measured_is_promoted_and_given_back_as_a_whole(tmp_path: Path) -> None:
    own = controller(tmp_path, measure=no_meter)
    own.restore(0)
    go(own, 0, 5)
    assert own.state.promoted == GROUPS
    good = controller(
        tmp_path,
        measure=no_meter,
        members=lambda: [Member(0, "http://x", 1, "map of " + ",".join(good.state.promoted))],
    )
    good.restore(6)
    for step in range(6, 30):
        given = batch(step)
        good.after(given, trained(given, 0.05))
    decided = [record for record in records(tmp_path, 29) if record.decision]
    assert [(r.decision.action, r.decision.groups) for r in decided if r.decision] == [
        ("climb", GROUPS),
        ("descend", GROUPS),
    ]
    assert [record.evidence.unmeasurable for record in decided] == [True, True]


def test_the_evidence_is_the_batch_s_own(tmp_path: Path) -> None:
    given = batch(7, lag=3)
    update = trained(given, 0.3)
    own = controller(tmp_path)
    own.after(given, update)
    (record,) = records(tmp_path, 7)
    ratios = torch.from_numpy((update.logprobs.astype(np.float64) - given.rollout_logprobs)[given.loss_mask])
    assert record.evidence.ess == pytest.approx(token_ess(ratios), abs=1e-12)
    assert (record.evidence.age, record.evidence.in_transition) == (3.0, False)
    assert mean_age(given, updates_per_batch=4) == 13.5


@pytest.mark.parametrize("killed_after", [4, 5, 6], ids=["before the decision", "after it, before its effect", "later"])
def test_killed_and_started_again_it_decides_once(tmp_path: Path, killed_after: int) -> None:
    """The learner goes on from a checkpoint of 3 steps. What it trains again it does not decide again, even if it
    would see something else by now."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run in (whole, killed):
        run.mkdir()
    untouched = controller(whole)
    untouched.restore(0)
    go(untouched, 0, 9)
    first = controller(killed)
    first.restore(0)
    go(first, 0, killed_after)
    kept = records(killed, killed_after)

    second = controller(killed, event_log=EventLog(killed, "learner-000002"))
    second.restore(3)
    for step in range(3, killed_after + 1):
        given = batch(step)
        second.after(given, trained(given, 1.0))
    assert records(killed, killed_after) == kept
    go(second, killed_after + 1, 9)
    assert records(killed, 9) == records(whole, 9)
    assert len(read_events(killed, "controlled")) == len(read_events(whole, "controlled")) == 1
    assert second.state.quant_map == 1


def test_a_replay_does_what_the_run_did(tmp_path: Path) -> None:
    ladder = Ladder(lag=2, lag_may_change=True, has_age=True)
    run, replay = tmp_path / "run", tmp_path / "replay"
    for folder in (run, replay):
        folder.mkdir()
    own = controller(run, ladder=ladder, measure=lambda *_: 0.0)
    own.restore(0)
    factors = []
    for step in range(12):
        factors.append(own.lr_factor(batch(step, 2)))
        go(own, step, step, lag=2)
    assert factors[:6] == [1.0] * 6
    assert factors[6:] == [3.0**-0.5] * 6

    again = controller(
        replay,
        ladder=ladder,
        decided_before=ControlFiles(run / "control", unfenced),
        members=lambda: [],
        measure=no_meter,
    )
    again.restore(0)
    repeated = []
    for step in range(12):
        repeated.append(again.lr_factor(batch(step, 2)))
        given = batch(step, 2)
        again.after(given, trained(given, 0.0))
    assert repeated == factors
    assert records(replay, 11) == records(run, 11)
    with pytest.raises(StoreError, match="lacks the record of step 12"):
        go(again, 12, 12)


def test_a_lower_lag_holds_for_batches_that_cannot_have_begun(tmp_path: Path) -> None:
    ladder = Ladder(lag=4, lag_may_change=True, has_age=True)
    own = controller(tmp_path, ladder=ladder, measure=lambda *_: 0.0)
    own.restore(0)
    for step in range(41):
        given = batch(step, lag=4)
        own.after(given, trained(given, (0.6, 0.5, 0.42, 0.34, 0.27)[own.state.staleness]))
    changed = [record for record in records(tmp_path, 40) if record.decision and record.decision.rung.startswith("lag")]
    assert [record.decision.rung for record in changed if record.decision] == ["lag 2", "lag 1", "lag 0"]
    steps = [record.step for record in changed]
    assert changed[-1].lags == ((steps[0] + 5, 2), (steps[1] + 3, 1), (steps[2] + 2, 0))
    assert changed[0].lr_by_age


def test_engines_on_another_map_are_a_transition(tmp_path: Path) -> None:
    maps = ["map of ", "map of "]
    own = controller(tmp_path, members=lambda: [Member(i, "http://x", 1, name) for i, name in enumerate(maps)])
    own.restore(0)
    go(own, 0, 6)
    maps[0] = "map of a"
    go(own, 7, 7)
    maps[1] = "map of a"
    go(own, 8, 8)
    assert [record.evidence.in_transition for record in records(tmp_path, 8)[5:]] == [False, True, True, False]


def test_an_engine_that_is_lost_is_no_transition(tmp_path: Path) -> None:
    """Its announcement has the old map for ever."""
    gone = Member(0, "http://x", 1, "map of before")
    own = controller(
        tmp_path, members=lambda: [gone, Member(1, "http://y", 1, "map of ")], is_lost=lambda member: member == gone
    )
    own.restore(0)
    go(own, 0, 5)
    assert not any(record.evidence.in_transition for record in records(tmp_path, 5))
    assert any(record.decision for record in records(tmp_path, 5))


def engine_1_is_bad(own: StepController, first: int, last: int) -> None:
    for step in range(first, last + 1):
        given = replace(batch(step), engine=np.array([0, 1] * 20, np.uint16))
        of_engine_1 = np.repeat(given.engine, given.response_lengths) == 1
        update = trained(given, 0.05)
        worse = np.random.default_rng(step).normal(0.0, 0.8, given.num_response_tokens)
        logprobs = np.where(of_engine_1, update.logprobs + worse, update.logprobs).astype(np.float32)
        own.after(given, replace(update, device_logprobs=torch.from_numpy(logprobs)))


def test_one_bad_engine_is_named_with_its_start(tmp_path: Path) -> None:
    members = [Member(0, "http://x", 4, "map of "), Member(1, "http://y", 9, "map of ")]
    own = controller(tmp_path, members=lambda: members)
    own.restore(0)
    engine_1_is_bad(own, 0, 2)
    record = records(tmp_path, 2)[-1]
    assert record.decision is not None
    assert (record.decision.rung, record.restarts) == ("engine 1", {1: 9})


def test_what_an_earlier_start_sampled_is_not_held_against_an_engine(tmp_path: Path) -> None:
    """Batches that had begun when it came back hold tokens of the start before; also for a learner that is new."""
    members = [Member(0, "http://x", 4, "map of "), Member(1, "http://y", 9, "map of ")]
    ladder = Ladder(lag=2)
    own = controller(tmp_path, ladder=ladder, members=lambda: members)
    own.restore(0)
    engine_1_is_bad(own, 0, 3)
    members[1] = Member(1, "http://y", 10, "map of ")
    engine_1_is_bad(own, 4, 4)
    again = controller(tmp_path, ladder=ladder, members=lambda: members)
    again.restore(5)
    engine_1_is_bad(again, 5, 7)
    seen = {
        record.step: {i: one.start for i, one in record.evidence.engines.items()} for record in records(tmp_path, 7)
    }
    assert seen == {0: {}, 1: {}, 2: {}, 3: {0: 4, 1: 9}, 4: {0: 4}, 5: {0: 4}, 6: {0: 4}, 7: {0: 4, 1: 10}}
    assert not any(record.restarts for record in records(tmp_path, 7))


def test_engines_that_the_run_does_not_start_are_not_started_again(tmp_path: Path) -> None:
    members = [Member(0, "http://x", 0, "map of "), Member(1, "http://y", 0, "map of ")]
    own = controller(tmp_path, ladder=Ladder(), members=lambda: members)
    own.restore(0)
    engine_1_is_bad(own, 0, 9)
    assert not any(record.restarts or record.evidence.in_transition for record in records(tmp_path, 9))


def test_each_engine_is_compared_with_all_others() -> None:
    given = replace(batch(3), engine=np.array([0, 2] * 18 + [5] * 4, np.uint16))
    update = trained(given, 0.3)
    found = engine_evidence(ratio_sums(given, update), {0: 1, 2: 1})
    engine = np.repeat(given.engine, given.response_lengths)[given.loss_mask]
    log_ratios = torch.from_numpy((update.logprobs.astype(np.float64) - given.rollout_logprobs)[given.loss_mask])
    assert found.keys() == {0, 2}
    for index, one in found.items():
        assert one.loss == pytest.approx(loss_of(token_ess(log_ratios[engine == index])), rel=1e-9)
        assert one.loss_of_others == pytest.approx(loss_of(token_ess(log_ratios[engine != index])), rel=1e-9)


def updated(given: Batch, samples: np.ndarray, mean: float, ran: np.ndarray) -> tuple[MiniBatch, Update]:
    """An update on `samples`, of which those that `ran` were run through the model; the others were scored, and are far
    from the engine."""
    part = given.select(samples)
    seen = part.loss_mask & np.repeat(ran[samples], part.response_lengths)
    noise = np.random.default_rng(1).normal(mean, 0.05, len(seen))
    logprobs = torch.from_numpy((part.rollout_logprobs + np.where(seen, noise, 2.0 * noise)).astype(np.float32))
    mismatch = Mismatch.of_step(
        StepTokens(
            learner_logprobs=logprobs,
            rollout_logprobs=torch.from_numpy(part.rollout_logprobs),
            seen=torch.from_numpy(seen),
            advantages=torch.ones(len(seen)),
            entropy=torch.ones(len(seen)),
            age=torch.zeros(len(seen), dtype=torch.int32),
            place=torch.from_numpy(part.places),
            offsets=torch.from_numpy(part.response_offsets),
        )
    )
    responses = np.repeat(samples, given.response_lengths)
    advantages = np.ones(len(seen), np.float32)
    return (
        MiniBatch(batch=part, advantages=advantages, trained=None, episodes=samples, responses=responses, counts={}),
        Update(metrics=mismatch.statistics(), histogram=[0.0], device_logprobs=logprobs, mismatch=mismatch),
    )


@pytest.mark.parametrize("all_ran", [True, False], ids=["all run", "some skipped"])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_controller_judges_the_ess_that_the_metrics_have(tmp_path: Path, updates: int, all_ran: bool) -> None:
    given = batch(7)
    number = np.arange(given.num_samples)
    ran = np.full(len(number), all_ran) | (number % 4 < 2)
    halves = [number < len(number) // 2, number >= len(number) // 2]
    made = [
        updated(given, samples, mean, ran)
        for samples, mean in zip([number >= 0] if updates == 1 else halves, (0.3, 0.9), strict=False)
    ]
    update = merge_updates([part for part, _ in made], [each for _, each in made])
    assert update.metrics["ess"] == pytest.approx(0.9975, abs=1e-3)
    controller(tmp_path).after(given, update)
    (record,) = records(tmp_path, 7)
    assert record.evidence is not None
    assert record.evidence.ess == pytest.approx(update.metrics["ess"], abs=1e-12)


def test_an_engine_is_judged_by_what_each_update_saw() -> None:
    many = batch_of_rewards([[1.0, 0.0]] * 60, index=3)
    given, number = replace(many, engine=np.array([0, 1] * 60, np.uint16)), np.arange(120)
    parts, updates = zip(
        *(updated(given, samples, mean, number % 4 < 2) for samples, mean in ((number < 60, 0.0), (number >= 60, 0.6))),
        strict=True,
    )
    found = engine_evidence(ratio_sums(given, merge_updates(parts, updates)), {0: 1, 1: 1})
    assert [np.exp(-one.loss) for one in found.values()] == [pytest.approx(0.9975, abs=1e-3)] * 2


def test_records(tmp_path: Path) -> None:
    def superseded() -> None:
        raise SupersededError("a later start has taken over")

    record = ControlRecord(step=3, evidence=Evidence(step=3, loss=0.1 + 1e-17), state=State())
    with pytest.raises(SupersededError):
        ControlFiles(tmp_path / "control", superseded).create(record)
    files = ControlFiles(tmp_path / "control", unfenced)
    assert files.read(3) is None
    assert files.newest() is None
    assert files.create(record)
    assert not files.create(record.model_copy(update=dict(lr_by_age=True))), "the first one holds"
    assert files.read(3) == files.newest() == files.wait(3) == record
    (tmp_path / "control" / "000003.json").write_text('{"step": 3')
    with pytest.raises(StoreError, match=r"000003.json is damaged .*; `evenkeel repair"):
        files.read(3)
    with pytest.raises(StoreError, match="lacks the record of step 8"):
        controller(tmp_path).restore(9)


def test_a_lost_first_batch_leaves_a_record_to_begin_from(tmp_path: Path) -> None:
    own = controller(tmp_path)
    own.restore(0)
    own.skip(0)
    (record,) = records(tmp_path, 0)
    assert (record.step, record.evidence, record.decision, record.state) == (0, None, None, State())
    later = controller(tmp_path)
    later.restore(1)
    go(later, 1, 6)
    assert len(records(tmp_path, 6)) == 7


def test_a_skipped_step_has_no_evidence_of_its_own(tmp_path: Path) -> None:
    own = controller(tmp_path)
    own.restore(0)
    go(own, 0, 1)
    own.skip(2)
    before, skipped = records(tmp_path, 2)[1:]
    assert skipped == before.model_copy(update=dict(step=2, evidence=None))
