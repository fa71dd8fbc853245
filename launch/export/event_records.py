"""Records of TensorBoard's event files, the framing of TFRecord: length, its checksum, the data, their checksum.

    uint64 length | uint32 masked crc32c of it | data | uint32 masked crc32c of the data        (little-endian)

TensorBoard's own code computes crc32c in Python: to read back 2,000 steps took it 27 seconds, and to write them 12.
Source: tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import google_crc32c

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size


def record(data: bytes) -> bytes:
    """The data as a record."""
    length = _LENGTH.pack(len(data))
    return length + _masked(length) + data + _masked(data)


def records(file: bytes) -> Iterator[bytes]:
    """The data of the records of a file, up to the first that is torn or damaged: what TensorBoard shows of it."""
    place = 0
    while (length := file[place : place + _LENGTH.size]) and len(length) == _LENGTH.size:
        end = place + _HEADER_BYTES + _LENGTH.unpack(length)[0]
        data = file[place + _HEADER_BYTES : end]
        checksums = file[place + _LENGTH.size : place + _HEADER_BYTES], file[end : end + _CHECKSUM.size]
        if checksums != (_masked(length), _masked(data)):
            return
        yield data
        place = end + _CHECKSUM.size


def _masked(data: bytes) -> bytes:
    """A checksum that a checksum of it does not fall together with."""
    value = google_crc32c.value(data)
    return _CHECKSUM.pack(((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)
