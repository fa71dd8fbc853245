"""Flat values of responses, one response after the other, and where each begins."""

from __future__ import annotations

from precision.torch_on_use import Tensor, torch


def rows(offsets: Tensor) -> Tensor:
    """int64 [offsets[-1]] the response that each value belongs to; `offsets` is int64 [responses + 1], from 0."""
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)


def positions(offsets: Tensor) -> Tensor:
    """int64 [offsets[-1]] the place of each value in its response, from 0."""
    return torch.arange(int(offsets[-1]), device=offsets.device) - torch.repeat_interleave(offsets[:-1], offsets.diff())
