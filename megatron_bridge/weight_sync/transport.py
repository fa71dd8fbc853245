"""Send buckets of weights from a learner rank to its engines: packing, an event-loop thread, and process groups.

In order: `WeightTransport` (also the base of IpcTransport), `pack`, `EventLoopThread`, `EngineGroup` and `connect`, and
`ProcessGroupTransport`, which joins them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megatron_bridge.hf.tensor_files import spec_of
from pipeline.data.membership import Member
from pipeline.errors import DeadlineExceededError, EngineUnavailableError, RetryableError
from pipeline.ports.weights import ProcessGroupSpec, TensorSpec

if TYPE_CHECKING:
    from rollout_sglang.weights.weight_update import FleetUpdateSession

BUCKET_DEADLINE_S = 60.0
"""Longest time for one bucket, after which an engine is taken to hang. The sender's other engines wait for it."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The time and outcome of one engine's load of one bucket."""

    seconds: float
    """Time from the request until the engine has loaded the bucket or failed."""
    wire_s: float = 0.0
    """Part of `seconds` until all bytes were sent; 0 for a transport that sends nothing."""
    failure: str | None = None


@dataclass(eq=False)
class WeightTransport(ABC):
    """A sender of buckets, one at a time. An engine that dies or hangs delays the others by at most its deadline."""

    _session: FleetUpdateSession
    _event_loop: EventLoopThread
    _device: torch.device
    _deadline_s: float
    """Time that one engine may take for all of this sender's buckets. Waits for the sender's other engines do not
    count; those for buckets of other pipeline stages do, because the engine takes one bucket at a time."""
    _left_s: dict[int, float] = field(init=False, default_factory=dict)
    """The rest of that deadline, by engine."""
    failures: dict[int, str] = field(init=False, default_factory=dict)
    """Engines that failed since `open`, with the reason; they get no more buckets."""
    sent_bytes: int = field(init=False, default=0)
    """Bytes loaded since `open`, over all engines."""
    transfer_s: float = field(init=False, default=0.0)
    """Time since `open` with a bucket under way."""
    wire_s: float = field(init=False, default=0.0)
    """Part of `transfer_s` until each bucket was sent to the slowest engine, the request included."""
    _bucket: Bucket | None = field(init=False, default=None)
    """The bucket under way, kept so that its memory is not freed before the transfer ends."""
    _under_way: dict[int, Future[Transfer]] = field(init=False, default_factory=dict)

    @property
    def engines(self) -> tuple[int, ...]:
        """Engines that have not failed since `open`."""
        return tuple(self._left_s)

    def open(self, engines: Sequence[Member], unreachable: Mapping[int, str]) -> None:
        """Begin a publish to those of `engines` that are reachable."""
        assert not self._under_way, "finish comes first"
        reachable = [engine for engine in engines if engine.index not in unreachable]
        self._left_s = {engine.index: self._deadline_s for engine in reachable}
        self.failures, self.sent_bytes = {}, 0
        self.transfer_s, self.wire_s = 0.0, 0.0

    @abstractmethod
    def new_buffer(self, num_bytes: int) -> Tensor:
        """Return uint8 [at least num_bytes] for the next bucket; the caller may write to it until it is sent."""

    def send(self, bucket: Bucket) -> None:
        """Begin to send a bucket of `new_buffer` to all engines that have not failed, after the bucket before."""
        self.finish()
        self._bucket = bucket
        self._under_way = self._begin(bucket)

    def finish(self) -> None:
        """Wait until each engine that has not failed has loaded the last bucket, or fails."""
        under_way, bucket, self._under_way, self._bucket = self._under_way, self._bucket, {}, None
        if not under_way:
            return
        assert bucket is not None
        wait(under_way.values())  # each transfer has its deadline
        transfers = {engine: transfer.result() for engine, transfer in under_way.items()}
        for engine, transfer in transfers.items():
            if transfer.failure is None:
                self._left_s[engine] -= transfer.seconds
                self.sent_bytes += bucket.data.nbytes
            else:
                self._fail(engine, transfer.failure)
        self.transfer_s += max(transfer.seconds for transfer in transfers.values())
        self.wire_s += max(transfer.wire_s for transfer in transfers.values())

    @abstractmethod
    def close(self) -> None:
        """Release everything kept between publishes."""

    @abstractmethod
    def _begin(self, bucket: Bucket) -> dict[int, Future[Transfer]]:
        """Start the bucket's transfer to each engine left, within BUCKET_DEADLINE_S and the rest of its deadline."""

    def _fail(self, engine: int, why: str) -> None:
        self.failures[engine] = why
        del self._left_s[engine]


