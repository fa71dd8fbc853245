"""Small JSON values that ranks exchange beside tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import pipeline.errors as errors

T = TypeVar("T")


def all_gather_json(value: Any, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> list[Any]:
    """The values of all ranks of a group, in rank order, the same on every rank. Collective.

    Values are JSON, of which nothing is unpickled. Saving and loading of checkpoints by torch and Megatron-Core do
    exchange pickles between ranks (all_gather_object), so the ports of ranks belong to a private network
    (docs/cluster.md). `device` must be one whose tensors the group's backend can send.
    """
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=group)
    longest = int(max(size.item() for size in sizes))
    texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(texts, torch.cat([mine, mine.new_zeros(longest - len(mine))]), group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]


class RankSync:
    """Exchanges small values between all ranks. Construction and every method are collective."""

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s` bounds the wait for the slowest rank, each time."""
        # gloo even beside NCCL: waiting ranks sleep instead of spinning on the GPU, under a deadline of their own.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        self.rank = dist.get_rank()

    def all_gather_json(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in rank order, the same on every rank."""
        return all_gather_json(value, self._group)

    def all_gather_result(self, action: Callable[[], T]) -> list[T]:
        """Every rank's result (JSON values) of its own action. When one fails, all raise the first failure: an error of
        the same class of pipeline.errors, or RuntimeError for a class that is not ours."""
        result: T | None = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 (raised below, after the other ranks know)
            failure = error
        results = self.all_gather_json(
            {"failure": [type(failure).__name__, str(failure)] if failure else None, "result": result}
        )
        if failure is not None:
            raise failure
        for rank, value in enumerate(results):
            if value["failure"]:
                raise _rebuilt(rank, *value["failure"])
        return [value["result"] for value in results]


class RankZero:
    """Runs actions on rank 0 while the others wait, at most `deadline_s` for each. Construction is collective."""

    def __init__(self, deadline_s: float) -> None:
        self._rank_sync = RankSync(deadline_s)
        self.is_rank_zero = self._rank_sync.rank == 0

    def run(self, action: Callable[[], T]) -> T | None:
        """The action's result on rank 0, None elsewhere. Every rank raises what rank 0 raised."""
        result: T | None = None

        def act() -> None:
            nonlocal result
            if self.is_rank_zero:
                result = action()

        self._rank_sync.all_gather_result(act)
        return result

    def tell(self, action: Callable[[], T]) -> T:
        """The action's result (a JSON value) on every rank. Every rank raises what rank 0 raised."""
        results = self._rank_sync.all_gather_result(lambda: action() if self.is_rank_zero else None)
        return results[0]  # type: ignore[return-value]

    def gather(self, action: Callable[[], T]) -> list[T]:
        """Every rank's result (a JSON value), on every rank. When one fails, all raise that error."""
        return self._rank_sync.all_gather_result(action)

    def everywhere(self, action: Callable[[], None]) -> None:
        """Run the action on every rank. When it fails on one, all raise that error."""
        self._rank_sync.all_gather_result(action)


def _rebuilt(rank: int, name: str, message: str) -> Exception:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.EvenKeelError):
        return kind(message)
    return RuntimeError(f"rank {rank} failed with {name}: {message}; its log has the traceback")


@contextmanager
def exhausted(stream: Iterator[Any]) -> Iterator[None]:
    """Around what reads a stream: whatever happens to it, this rank takes part in all gathers, as the others do."""
    try:
        yield
    finally:
        for _ in stream:
            pass


@contextmanager
def taking(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Around what takes gathered `tensors` to publish them: they are exhausted at the end, whatever happens. Raises
    NonFiniteError for weights that are not finite."""
    with exhausted(tensors):
        try:
            yield
        except FloatingPointError as error:
            raise errors.NonFiniteError(f"weights cannot be published: {error}") from error
