"""When the learner loop publishes, and what a checkpoint waits for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.data.event_log import EventLog, read_events
from pipeline.data.records import DroppedGroup
from pipeline.data.run_directory import RunDirectory
from pipeline.schedule import Schedule
from pipeline.trainer.loop import Trainer, asked_solve_rate


class Recorder:
    """Learner, channel and checkpoints in one: keeps the order of the calls."""

    is_rank_zero = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def publish(self, version: int) -> dict[str, float]:
        self.calls.append(f"publish {version}")
        return {"publish_s": 0.25, "load_s": 0.125, "transfer_bytes": 8.0}

    def wait_for_folder(self) -> None:
        self.calls.append("wait_for_folder")

    def save(self, learner: Any, step: int, state: Any) -> None:
        self.calls.append(f"save {step}")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.policies.mkdir()
    return run


def trainer(run: RunDirectory, recorder: Recorder, channel: Any) -> Trainer:
    unused: Any = SimpleNamespace()
    return Trainer(
        run=run,
        store=unused,
        learner=recorder,  # type: ignore[arg-type]
        schedule=Schedule(kind="sync", steps=4),
        advantage_computer=SimpleNamespace(estimator=SimpleNamespace(state=dict)),  # type: ignore[arg-type]
        scores_step=False,
        reads_step_logprobs=False,
        updates_per_batch=1,
        old_logprobs=None,
        channel=channel,
        checkpoints=recorder,  # type: ignore[arg-type]
        checkpoint_every=2,
        contract=unused,
        event_log=EventLog(run.path, "learner-000001"),
        wait_deadline_s=1.0,
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
    measured = trainer(run, recorder, recorder)._publish(1)
    assert recorder.calls == expected
    assert [event["seconds"] for event in read_events(run.path, "published")] == [0.25] * len(expected)
    assert bool(measured) == bool(expected)


def test_a_checkpoint_waits_for_the_folder(run: RunDirectory) -> None:
    """Without it, a crash could leave a checkpoint past a version that is served and nowhere on disk."""
    recorder = Recorder()
    loop = trainer(run, recorder, recorder)
    for step in range(4):
        loop._save(step)
    assert recorder.calls == ["wait_for_folder", "save 2", "wait_for_folder", "save 4"]


def test_a_replay_publishes_nothing(run: RunDirectory) -> None:
    recorder = Recorder()
    loop = trainer(run, recorder, None)
    assert loop._publish(1) == {}
    loop._save(1)
    assert recorder.calls == ["save 2"]


def test_an_engine_starts_from_the_newest_folder_that_is_complete(run: RunDirectory) -> None:
    for name in ("000001", "000002", "000003.tmp-17", "000004"):
        (run.policies / name).mkdir()
    assert run.newest_policy(3) == 2
    assert run.newest_policy(4) == 4


def test_dropped_groups_count_for_the_solve_rate() -> None:
    """Of 4 + 4 + 4 samples 1 + 4 + 0 were solved; the groups without contrast were dropped."""
    dropped = [
        DroppedGroup(group=1, reason="all solved", samples=4, solved=4),
        DroppedGroup(group=2, reason="none solved", samples=4),
    ]
    batch: Any = SimpleNamespace(num_samples=4, reward=np.array([1.0, 0.0, 0.0, 0.0], np.float32), dropped=dropped)
    assert asked_solve_rate(batch) == pytest.approx(5 / 12)
