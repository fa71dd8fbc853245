"""Recorded runs of an ESS controller: its decisions are repeated, and formats that it changed are not guessed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, MagicMock, patch

import numpy as np
import pytest

from launch.mismatch import replay_ranks
from launch.mismatch.recorded import Recorded, bounded, require_first_map
from launch.mismatch.scoring import MOST_ROWS, Job, VersionRows
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import StoreError
from precision.controller.records import Decision, Evidence, State

DECISION = Decision(action="climb", cause="quantization", rung="layer 0", because="ESS 0.8 below 0.9.")
VERSIONS = np.array([4, 5, 5], np.int32)


def recorded() -> Recorded:
    batch: Any = SimpleNamespace(policy_version=VERSIONS, loss_mask=np.ones(3, np.bool_))
    return Recorded(6, batch, np.zeros(3))


@pytest.mark.parametrize(("step", "refused"), [(3, True), (4, True), (5, False)])
def test_batches_of_changed_formats_are_refused(tmp_path: Path, step: int, refused: bool) -> None:
    """The decision of step 4 comes with version 5."""
    run = RunDirectory(tmp_path)
    control = ControlFiles(run.control, lambda: None)
    for number, quant_map in ((1, 0), (step, 1)):
        state = State(quant_map=quant_map)
        control.create(
            ControlRecord(step=number, evidence=Evidence(step=number, loss=0.1), state=state, decision=DECISION)
        )
    if not refused:
        require_first_map(run, recorded())
        return
    with pytest.raises(StoreError, match=rf"from version {step + 1} on the controller changed .*000001.yaml"):
        require_first_map(run, recorded())


def test_training_again_repeats_the_controllers_decisions(tmp_path: Path) -> None:
    source, run = RunDirectory(tmp_path / "source"), MagicMock()
    names = ("build_learner", "build_rates", "build_contract", "build_limits", "build_tokenizer", "build_trainer")
    classes = ("Checkpoints", "BatchStore", "EventLog", "ExportChannel")
    with patch.multiple(replay_ranks, build_controller=DEFAULT, **dict.fromkeys((*names, *classes), DEFAULT)) as made:
        made["Checkpoints"].return_value.restore.return_value = (0, None)
        replay_ranks.replay(run, source, {2})
    assert made["build_trainer"].call_args.kwargs["controller"] is made["build_controller"].return_value
    assert made["build_controller"].call_args.args[-1] is source


def test_of_a_large_batch_some_rows_are_attributed_evenly_spread() -> None:
    count = 4 * MOST_ROWS
    offsets = 2 * np.arange(count + 1)
    batch: Any = SimpleNamespace(num_samples=count, response_offsets=offsets, loss_mask=np.ones(2 * count, np.bool_))
    some = bounded(Recorded(6, batch, np.zeros(2 * count)))
    rows = np.unique(np.flatnonzero(some.counts) // 2)
    assert (len(rows), some.counts.sum(), some.rows_left_out) == (MOST_ROWS, 2 * MOST_ROWS, 3 * MOST_ROWS)
    assert set(np.diff(rows)) <= {4, 5}
    assert bounded(some).rows_left_out == 0


def test_the_deadline_grows_with_the_passes() -> None:
    version = VersionRows(number=0, weights=Path(), rows=(0,))
    plain = Job(tokens=[[1, 2]], prompt_lengths=[1], versions=(version,))
    assert plain.most_passes(64) > 64
    assert plain.model_copy(update=dict(versions=(version, version))).most_passes(64) > 2 * 64
    assert plain.model_copy(update=dict(searched=(0,))).most_passes(64) > 3 * 64
