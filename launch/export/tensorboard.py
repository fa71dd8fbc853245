"""Write TensorBoard's event files.

    FOLDER/events.out.tfevents.1700000000000000000.evenkeel     one file for each start of the exporter

A point is one record with checksums, framed as TFRecord (tensorflow/core/lib/io/record_writer.h), little-endian:

    uint64 length | uint32 masked crc32c of it | data | uint32 masked crc32c of the data

TensorBoard's writer computes crc32c in Python: 2,000 steps took it 12 seconds.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

if TYPE_CHECKING:
    from launch.export.export import Point

_NAMED = "events.out.tfevents.*.evenkeel"


class TensorBoardFiles:
    """The event files of one run in an existing folder, from one exporter at a time."""

    def __init__(self, folder: Path) -> None:
        self.hint = f"look at it with: tensorboard --logdir {folder}"
        self._folder = folder
        self._file: BinaryIO | None = None

    def clear(self) -> None:
        self.close()
        for path in self._folder.glob(_NAMED):
            path.unlink()
        self._file = (self._folder / _NAMED.replace("*", str(time.time_ns()))).open("xb")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # A TensorBoard that has read the removed files forgets them.
        self._write(Event(wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))

    def write(self, point: Point) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
        self._write(Event(wall_time=point.time, step=point.key.number, summary=Summary(value=values)))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: Event) -> None:
        assert self._file is not None, "clear comes first"
        data = event.SerializeToString()
        for part in (struct.pack("<Q", len(data)), data):
            value = google_crc32c.value(part)
            masked = ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
            self._file.write(part + struct.pack("<I", masked))
