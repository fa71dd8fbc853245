"""When the learner loop publishes, records, saves and stops."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from pipeline.advantages.compute import AdvantageComputer
from pipeline.advantages.methods import GRPO
from pipeline.data.batch import Batch
from pipeline.data.epochs import claim
from pipeline.data.event_log import EventLog, read_events, read_metrics
from pipeline.data.files import remove_leftovers
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineHungError, NonFiniteError, StoppedError, SupersededError
from pipeline.ports.learner import Update
from pipeline.schedule import Schedule
from pipeline.trainer.checkpoints import Saved
from pipeline.trainer.loop import LEAST, SHARE, OwnExperts, Scoring, Trainer
from tests.support.batches import batch_of_rewards
from tests.support.one_rank import OneRank


class Recorder(OneRank):
    """Learner, channel and checkpoints in one: keeps the order of the calls, and trains at once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.under_way: int | None = None
        self.written: Saved | None = None
        self.learner_waits = False

    def stop_requested(self) -> bool:
        return False

    def update(self, batch: Any, *_: Any, **__: Any) -> Update:
        return Update(metrics={"entropy": 0.5}, histogram=[1.0], device_logprobs=torch.zeros(batch.num_response_tokens))

    def begin(self, version: int, *, learner_waits: bool = False) -> None:
        self.calls.append(f"{'publish' if learner_waits else 'begin'} {version}")
        self.learner_waits = learner_waits

    def is_over(self, wait_s: float) -> bool:
        return True

    def finish(self) -> dict[str, float]:
        if self.learner_waits:
            return {"publish_s": 0.25, "load_s": 0.125, "transfer_bytes": 8.0}
        self.calls.append("finish")
        return {"publish_s": 0.5}

    def wait_for_folder(self) -> None:
        self.calls.append("wait_for_folder")

    def begin_save(self, learner: Any, step: int, state: Any, versions: Any = None) -> None:
        """A checkpoint, which is written until the end is asked for."""
        assert self.under_way is None
        self.under_way = step
        self.calls.append(f"save {step}")

    def advance(self, learner: Any, *, to_the_end: bool = False) -> Saved | None:
        if self.under_way is None or not to_the_end:
            return None
        step, self.under_way = self.under_way, None
        return Saved(step, 0.5)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.policies.mkdir()
    return run


def trainer(run: RunDirectory, recorder: Recorder, channel: Any) -> Trainer:
    return Trainer(
        run=run,
        batches=recorder,  # type: ignore[arg-type]
        learner=recorder,  # type: ignore[arg-type]
        schedule=Schedule(kind="sync", steps=4),
        advantage_computer=AdvantageComputer(section=GRPO(), estimator=GRPO().estimator(), max_new_tokens=9),
        scoring=Scoring(prepares=False, reads_step=False, reads_old=False),
        updates_per_batch=1,
        old_logprobs=None,
        channel=channel,
        checkpoints=recorder,  # type: ignore[arg-type]
        checkpoint_every=2,
        event_log=EventLog(run.path, "learner-000001"),
    )


@pytest.mark.parametrize(
    ("published", "folder_there", "expected"),
    [
        (1, True, ["publish 2"]),
        (2, True, []),
        (2, False, ["publish 2"]),  # died between the transport and the folder
        (3, False, []),  # folders of older versions are pruned
    ],
)
def test_a_version_is_published_until_it_is_served_and_kept(
    run: RunDirectory, published: int, folder_there: bool, expected: list[str]
) -> None:
    run.set_published(published)
    if folder_there:
        run.policy_directory(published).mkdir()
    recorder = Recorder()
    loop = trainer(run, recorder, recorder)
    loop._publish(1)
    loop._diagnostics.flush()
    assert recorder.calls == expected
    assert [event["seconds"] for event in read_events(run.path, "published")] == [0.25] * len(expected)
    assert bool(loop._published) == bool(expected)


