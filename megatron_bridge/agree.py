"""Work that only rank 0 does, with an outcome that all ranks share: a failure there is raised on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

import pipeline.errors as errors

T = TypeVar("T")


class RankZero:
    """Runs actions on rank 0 while the others wait, at most `deadline_s` for each. Construction is collective."""

    def __init__(self, deadline_s: float) -> None:
        # gloo even beside NCCL: waiting ranks sleep instead of spinning on the GPU, under a deadline of their own.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        self.here = dist.get_rank() == 0

    def run(self, action: Callable[[], T]) -> T | None:
        """The action's result on rank 0, None elsewhere. Raises what it raised there: on other ranks an error of the
        same class of pipeline.errors, or RuntimeError for a class that is not ours."""
        failure: BaseException | None = None
        result: T | None = None
        if self.here:
            try:
                result = action()
            except Exception as error:  # noqa: BLE001 (raised below, after the other ranks know)
                failure = error
        self._share(failure)
        return result

    def _share(self, failure: BaseException | None) -> None:
        report = json.dumps([type(failure).__name__, str(failure)]).encode() if failure else b""
        size = torch.tensor([len(report)])
        dist.broadcast(size, src=0, group=self._group)
        if not size.item():
            return
        payload = (
            torch.frombuffer(bytearray(report), dtype=torch.uint8)
            if self.here
            else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(payload, src=0, group=self._group)
        if failure is not None:
            raise failure
        name, message = json.loads(bytes(payload.tolist()))
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.EvenKeelError):
            raise kind(message)
        raise RuntimeError(f"rank 0 failed with {name}: {message}; its log has the traceback")
