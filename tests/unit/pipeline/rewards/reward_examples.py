"""Reward functions as people write them, right and wrong. `answer` is "yes" or "no" and stands in the response too."""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import Any


def by_keyword(*, answer: str, response: str) -> float:
    return float(_right(answer, response))


def of_metadata(response: str, metadata: dict[str, Any]) -> float:
    return float(response == metadata["levels"][0])


def _right(answer: str, response: str) -> bool:
    if answer not in ("yes", "no"):
        raise ValueError(f"{answer!r} is no answer of the task")
    return response == answer


def gives_a_dict(response: str) -> Any:
    return {"score": 1.0}


def gives_none(response: str) -> Any:
    return None


def gives_nan(response: str) -> float:
    return math.nan


def says_that_it_failed(response: str) -> dict[str, float]:
    return {"reward": 1.0, "verifier_failed": 0.0}


def sums_its_parts(response: str) -> Any:
    """0.9999999999999999 where everything is right."""
    return 0.7 + 0.2 + 0.1, {"sum": 0.7 + 0.2 + 0.1}


def raises(response: str) -> float:
    raise KeyError("score")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """As people write it for verl."""
    assert data_source == ""
    return {"score": float(solution_str == ground_truth), "pred": solution_str}


def of_many_parts(response: str) -> Any:
    return 1.0, {f"part {n}": 1.0 for n in range(int(response))}


_calls: list[str] = []


def fails_at_every_tenth_call(response: str) -> float:
    _calls.append(response)
    if len(_calls) % 10 == 1:
        raise RuntimeError("503")
    return 1.0


async def async_raises(response: str) -> float:
    raise KeyError("score")


def wants_four(prompt: str, response: str, answer: str, extra: str) -> float:
    return 1.0


def of_info(response: str, info: dict[str, Any]) -> dict[str, float]:
    assert info["group"][info["index"]] == response
    return {"reward": info["response_tokens"], "siblings": len(info["group"]), "cut": info["finish"] == "length"}


def batched(responses: list[str], answers: list[str], metadata: list[dict[str, Any]]) -> list[Any]:
    assert len(responses) == len(answers) == len(metadata)
    return [(float(len(text)), {"rank": rank}) for rank, text in enumerate(responses)]


def batched_of_info(responses: list[str], info: list[dict[str, Any]]) -> list[float]:
    assert all(
        one["group"] == responses and responses[one["index"]] == text for one, text in zip(info, responses, strict=True)
    )
    return [float(one["response_tokens"]) for one in info]


def one_too_few(responses: list[str]) -> list[float]:
    return [0.0] * (len(responses) - 1)


async def dies_or_blocks(response: str) -> float:
    await asyncio.sleep(0)
    if response == "die":
        os._exit(1)
    if response == "block":
        time.sleep(60.0)
    return 1.0


_at_once: list[int] = []


async def together(response: str) -> dict[str, float]:
    """Says how many are under way."""
    _at_once.append(1)
    await asyncio.sleep(float(response))
    most = len(_at_once)
    await asyncio.sleep(0.05)
    _at_once.pop()
    return {"reward": 1.0, "at_once": most}
