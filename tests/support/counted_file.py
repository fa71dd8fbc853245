"""A file that counts what is read of it."""

from __future__ import annotations

from io import BufferedReader


class CountedFile(BufferedReader):
    """Counts the bytes that it is asked for."""

    num_bytes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        CountedFile.num_bytes += len(data)
        return data