@dataclass(frozen=True)
class Bucket:
    """Tensors sent in one transfer."""

    tensors: tuple[TensorSpec, ...]
    data: Tensor
    """uint8 [bytes]: the tensors' bytes in C order, one tensor after another."""


def pack(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, new_buffer: Callable[[int], Tensor]
) -> Iterator[Bucket]:
    """Pack the tensors, in order, into buckets of at most `bucket_bytes`; a larger tensor has a bucket to itself.
    `new_buffer` returns uint8 [at least its argument] for each bucket, possibly the same again for the next. A tensor's
    bytes are copied once, before the next tensor is requested, so an exporter may reuse its memory."""
    specs: list[TensorSpec] = []
    buffer, size = torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in named_tensors:
        source = tensor.detach().contiguous().flatten().view(torch.uint8)
        # The receiver views the bytes as tensors, so each must start at a multiple of its element size.
        if specs and (size + len(source) > bucket_bytes or size % tensor.itemsize):
            yield Bucket(tuple(specs), buffer[:size])
            specs, size = [], 0
        if not specs:
            buffer = new_buffer(max(bucket_bytes, len(source)))
        target = buffer[size : size + len(source)]
        if source.device.type == target.device.type == "cpu":
            # NumPy copies in this thread alone. torch would split the copy over its threads, which the engine's
            # loading, the hashing and the probe need.
            np.copyto(target.numpy(), source.numpy())
        else:
            target.copy_(source)
        specs.append(spec_of(name, tensor))
        size += len(source)
    if specs:
        yield Bucket(tuple(specs), buffer[:size])


CLOSE_DEADLINE_S = 10.0

T = TypeVar("T")


