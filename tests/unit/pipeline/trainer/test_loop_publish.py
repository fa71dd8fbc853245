"""When the learner loop publishes, records, saves and stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.data.epochs import claim
from pipeline.data.event_log import EventLog, read_events, read_metrics
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineHungError, StoppedError, SupersededError
from pipeline.ports.learner import Update
from pipeline.schedule import Schedule
from pipeline.trainer.checkpoints import Saved
from pipeline.trainer.loop import Trainer
from pipeline.trainer.scoring import Scoring
from tests.support.one_rank import OneRank


class Recorder(OneRank):
    """Learner, channel and checkpoints in one: keeps the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.under_way: int | None = None
        self.written: Saved | None = None
        self.learner_waits = False

    def stop_requested(self) -> bool:
        return False

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
        advantage_computer=SimpleNamespace(  # type: ignore[arg-type]
            estimator=SimpleNamespace(state=dict), measured=lambda batch: {}, solved_at=1.0
        ),
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
        return SimpleNamespace()

    def remove_partial(self, learner: Any) -> None: ...

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


def loop_of(run: RunDirectory, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    run.make_folders()
    loop = trainer(run, steps, None)
    loop.batches = steps  # type: ignore[assignment]
    loop.advantage_computer.estimator = SimpleNamespace(  # type: ignore[misc]
        state=dict, restore=lambda state: None, observe=lambda **measured: None, measured=dict
    )
    update = Update(metrics={"entropy": 0.5}, histogram=[1.0], device_logprobs=torch.zeros(2))
    monkeypatch.setattr(loop, "_update", lambda batch, watch: update)
    monkeypatch.setattr("pipeline.trainer.loop.describe", lambda batch, step, solved_at: {})
    monkeypatch.setattr("pipeline.trainer.loop.asked_solve_rate", lambda batch, solved_at: 0.5)
    return loop


def test_a_run_to_its_end_saves_when_due(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(run, stop_before=99)
    loop_of(run, steps, monkeypatch).train()
    assert steps.calls == ["save 2", "save 4", "export"]
    assert [event["step"] for event in read_events(run.path, "saved")] == [2, 4]


class WrittenMeanwhile(Steps):
    """What a checkpoint needs is written while batch 2 is waited for."""

    def wait(self, index: int, meanwhile: Callable[[], None]) -> Any:
        if index == 2:
            self.under_way, self.written = None, Saved(2, 0.5)
            meanwhile()
            assert [event["step"] for event in read_events(self.run.path, "saved")] == [2]
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
    loop_of(run, steps, monkeypatch).train()
    assert steps.calls == ["save 2", "noted", "save 4", "export"]


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_step_whose_batch_was_lost_is_skipped_published_and_saved(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    steps = Steps(run, stop_before=99, lost=lost)
    loop = loop_of(run, steps, monkeypatch)
    loop.channel = steps  # type: ignore[assignment]
    run.set_published(0)
    skipped: list[int] = []
    loop.controller = SimpleNamespace(  # type: ignore[assignment]
        restore=lambda step: None, after=lambda batch, update: {}, skip=skipped.append
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
        loop_of(run, steps, monkeypatch).train()
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


def beside(run: RunDirectory, steps: Beside, monkeypatch: pytest.MonkeyPatch, **schedule: Any) -> Trainer:
    run.set_published(0)
    loop = loop_of(run, steps, monkeypatch)
    loop.channel, loop.schedule = steps, Schedule(steps=4, **schedule)
    loop.checkpoint_every = 3
    return loop


def test_the_next_batch_is_trained_while_weights_move(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version ends before the next one begins; the checkpoint of version 3 does not wait for version 3."""
    steps = Beside(run)
    beside(run, steps, monkeypatch, kind="async", lag=1).train()
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
    beside(run, steps, monkeypatch, kind="async", lag=1).train()
    assert steps.calls[:5] == ["batch 0", "begin 1", "finish", "batch 1", "begin 2"]


def test_a_checkpoint_within_a_stage_waits_for_the_stage(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Beside(run)
    beside(run, steps, monkeypatch, kind="staged", updates_per_stage=2).train()
    assert steps.calls[:7] == ["batch 0", "batch 1", "begin 2", "batch 2", "finish", "wait_for_folder", "save 3"]


def test_a_request_to_stop_waits_for_what_moves(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Beside(run, stop_before=1)
    with pytest.raises(StoppedError):
        beside(run, steps, monkeypatch, kind="async", lag=1).train()
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

    def update(self, batch: Any, watch: Any) -> Update:
        self.gone = self.calls[-1] == f"batch {self.last}"
        return Update(metrics={"entropy": 0.5}, histogram=[1.0], device_logprobs=torch.zeros(2))

    def is_over(self, wait_s: float) -> bool:
        return not (self.gone and self.hangs)

    def finish(self) -> dict[str, float]:
        measured = super().finish()
        if self.gone:
            raise EngineHungError("engine 0: it has withdrawn")
        return measured


def ended(run: RunDirectory, steps: Ending, monkeypatch: pytest.MonkeyPatch, **schedule: Any) -> list[str]:
    """The calls of a run that was asked to end, and did so in order."""
    loop = beside(run, steps, monkeypatch, **schedule)
    monkeypatch.setattr(loop, "_update", steps.update)
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
    loop = beside(run, steps, monkeypatch, kind="async", lag=1)
    monkeypatch.setattr(loop, "_update", steps.update)
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


def test_what_rank_0_cannot_write_ends_every_rank(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone would raise, and the others wait for it in their next collective."""

    class Told(Recorder):
        inside = False

        def tell(self, action: Callable[[], Any]) -> Any:
            self.inside = True
            try:
                return super().tell(action)
            finally:
                self.inside = False

    recorder, written = Told(), []

    def write(kind: str, **_: Any) -> None:
        assert recorder.inside, kind
        written.append(kind)

    loop = trainer(run, recorder, recorder)
    monkeypatch.setattr(loop.event_log, "event", write)
    monkeypatch.setattr(RunDirectory, "note_skipped", lambda self, step: write("note_skipped"))
    run.set_published(1)
    loop._skip(1)
    loop._finish_save()
    assert written == ["published", "note_skipped", "skipped", "saved"]