def test_a_thawed_learner_does_not_publish(run: RunDirectory) -> None:
    run.set_published(1)
    thawed = run.under(claim(run.path, "learner"))
    claim(run.path, "learner")
    recorder = Recorder()
    with pytest.raises(SupersededError):
        trainer(thawed, recorder, recorder)._publish(1)
    assert recorder.calls == []


class Steps(Recorder):
    """A learner whose every step is trained at once; the batches come until one is asked for that is not there."""

    def __init__(self, run: RunDirectory, stop_before: int, lost: int = -1) -> None:
        super().__init__()
        self.run = run
        self.stop_before = stop_before
        self.lost = lost

    def wait(self, index: int, meanwhile: Callable[[], None]) -> Any:
        if index == self.lost:
            return None
        if index == self.stop_before:
            raise StoppedError("asked to end")
        return batch_of_rewards([[1.0, 0.0]], index=index)

    def restore(self, learner: Any, versions: Any = None) -> tuple[int, dict[str, float]]:
        return 0, {}

    def begin_save(self, learner: Any, step: int, state: Any, versions: Any = None) -> None:
        recorded = [line["step"] for line in read_metrics(self.run.path)]
        assert recorded == [done for done in range(step) if done != self.lost], (
            "a step is recorded before its checkpoint"
        )
        assert all(self.run.learner_logprobs(trained) is not None for trained in recorded)
        super().begin_save(learner, step, state)

    def export(self, folder: Path, fence: Any) -> None:
        assert self.under_way is None, "whatever dies from here on, the last checkpoint is there"
        self.calls.append("export")


def loop_of(run: RunDirectory, steps: Steps) -> Trainer:
    run.make_folders()
    loop = trainer(run, steps, None)
    loop.batches = steps  # type: ignore[assignment]
    return loop