class EventLoopThread:
    """A daemon thread that runs coroutines on one event loop until `close` or the end of the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()

        def serve() -> None:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels tasks and closes the loop
                runner.run(self._ended.wait())

        self._thread = threading.Thread(target=serve, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; the future gets its result. Canceling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. The coroutine must have a deadline: there is none here."""
        return self.start(work).result()

    def close(self) -> None:
        """Cancel all coroutines and close the loop. Raises DeadlineExceededError if a coroutine does not end."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            raise DeadlineExceededError(
                f"the {self._thread.name} thread did not end in {CLOSE_DEADLINE_S:g} s; one of its calls blocks"
            )


ARRIVAL_DEADLINE_S = 60.0
"""Longest wait for an engine to join a group. An engine joins between two of its steps."""
_POLL_S = 0.001
_NEVER = timedelta(days=30)
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class EngineGroup:
    """A process group with one engine: this rank is rank 0, the engine's ranks are 1, 2, …"""

    def __init__(self, name: str, backend: Any) -> None:
        self.name = name
        self._backend = backend
        self._begun: Future[Any] | None = None
        """The last broadcast, once the backend has begun it."""

    def broadcast(self, data: Tensor, deadline_s: float) -> None:
        """Begin to send `data`, which must not change until `done` returns True. `done` raises the errors. The first
        broadcast over NCCL creates the communicator and waits there for the engine without a deadline. It therefore
        begins in its own thread, after the work already queued on the current stream."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=deadline_s)
        stream = torch.cuda.current_stream(data.device) if data.is_cuda else None

        begun = self._begun = Future[Any]()

        def begin() -> None:
            try:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    begun.set_result(self._backend.broadcast([data], options))
            except BaseException as error:  # noqa: BLE001 (raised by `done`)
                begun.set_exception(error)

        threading.Thread(target=begin, name=f"broadcast-{self.name}", daemon=True).start()

    def done(self) -> bool:
        """Return whether the last broadcast has ended. Raises EngineUnavailableError if it failed."""
        if self._begun is None or not self.idle:
            return False
        try:
            self._begun.result().wait()
        except RuntimeError as error:  # torch raises it for a broken or timed-out connection
            raise EngineUnavailableError(f"broadcast in group {self.name} broke: {_first_line(error)}") from None
        return True

    @property
    def idle(self) -> bool:
        """Whether no broadcast is under way. Dropping a busy gloo group would block until its broadcast ends."""
        begun = self._begun
        if begun is None:
            return True
        return begun.done() and (begun.exception() is not None or bool(begun.result().is_completed()))

    def abort(self) -> None:
        """Abort the broadcast under way. The group cannot be used again."""
        self._backend.abort()


def connect(
    url: str,
    ranks: int,
    device: torch.device,
    invite: Callable[[ProcessGroupSpec, float], Future[None]],
    deadline_s: float,
) -> EngineGroup:
    """Create a group with the `ranks` ranks of the engine at `url`; `invite` asks the engine to join. Names and ports
    are new each time, so an engine that was restarted or given up midway never meets an old group. Raises
    RetryableError if the engine does not join in time."""
    ends = time.monotonic() + min(deadline_s, ARRIVAL_DEADLINE_S)
    backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" else "gloo"
    name = f"evenkeel-{uuid.uuid4().hex[:12]}"
    # Listen only on this machine's address as the engine sees it: torch's own socket would listen on all addresses.
    parts = urlsplit(url)
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])  # sends nothing: a datagram socket only chooses its route
        address = str(probe.getsockname()[0])
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen()
    store = TCPStore(
        address,
        listener.getsockname()[1],
        1 + ranks,
        is_master=True,
        timeout=timedelta(seconds=max(0.1, ends - time.monotonic())),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    group_spec = ProcessGroupSpec(group=name, address=address, port=store.port, backend=backend)
    invited = invite(group_spec, max(0.1, ends - time.monotonic()))
    try:
        # Forming the group would wait out its deadline for an engine that refused; this loop ends at once.
        while not store.num_keys():
            if invited.done():
                invited.result()
            if time.monotonic() > ends:
                raise DeadlineExceededError("the engine did not join the process group in time; see its log")
            time.sleep(_POLL_S)
        # The prefixes of torch.distributed: the caller's, the group's, the device's.
        prefixed = PrefixStore(f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        group = EngineGroup(name, _backend(backend, prefixed, 1 + ranks, ends))
        invited.result(max(0.1, ends - time.monotonic()))
    except (RuntimeError, TimeoutError) as error:  # from torch and from the future
        raise EngineUnavailableError(f"no process group with the engine at {url}: {_first_line(error)}") from None
    finally:
        invited.cancel()
    return group


def _backend(name: str, store: Any, size: int, ends: float) -> Any:
    if name == "gloo":
        return dist.ProcessGroupGloo(store, 0, size, timedelta(seconds=max(0.1, ends - time.monotonic())))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER  # our deadlines apply
    return dist.ProcessGroupNCCL(store, 0, size, options)


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@dataclass(eq=False)
class ProcessGroupTransport(WeightTransport):
    """A transport with one process group per engine: an engine that dies or hangs breaks only its own group."""

    _groups: dict[int, EngineGroup] = field(init=False, default_factory=dict)
    _members: dict[int, Member] = field(init=False, default_factory=dict)
    _broken: list[EngineGroup] = field(init=False, default_factory=list)
    _kept: deque[Tensor] = field(init=False, default_factory=deque)
    """Buffers on the host, the least recently returned first."""

    def __post_init__(self) -> None:
        if self._device.type == "cuda":
            # By default torch ends the process when an NCCL group is late or broken. It reads the variable when it
            # creates a group: training's groups were created before, engines' groups are in threads from here on.
            os.environ[_ERROR_HANDLING] = "0"

    def new_buffer(self, num_bytes: int) -> Tensor:
        """Alternate between two buffers: one is packed while the other is sent. On a GPU, torch's caching allocator
        reuses the memory; on the host, fresh memory would cost as much as the copy into it."""
        if self._device.type == "cuda":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        kept = self._kept.popleft() if len(self._kept) == 2 else None
        if kept is None or len(kept) < num_bytes:
            kept = torch.empty(num_bytes, dtype=torch.uint8)
        self._kept.append(kept)
        return kept

    def close(self) -> None:
        for engine in list(self._groups):
            self._drop(engine)

    def open(self, engines: Sequence[Member], unreachable: Mapping[int, str]) -> None:
        """Form a group with every engine, or note it in `failures`. Drop groups with engines that left or restarted."""
        super().open(engines, unreachable)
        self._broken = [group for group in self._broken if not group.idle]
        members = {engine.index: engine for engine in engines if engine.index in self._left_s}
        for engine in [engine for engine in self._groups if self._members[engine] != members.get(engine)]:
            self._drop(engine)
        self._members = members
        if members:
            with ThreadPoolExecutor(len(members), "engine-group") as threads:
                list(threads.map(self._have_group, members))

    def _begin(self, bucket: Bucket) -> dict[int, Future[Transfer]]:
        under_way = {}
        for engine, group in self._groups.items():
            deadline_s, began = min(BUCKET_DEADLINE_S, self._left_s[engine]), time.monotonic()
            call = self._event_loop.start(self._session.receive(engine, group.name, bucket.tensors, deadline_s))
            group.broadcast(bucket.data, deadline_s)  # in this thread: on a GPU after its stream's copies
            under_way[engine] = self._event_loop.start(watch(group, call, began, deadline_s))
        return under_way

    def _have_group(self, engine: int) -> None:
        session = self._session

        def invite(group_spec: ProcessGroupSpec, deadline_s: float) -> Future[None]:
            return self._event_loop.start(session.join(engine, group_spec, deadline_s))

        try:
            group = self._groups.get(engine)
            if group is not None and not self._event_loop.run(session.is_member(engine, group.name)):
                self._drop(engine)  # the engine was restarted
            if engine not in self._groups:
                url, ranks = session.url(engine), session.ranks_per_engine
                self._groups[engine] = connect(url, ranks, self._device, invite, self._left_s[engine])
        except RetryableError as error:
            self._fail(engine, str(error))

    def _fail(self, engine: int, why: str) -> None:
        super()._fail(engine, why)
        self._kept.clear()  # an aborted broadcast may still read its buffer
        self._drop(engine)

    def _drop(self, engine: int) -> None:
        group = self._groups.pop(engine, None)
        if group is not None:
            group.abort()
            self._broken.append(group)
            self._event_loop.start(self._session.leave(engine, group.name))


async def watch(group: EngineGroup, call: Future[None], began: float, deadline_s: float) -> Transfer:
    """Wait for the end of a bucket's broadcast in `group` and of the engine's `call`; a failure of either ends both.
    `began` is a time.monotonic()."""
    failure, sent = None, began
    try:
        async with asyncio.timeout(deadline_s):
            while not group.done():
                if call.done():
                    call.result()
                await asyncio.sleep(_POLL_S)
            sent = time.monotonic()
            await asyncio.wrap_future(call)
    except RetryableError as error:
        failure = str(error)
    except TimeoutError:
        failure = "it did not load a bucket in time; the engine hangs or is overloaded"
    finally:
        call.cancel()
    return Transfer(seconds=time.monotonic() - began, wire_s=sent - began, failure=failure)
