"""TensorBoard's event files.

    FOLDER/events.out.tfevents.1700000000000000000.evenkeel     one file a start of the exporter

A point is one record, which carries checksums: readers pass over the torn one that a kill may leave at the end of a
file. Its wall time is the point's own, so the files say themselves which training of a step they hold.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from launch.export.destination import Destination
from launch.export.event_records import record, records
from launch.export.points import STEP, VERSION, Key, Point
from pipeline.data.files import fsync_directory

_NAMED = "events.out.tfevents.*.evenkeel"
_FORMAT = "brain.Event:2"


class TensorBoardFiles(Destination):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file: BinaryIO | None = None

    def held(self) -> Mapping[Key, float]:
        return {
            Key(VERSION if event.summary.value[0].tag.startswith("evaluation/") else STEP, event.step): event.wall_time
            for path in self._files()
            for event in map(Event.FromString, records(path.read_bytes()))
            if event.summary.value
        }

    def clear(self) -> None:
        self.close()
        for path in self._files():
            path.unlink()
        forget = Event(
            wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)
        )  # of TensorBoards at work
        self._write(forget)

    def write(self, point: Point) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
        self._write(Event(wall_time=point.time, step=point.key.number, summary=Summary(value=values)))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def said(self) -> str:
        return f"look at it with: tensorboard --logdir {self._folder}"

    def close(self) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(_NAMED))

    def _write(self, event: Event) -> None:
        if self._file is None:
            self._file = (self._folder / _NAMED.replace("*", str(time.time_ns()))).open("xb")
            fsync_directory(self._folder)
            self._write(Event(wall_time=time.time(), file_version=_FORMAT))
        self._file.write(record(event.SerializeToString()))