def test_a_run_to_its_end_saves_when_due(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(run, stop_before=99)
    loop_of(run, steps).train()
    assert steps.calls == ["save 2", "save 4", "export"]
    assert [event["step"] for event in read_events(run.path, "saved")] == [2, 4]


class WrittenMeanwhile(Steps):
    """What a checkpoint needs is written while batch 2 is waited for."""

    def wait(self, index: int, meanwhile: Callable[[], None]) -> Any:
        if index == 2:
            self.under_way, self.written = None, Saved(2, 0.5)
            meanwhile()
            assert self.written is None, "it was looked at"
            self.calls.append("noted")
        return super().wait(index, meanwhile)

    def advance(self, learner: Any, *, to_the_end: bool = False) -> Saved | None:
        written, self.written = self.written, None
        return written or super().advance(learner, to_the_end=to_the_end)


def test_a_checkpoint_is_committed_while_a_batch_is_waited_for(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in a long wait costs no checkpoint that is written."""
    steps = WrittenMeanwhile(run, stop_before=99)
    loop_of(run, steps).train()
    assert steps.calls == ["save 2", "noted", "save 4", "export"]


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_step_whose_batch_was_lost_is_skipped_published_and_saved(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    steps = Steps(run, stop_before=99, lost=lost)
    loop = loop_of(run, steps)
    loop.channel = steps  # type: ignore[assignment]
    run.set_published(0)
    skipped: list[int] = []
    loop.controller = SimpleNamespace(  # type: ignore[assignment]
        restore=lambda step: None, lr_factor=lambda batch: 1.0, after=lambda batch, update: {}, skip=skipped.append
    )
    loop.train()
    assert [call for call in steps.calls if call.startswith("save")] == ["save 2", "save 4"]
    assert [call for call in steps.calls if call.startswith("publish")] == [f"publish {v}" for v in (1, 2, 3, 4)]
    assert [event["step"] for event in read_events(run.path, "skipped")] == [lost]
    assert run.skipped_steps() == skipped == [lost]


@pytest.mark.parametrize(
    ("stop_before", "saved"), [(0, []), (1, ["save 1"]), (2, ["save 2"]), (3, ["save 2", "save 3"])]
)
def test_a_request_to_stop_saves_what_is_trained_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, stop_before: int, saved: list[str]
) -> None:
    steps = Steps(run, stop_before)
    with pytest.raises(StoppedError):
        loop_of(run, steps).train()
    assert steps.calls == saved


@pytest.mark.parametrize(
    ("schedule", "asked_to_end", "waits"),
    [
        (Schedule(kind="sync", steps=4), False, True),
        (Schedule(kind="sync", steps=4), True, False),
        (Schedule(kind="staged", steps=4, updates_per_stage=4), False, True),
        (Schedule(kind="staged", steps=4, updates_per_stage=4), True, True),
    ],
)
def test_a_checkpoint_waits_for_the_folder(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, schedule: Schedule, asked_to_end: bool, waits: bool
) -> None:
    """Without it, a crash could leave a checkpoint past a version that is served and nowhere on disk. A learner that is
    asked to end has no time for that; the next start publishes the checkpoint's version, but not within a stage."""
    recorder = Recorder()
    monkeypatch.setattr(recorder, "stop_requested", lambda: asked_to_end)
    loop = trainer(run, recorder, recorder)
    loop.schedule = schedule
    loop._save(2)
    assert recorder.calls == ["wait_for_folder"] * waits + ["save 2"]


class Beside(Steps):
    """The weights move beside training. Batch `late` is not there yet when its turn comes."""

    def __init__(self, run: RunDirectory, stop_before: int = 99, late: int = -1) -> None:
        super().__init__(run, stop_before)
        self.late = late

    def is_there(self, index: int) -> bool:
        return index != self.late

    def wait(self, index: int, meanwhile: Callable[[], None]) -> Any:
        self.calls.append(f"batch {index}")
        return super().wait(index, meanwhile)


def beside(run: RunDirectory, steps: Beside, **schedule: Any) -> Trainer:
    run.set_published(0)
    loop = loop_of(run, steps)
    loop.channel, loop.schedule = steps, Schedule(steps=4, **schedule)
    loop.checkpoint_every = 3
    return loop


def test_the_next_batch_is_trained_while_weights_move(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version ends before the next one begins; the checkpoint of version 3 does not wait for version 3."""
    steps = Beside(run)
    beside(run, steps, kind="async", lag=1).train()
    assert steps.calls == [
        *("batch 0", "begin 1", "batch 1", "finish", "begin 2", "batch 2", "finish", "begin 3", "save 3"),
        *("batch 3", "finish", "publish 4", "wait_for_folder", "save 4", "export"),
    ]
    assert [event["version"] for event in read_events(run.path, "published")] == [1, 2, 3, 4]
    assert [line["publish_seconds"] for line in read_metrics(run.path)] == [
        *({}, {"publish_s": 0.5}, {"publish_s": 0.5}),
        {"publish_s": 0.25, "load_s": 0.125},
    ]


def test_a_learner_without_a_batch_waits_for_its_publish(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed may be why the batch does not come."""
    steps = Beside(run, late=1)
    beside(run, steps, kind="async", lag=1).train()
    assert steps.calls[:5] == ["batch 0", "begin 1", "finish", "batch 1", "begin 2"]


def test_a_checkpoint_within_a_stage_waits_for_the_stage(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Beside(run)
    beside(run, steps, kind="staged", updates_per_stage=2).train()
    assert steps.calls[:7] == ["batch 0", "batch 1", "begin 2", "batch 2", "finish", "wait_for_folder", "save 3"]


def test_a_request_to_stop_waits_for_what_moves(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Beside(run, stop_before=1)
    with pytest.raises(StoppedError):
        beside(run, steps, kind="async", lag=1).train()
    assert steps.calls == ["batch 0", "begin 1", "batch 1", "save 1", "finish"]


class Ending(Beside):
    """The process is asked to end while batch `last` is trained on, or once rank 0 has looked `late_looks` times since.
    The engines are asked to end with it: a version that is on its way then fails, or never arrives where it `hangs`."""

    def __init__(self, run: RunDirectory, last: int, *, hangs: bool = False, late_looks: int = 0) -> None:
        super().__init__(run)
        self.last, self.hangs, self.late_looks = last, hangs, late_looks
        self.gone, self.looks, self.inside = False, 0, False

    def tell(self, action: Callable[[], Any]) -> Any:
        self.inside = True
        try:
            return super().tell(action)
        finally:
            self.inside = False

    def stop_requested(self) -> bool:
        assert self.inside, "rank 0 alone knows it"
        self.looks += self.gone
        return self.looks > self.late_looks

    def wait(self, index: int, meanwhile: Callable[[], None]) -> Any:
        if self.gone:
            raise StoppedError("asked to end")
        return super().wait(index, meanwhile)

    def update(self, batch: Any, *_: Any, **__: Any) -> Update:
        self.gone = self.calls[-1] == f"batch {self.last}"
        return super().update(batch)

    def is_over(self, wait_s: float) -> bool:
        return not (self.gone and self.hangs)

    def finish(self) -> dict[str, float]:
        measured = super().finish()
        if self.gone:
            raise EngineHungError("engine 0: it has withdrawn")
        return measured


def ended(run: RunDirectory, steps: Ending, monkeypatch: pytest.MonkeyPatch, **schedule: Any) -> list[str]:
    """The calls of a run that was asked to end, and did so in order."""
    loop = beside(run, steps, **schedule)
    monkeypatch.setattr("pipeline.trainer.loop.LAST_PUBLISH_S", 0.0)
    with pytest.raises(StoppedError, match="asked to end"):
        loop.train()
    return steps.calls


def test_a_learner_that_is_asked_to_end_with_its_engines_does_not_publish(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no engine any more, and one would be waited for until the grace time is over."""
    calls = ended(run, Ending(run, last=1), monkeypatch, kind="sync")
    assert calls == ["batch 0", "publish 1", "batch 1", "save 2"]
    assert [line["step"] for line in read_metrics(run.path)] == [0, 1]


@pytest.mark.parametrize("late_looks", [0, 2])
def test_a_version_that_no_engine_took_because_all_end_does_not_keep_from_saving(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, late_looks: int
) -> None:
    """Also where the engines were asked to end a moment before the learner."""
    calls = ended(run, Ending(run, last=1, late_looks=late_looks), monkeypatch, kind="async", lag=1)
    assert calls == ["batch 0", "begin 1", "batch 1", "finish", "save 2"]


def test_a_version_that_never_arrives_is_left_behind(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ended(run, Ending(run, last=1, hangs=True), monkeypatch, kind="async", lag=1)
    assert calls == ["batch 0", "begin 1", "batch 1", "save 2"]


def test_the_last_version_is_published_by_the_next_start(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ended(run, Ending(run, last=3), monkeypatch, kind="sync")
    assert calls[-2:] == ["batch 3", "save 4"]


def test_no_checkpoint_within_a_stage_whose_version_no_engine_took(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who went on from it would publish nothing before the stage ends, and the collector waits for that version."""
    calls = ended(run, Ending(run, last=2), monkeypatch, kind="staged", updates_per_stage=2)
    assert calls == ["batch 0", "batch 1", "begin 2", "batch 2", "finish"]


def test_engines_that_fail_end_a_learner_that_nobody_asked_to_end(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Ending(run, last=1, late_looks=99)
    loop = beside(run, steps, kind="async", lag=1)
    monkeypatch.setattr("pipeline.trainer.loop.STOP_SPREAD_S", 0.0)
    with pytest.raises(EngineHungError, match="it has withdrawn"):
        loop.train()
    assert not [call for call in steps.calls if call.startswith("save")]


def test_sync_trains_nothing_while_weights_move() -> None:
    assert not Schedule(kind="sync", steps=4).overlaps
    assert not Schedule(kind="async", steps=4, lag=0).overlaps
    assert Schedule(kind="async", steps=4, lag=1).overlaps


def test_a_replay_publishes_nothing(run: RunDirectory) -> None:
    recorder = Recorder()
    loop = trainer(run, recorder, None)
    loop._publish(1)
    loop._save(1)
    assert recorder.calls == ["save 1"]


def test_an_engine_starts_from_the_newest_folder_that_is_complete(run: RunDirectory) -> None:
    for name in ("000001", "000002", ".000003.host-0123456789ab.tmp", "000004"):
        (run.policies / name).mkdir()
    assert run.newest_policy(3) == 2
    assert run.newest_policy(4) == 4


def test_a_skipped_step_that_rank_0_cannot_note_ends_every_rank(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone would raise, and the others wait for it in their next collective."""

    class Told(Recorder):
        inside = False

        def tell(self, action: Callable[[], Any]) -> Any:
            self.inside = True
            try:
                return super().tell(action)
            finally:
                self.inside = False

    recorder, inside = Told(), []
    loop = trainer(run, recorder, recorder)
    monkeypatch.setattr(RunDirectory, "note_skipped", lambda self, step: inside.append(recorder.inside))
    run.set_published(1)
    loop._skip(1)
    assert inside == [True]


class SlowLog(EventLog):
    """A disk that takes no line of metrics before it is let go, and then a while for each."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run.path, "learner-000001")
        self.goes_on = Event()

    def metrics(self, step: int, **fields: Any) -> None:
        assert self.goes_on.wait(20.0)
        time.sleep(0.1)
        super().metrics(step, **fields)


def test_a_slow_disk_delays_no_step_but_the_checkpoint(run: RunDirectory) -> None:
    """Step 1 is trained while no line of step 0 is written; the checkpoint of both waits for their lines."""

    class Watched(Steps):
        def update(self, batch: Any, *_: Any, **__: Any) -> Update:
            if batch.index == 1:
                assert read_metrics(self.run.path) == []
                log.goes_on.set()
            return super().update(batch)

    log, steps = SlowLog(run), Watched(run, stop_before=99)
    loop = loop_of(run, steps)
    loop.event_log = log
    loop.train()
    assert [line["step"] for line in read_metrics(run.path)] == [0, 1, 2, 3]


def test_a_kill_loses_no_diagnostics_of_steps_that_a_checkpoint_holds(run: RunDirectory) -> None:
    """Killed in step 3 while the line of step 2 is not written: both are trained, and recorded, again."""

    class Killed(Steps):
        def update(self, batch: Any, *_: Any, **__: Any) -> Update:
            if batch.index == 2:
                log.goes_on.clear()
            if batch.index == 3:
                raise KeyboardInterrupt
            return super().update(batch)

    class Resumed(Steps):
        def restore(self, learner: Any, versions: Any = None) -> tuple[int, dict[str, float]]:
            return 2, {}

    log = SlowLog(run)
    log.goes_on.set()
    loop = loop_of(run, Killed(run, stop_before=99))
    loop.event_log = log
    with patch.object(loop._diagnostics, "close"), pytest.raises(KeyboardInterrupt):
        loop.train()
    assert [line["step"] for line in read_metrics(run.path)] == [0, 1]
    again = loop_of(run, Resumed(run, stop_before=99))
    again.event_log = EventLog(run.path, "learner-000002")
    again.train()
    assert [line["step"] for line in read_metrics(run.path)] == [0, 1, 2, 3]
    log.goes_on.set()


def test_a_request_to_stop_writes_the_diagnostics_of_what_is_trained(run: RunDirectory) -> None:
    with pytest.raises(StoppedError):
        loop_of(run, Steps(run, stop_before=3)).train()
    assert [line["step"] for line in read_metrics(run.path)] == [0, 1, 2]
    assert [event["step"] for event in read_events(run.path, "consumed")] == [0, 1, 2]


def test_diagnostics_that_cannot_be_written_fail_no_run_and_are_told_once(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    class Without(Steps):
        def begin_save(self, learner: Any, step: int, state: Any, versions: Any = None) -> None:
            Recorder.begin_save(self, learner, step, state)

    steps = Without(run, stop_before=99)
    loop = loop_of(run, steps)
    run.logprobs.rmdir()
    run.logprobs.write_text("no folder", encoding="utf-8")
    loop.learner.tell = lambda action: None if getattr(action, "func", None) is remove_leftovers else action()  # type: ignore[method-assign]
    loop.train()
    assert steps.calls == ["save 2", "save 4", "export"]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == 2
    assert "diagnostics of a step were not written" in said[0]
    assert "4 diagnostics" in said[1]


def test_a_metric_that_is_not_finite_ends_the_run(run: RunDirectory) -> None:
    class Diverged(Steps):
        def update(self, batch: Any, *_: Any, **__: Any) -> Update:
            update = super().update(batch)
            return replace(update, metrics=update.metrics | {"loss": float("nan")})

    with pytest.raises(NonFiniteError, match="loss is nan"):
        loop_of(run, Diverged(run, stop_before=99)).train()


class Learner:
    """Off by 0.5 nats where it routes by itself, and by `off` where it is told."""

    def __init__(self, off: float) -> None:
        self.off = off
        self.asked: list[Batch] = []

    def score(self, batch: Batch) -> Any:
        self.asked.append(batch)
        return torch.from_numpy(batch.rollout_logprobs + np.float32(0.5 if batch.experts is None else self.off))


def batch(samples: int) -> Batch:
    plain = batch_of_rewards([[0.0] * 4] * (samples // 4), unsampled=0.2)
    ids = np.zeros((len(plain.tokens), 1, 1), np.uint8)
    return replace(plain, experts=RoutedExperts(ids=ids, known=np.ones(len(plain.tokens), np.bool_)))


def test_some_samples_are_scored_with_the_learners_own_experts_before_the_step() -> None:
    learner, whole = Learner(off=0.1), batch(4 * 5 * SHARE)
    effect = OwnExperts.score(learner, whole)  # type: ignore[arg-type]
    assert effect is not None
    assert [asked.num_samples for asked in learner.asked] == [20]
    chosen = np.flatnonzero(effect.samples)
    assert (chosen[0], chosen[-1], int(np.diff(chosen).max())) == (0, 4 * 5 * SHARE - 1, SHARE + 1)
    assert learner.asked[0].experts is None
    found = effect.compared(whole, learner.score(whole))
    assert found["log_ratio_abs_mean_with_replay"] == pytest.approx(0.1, rel=1e-4)
    assert found["log_ratio_abs_mean_without_replay"] == pytest.approx(0.5, rel=1e-4)
    # k3 of a constant log-ratio l is exp(l) - 1 - l.
    assert found["k3_kl_without_replay"] == pytest.approx(np.exp(0.5) - 1.5, rel=1e-4)
    assert found["ess_with_replay"] == pytest.approx(1.0)


def test_tokens_that_the_step_left_out_do_not_count() -> None:
    learner, whole = Learner(off=0.0), batch(LEAST)
    effect = OwnExperts.score(learner, whole)  # type: ignore[arg-type]
    assert effect is not None
    assert effect.part.num_samples == LEAST
    scored = torch.where(torch.arange(whole.num_response_tokens) < 9, learner.score(whole), torch.nan)
    assert effect.compared(whole, scored)["ess_with_replay"] == pytest.approx(1.0)
    assert effect.compared(whole, torch.full_like(scored, torch.nan)) == {}


def test_a_batch_without_recorded_experts_costs_nothing() -> None:
    learner = Learner(off=0.0)
    assert OwnExperts.score(learner, replace(batch(8), experts=None)) is None  # type: ignore[arg-type]
    assert learner.asked == []
