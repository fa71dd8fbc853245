"""A plain copy of bytes to another process over TCP on this machine: what a weight channel is measured against.

4 MiB at a time, no checksum, no framing but the number of bytes, nothing done with what arrives.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from types import TracebackType

from tests.support.runs import ROOT

PIECE_BYTES = 4 << 20
DEADLINE_S = 60.0


class Loopback:
    """A receiving process and a connection to it, as a context manager."""

    def __enter__(self) -> Loopback:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(DEADLINE_S)
            command = [sys.executable, "-m", "tests.bench.loopback", str(listener.getsockname()[1])]
            self._receiver = subprocess.Popen(command, cwd=ROOT)
            self._connection, _ = listener.accept()
        self._connection.settimeout(DEADLINE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._receiver.wait(DEADLINE_S)

    def copy(self, data: bytearray) -> float:
        """Seconds until the other process has all of `data`."""
        began = time.monotonic()
        self._connection.sendall(len(data).to_bytes(8, "little"))
        pieces = memoryview(data)
        for first in range(0, len(data), PIECE_BYTES):
            self._connection.sendall(pieces[first : first + PIECE_BYTES])
        assert self._connection.recv(1) == b"."
        return time.monotonic() - began


def receive(port: int) -> None:
    """Take what comes into one buffer, which stays, until the sender leaves."""
    buffer = bytearray()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while header := connection.recv(8, socket.MSG_WAITALL):
            size = int.from_bytes(header, "little")
            if len(buffer) < size:
                buffer = bytearray(size)
            view, first = memoryview(buffer)[:size], 0
            while first < size:
                taken = connection.recv_into(view[first : first + PIECE_BYTES])
                if taken == 0:
                    raise SystemExit("error: the sender left in the middle of a copy")
                first += taken
            connection.sendall(b".")


if __name__ == "__main__":
    receive(int(sys.argv[1]))
