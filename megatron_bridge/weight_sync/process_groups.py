"""A process group between this rank and one engine, outside torch's registry of groups.

The group is made the way `torch.distributed` makes one inside an engine (same store prefixes: those of
torch 2.13), but directly from the backend's class: `torch.distributed` never hears of it here, so it can
neither disturb Megatron's groups nor stay behind when its engine dies.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pipeline.errors import DeadlineExceededError, EngineUnavailableError
from pipeline.ports.weights import ProcessGroupSpec

ARRIVAL_DEADLINE_S = 60.0
"""Longest wait for an engine to join a group. An engine joins between two of its steps."""
_POLL_S = 0.001
_NEVER = timedelta(days=30)
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ENVIRONMENT_LOCK = threading.Lock()


class EngineGroup:
    """This rank is rank 0; the engine's ranks are 1, 2, …"""

    def __init__(self, name: str, backend: Any) -> None:
        self.name = name
        self._backend = backend
        self._begun: Future[Any] | None = None
        """The last broadcast, once the backend has begun it."""

    def broadcast(self, data: Tensor, deadline_s: float) -> None:
        """Begin to send `data`, which must not change until `done` is true. What fails here is raised by `done`.

        The first broadcast over NCCL makes the communicator, and there waits for the engine without any deadline. So it
        begins in a thread of its own, after what the present stream has been given to do.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=deadline_s)
        stream = torch.cuda.current_stream(data.device) if data.is_cuda else None

        def begin() -> Any:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                return self._backend.broadcast([data], options)

        self._begun = _in_abandonable_thread(begin, f"broadcast-{self.name}")

    def done(self) -> bool:
        """Whether the last broadcast has ended. Raises EngineUnavailableError when it failed."""
        if self._begun is None or not self.idle:
            return False
        try:
            self._begun.result().wait()
        except RuntimeError as error:  # what torch raises for a connection that broke or timed out
            raise EngineUnavailableError(f"broadcast in group {self.name} broke: {_first_line(error)}") from None
        return True

    @property
    def idle(self) -> bool:
        """Nothing is under way. A gloo group dropped before that waits for it, and the interpreter with it."""
        begun = self._begun
        if begun is None:
            return True
        return begun.done() and (begun.exception() is not None or bool(begun.result().is_completed()))

    def abort(self) -> None:
        """Give up what is under way. The group cannot be used again."""
        self._backend.abort()


def connect(
    url: str,
    ranks: int,
    device: torch.device,
    invite: Callable[[ProcessGroupSpec, float], Future[None]],
    deadline_s: float,
) -> EngineGroup:
    """A fresh group with the `ranks` ranks of the engine at `url`; `invite` asks the engine to join.

    Fresh names and ports: an engine that was restarted, or given up half-way, never meets an old group.
    Raises RetryableError when the engine does not join in time.
    """
    ends = time.monotonic() + min(deadline_s, ARRIVAL_DEADLINE_S)
    backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" else "gloo"
    name = f"evenkeel-{uuid.uuid4().hex[:12]}"
    address = _address_towards(url)
    store = _listen(address, 1 + ranks, ends)
    group_spec = ProcessGroupSpec(group=name, address=address, port=store.port, backend=backend)
    invited = invite(group_spec, max(0.1, ends - time.monotonic()))
    try:
        _await_arrival(store, invited, ends)
        # The prefixes of torch.distributed: the caller's, the group's, the device's.
        prefixed = PrefixStore(f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        group = EngineGroup(name, _backend(backend, prefixed, 1 + ranks, ends))
        invited.result(max(0.1, ends - time.monotonic()))
    except (RuntimeError, TimeoutError) as error:  # torch's and the future's
        raise EngineUnavailableError(f"no process group with the engine at {url}: {_first_line(error)}") from None
    finally:
        invited.cancel()
    return group


def _backend(name: str, store: Any, size: int, ends: float) -> Any:
    if name == "gloo":
        return dist.ProcessGroupGloo(store, 0, size, timedelta(seconds=max(0.1, ends - time.monotonic())))
    options = dist.ProcessGroupNCCL.Options()
    # Deadlines are ours: torch's own answer to a late or broken NCCL group is to end the process.
    options._timeout = _NEVER
    with _environment(_ERROR_HANDLING, "0"):
        return dist.ProcessGroupNCCL(store, 0, size, options)


def _in_abandonable_thread(action: Callable[[], Any], name: str) -> Future[Any]:
    """What the action returns or raises, if it ever does: the process can end before."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001 (raised by who asks for the result)
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _listen(address: str, size: int, ends: float) -> Any:
    """A store on a free port of that address alone (torch's own socket would listen on every address)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen()
    port = listener.getsockname()[1]
    wait = timedelta(seconds=max(0.1, ends - time.monotonic()))
    return TCPStore(
        address, port, size, is_master=True, timeout=wait, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _await_arrival(store: Any, invited: Future[None], ends: float) -> None:
    """Wait until the engine writes to the store. Forming the group would wait out its whole deadline for an engine that
    refused or died; here a refusal ends the wait at once."""
    while not store.num_keys():
        if invited.done():
            invited.result()
        if time.monotonic() > ends:
            raise DeadlineExceededError("the engine did not join the process group in time; see its log")
        time.sleep(_POLL_S)


def _address_towards(url: str) -> str:
    """This machine's address as the engine sees it: the source address of packets to it."""
    parts = urlsplit(url)
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])  # sends nothing: a datagram socket only chooses its route
        return str(probe.getsockname()[0])


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """For one thread at a time: groups with several engines are made at once, and all threads have one environment."""
    with _ENVIRONMENT_LOCK:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
