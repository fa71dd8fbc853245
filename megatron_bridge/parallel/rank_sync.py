"""Exchange small JSON values between ranks, and errors with them."""

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

# torch 2.13's names; 2.11 has only the older ones, for which 2.13 warns.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather_json(value: Any, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> list[Any]:
    """Gather the values of all ranks of a group, in rank order, on every rank. Collective. Values are JSON, so nothing
    is unpickled; torch and Megatron-Core do exchange pickles for checkpoints (all_gather_object), so the ranks' ports
    belong in a private network (docs/cluster.md). `device` must suit the group's backend."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    num_ranks = dist.get_world_size(group)
    sizes = torch.zeros(num_ranks, 1, dtype=torch.int64, device=device)
    dist.all_gather(list(sizes), torch.tensor([len(mine)], device=device), group=group)
    longest = int(sizes.max())
    texts = torch.zeros(num_ranks, longest, dtype=torch.uint8, device=device)
    dist.all_gather(list(texts), torch.cat([mine, mine.new_zeros(longest - len(mine))]), group=group)
    return [json.loads(bytes(text[:size].tolist())) for text, size in zip(texts, sizes.flatten().tolist(), strict=True)]


class RankSync:
    """An exchange of small values between all ranks. Construction and every method are collective."""

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s` limits each wait for the slowest rank."""
        # gloo even beside NCCL: waiting ranks sleep instead of spinning on the GPU, under a separate deadline.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.is_rank_zero = self.rank == 0

    def gather(self, action: Callable[[], T]) -> list[T]:
        """Run an action on every rank; return all results (JSON values), in rank order, on every rank. After a failure
        all ranks raise the first: an error of the same class of pipeline.errors, or RuntimeError for other classes."""
        result: T | None = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 (raised below, after the other ranks know)
            failure = error
        told = [type(failure).__name__, str(failure)] if failure else None
        results = all_gather_json({"failure": told, "result": result}, self._group)
        if failure is not None:
            raise failure
        found: list[T] = []
        for rank, value in enumerate(results):
            if value["failure"]:
                name, message = value["failure"]
                kind = getattr(errors, name, None)
                if isinstance(kind, type) and issubclass(kind, errors.EvenKeelError):
                    raise kind(message)
                raise RuntimeError(f"rank {rank} failed with {name}: {message}; its log has the traceback")
            found.append(value["result"])
        return found

    def tell(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0; return its result (a JSON value) or raise its error on every rank."""
        return self.gather(action if self.is_rank_zero else lambda: None)[0]  # type: ignore[return-value]


@contextmanager
def taking(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Exhaust gathered `tensors` also after an error, because every rank takes part in all gathers. Raises
    NonFiniteError for weights that are not finite."""
    try:
        yield
    except FloatingPointError as error:
        raise errors.NonFiniteError(f"weights cannot be published: {error}") from error
    finally:
        for _ in tensors:
            pass
