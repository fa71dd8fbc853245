"""Reward functions that tests name in a recipe."""

from __future__ import annotations


def digit_share(prompt: str, response: str, answer: str) -> float:
    """Share of digits in the response: dense, so that even random weights give a gradient."""
    return sum(c.isdigit() for c in response) / max(1, len(response))
