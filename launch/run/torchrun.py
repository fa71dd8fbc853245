"""torchrun, whose store listens at one address: `python -m launch.run.torchrun …`, with torchrun's own arguments.

torch's stores listen on every address of a machine, and ask nobody who they are: whoever reaches the port may write
what the ranks will believe. torchrun's two rendezvous backends (`--standalone`, `static`) make theirs so. This adds a
third one, BACKEND: node 0's agent makes the one store that agents and ranks share, on a socket that it has bound.

    --rdzv-backend evenkeel --rdzv-conf rank=NODE,host=HOST,port=PORT,address=ADDRESS

Node 0 binds its ADDRESS, and a free port where PORT is 0; the others find it at HOST.
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
"""Longest wait for node 0's store, and of the store for what is asked of it."""


class BoundRendezvous(StaticTCPRendezvous):
    """All nodes are known from the start, and there is one round: Even Keel starts a learner again as a whole."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, port, rank = str(parameters.get("host")), int(parameters.get("port")), int(parameters.get("rank"))
        super().__init__(host, port, rank, parameters.max_nodes, parameters.run_id, JOIN_DEADLINE_S)
        self._address = str(parameters.get("address"))

    def get_backend(self) -> str:
        """Name the backend, as torchrun asks for it."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Have the store. Raises OSError on node 0 when its address or port cannot be bound."""
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
    """A store at that address alone; a free port for 0. Raises OSError when it cannot be bound."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
        bound = listener.getsockname()[1]
        own = listener.detach()
    return TCPStore(address, bound, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=own)


def main() -> None:
    """Run torchrun's own main, with the backend known to it."""
    from torch.distributed import run

    rendezvous_handler_registry.register(BACKEND, BoundRendezvous)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    arguments = sys.argv[1:]
    if "--shutdown-timeout" in run.get_args_parser().format_help():  # torch before 2.12 has none, and waits up to 30 s
        arguments = ["--shutdown-timeout", "1", *arguments]
    run.main(arguments)


if __name__ == "__main__":
    main()
