"""Run torchrun with a store that listens at one address: `python -m launch.run.torchrun …`, with torchrun's arguments.

torch's stores, which torchrun's `--standalone` and `static` use, listen at every address without authentication: anyone
who reaches the port can write values that the ranks trust. The rendezvous backend here, BACKEND, makes the one store of
agents and ranks on a socket that node 0's agent has bound.

    --rdzv-backend evenkeel --rdzv-conf rank=NODE,host=HOST,port=PORT,address=ADDRESS

Node 0 binds its ADDRESS, and a free port if PORT is 0; the other nodes find it at HOST.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from pipeline.child_process import PARENT_VARIABLE

BACKEND = "evenkeel"
JOIN_DEADLINE_S = 600
"""Longest wait for node 0's store, and for an answer of the store."""


class BoundRendezvous(StaticTCPRendezvous):
    """A single-round rendezvous of nodes known from the start, since Even Keel restarts a learner as a whole."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, port, rank = str(parameters.get("host")), int(parameters.get("port")), int(parameters.get("rank"))
        super().__init__(host, port, rank, parameters.max_nodes, parameters.run_id, JOIN_DEADLINE_S)
        self._address = str(parameters.get("address"))

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Make the store, or connect to it. Raises OSError on node 0 if its address or port cannot be bound."""
        if self._store is None:
            if self.rank == 0:
                self._store = listen(self._address, self.master_port, self.world_size, self.timeout)
                self.master_port = self._store.port
            else:
                self._store = TCPStore(
                    self.master_addr, self.master_port, self.world_size, is_master=False, timeout=self.timeout
                )
        store = PrefixStore(self.run_id, self._store)
        info = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(store, self.rank, self.world_size, info)


def listen(address: str, port: int, size: int, timeout: timedelta) -> TCPStore:
    """Return a store that listens at `address` alone; port 0 draws a free port. Raises OSError if binding fails."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
        bound = listener.getsockname()[1]
        own = listener.detach()
    return TCPStore(address, bound, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=own)


def main() -> None:
    from torch.distributed import run

    rendezvous_handler_registry.register(BACKEND, BoundRendezvous)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    arguments = sys.argv[1:]
    if "--shutdown-timeout" in run.get_args_parser().format_help():  # torch before 2.12 lacks it, and waits up to 30 s
        arguments = ["--shutdown-timeout", "1", *arguments]
    run.main(arguments)


if __name__ == "__main__":
    main()
