"""A synthetic run that grows, is resumed and is exported; and what each tool's own library reads of the export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore

from pipeline.data.event_log import EventLog
from tests.support.written_runs import SECONDS, START, step_metrics

Rows = dict[int, list[float]]
"""Step → the `train/grad_norm` of each time that it is there."""


def train(run: Path, start: int, steps: range) -> None:
    """What start number `start` of the learner writes: its grad_norm is 100 times that number, and the step."""
    log = EventLog(run, f"learner-{start:06d}")
    for step in steps:
        fields = step_metrics(step, SECONDS) | dict(grad_norm=100.0 * start + step)
        log.metrics(step, **fields, time=START + 1000.0 * start + step)


def tensorboard_rows(folder: Path) -> Rows:
    """Record by record, and as TensorBoard itself puts the files together."""
    rows: Rows = {}
    for path in sorted(folder.glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "train/grad_norm":
                    rows.setdefault(event.step, []).append(value.tensor.float_val[0])
    return rows


def tensorboard_curve(folder: Path) -> list[tuple[int, float]]:
    """Steps and values as TensorBoard itself puts the files together."""
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    return [(scalar.step, scalar.value) for scalar in board.Scalars("train/grad_norm")]


def wandb_records(folder: Path) -> list[Any]:
    """All records of all runs that are there, torn ends left out as `wandb sync` does."""
    records = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        with closing(store._fp):
            while (data := _next(store)) is not None:
                records.append(Record.FromString(data))
    return records


def _next(store: DataStore) -> bytes | None:
    try:
        data: bytes | None = store.scan_data()
    except AssertionError:
        return None
    return data


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Its rows."""
    found = (record.history for record in wandb_records(folder) if record.WhichOneof("record_type") == "history")
    return [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in h.item} for h in found]


def wandb_rows(folder: Path) -> Rows:
    rows: Rows = {}
    for row in wandb_history(folder):
        if "step" in row:
            rows.setdefault(row["step"], []).append(row["train/grad_norm"])
    return rows


def exporter(run: Path, target: str) -> subprocess.Popen[bytes]:
    """`evenkeel export --follow` in a process of its own."""
    code = "from launch.cli import main; main()"
    arguments = [sys.executable, "-c", code, "export", str(run), "--to", target, "--follow"]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def kill_after(process: subprocess.Popen[bytes], reached: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """SIGKILL as soon as `reached`. Raises AssertionError when it is not reached in time."""
    ends = time.monotonic() + deadline_s
    try:
        while not reached():
            assert process.poll() is None, process.returncode
            assert time.monotonic() < ends
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
