"""Streams of tensors that ranks gather together, each tensor when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exhausted(stream: Iterator[Any]) -> Iterator[None]:
    """Around what reads a stream: whatever happens to it, this rank takes part in all gathers, as the others do."""
    try:
        yield
    finally:
        for _ in stream:
            pass
