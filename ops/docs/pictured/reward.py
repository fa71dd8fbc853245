"""The reward of the runs whose pages are pictured: it has parts, and fails on some samples."""

from __future__ import annotations


def sorted_digits(response: str, answer: str) -> dict[str, float]:
    """Whether the response is the answer, and two shares between 0 and 1.

    Raises ValueError on a long answer of large digits, as a verifier does that has a limit of its own.
    """
    if len(answer) > 7 and answer[0] > "1":
        raise ValueError("the answer has more than 7 digits, and neither 0 nor 1 is one of them")
    in_place = sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)
    length = min(len(response), len(answer)) / max(len(response), len(answer))
    exact = float(response == answer)
    return {
        "reward": 0.8 * exact + 0.1 * in_place + 0.1 * length,
        "exact": exact,
        "in_place": in_place,
        "length": length,
    }
