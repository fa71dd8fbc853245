"""Reward functions that tests name in a recipe."""

from __future__ import annotations


def digit_share(prompt: str, response: str, answer: str) -> float:
    """Share of digits in the response: dense, so that even random weights give a gradient."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def low_prompts_are_easy(prompt: str, response: str, answer: str) -> float:
    """1 for whatever answers a prompt that begins with 0 to 4; for the others, 1 where the last character's code point
    is even, else 0: some prompts always succeed, the others as a coin falls."""
    return float(prompt[0] in "01234" or (len(response) > 0 and ord(response[-1]) % 2 == 0))


def fails_unless_right(response: str, answer: str) -> float:
    """1 for the answer; on anything else it raises, so a trial on the task's answers finds nothing wrong."""
    if response != answer:
        raise KeyError("score")
    return 1.0
