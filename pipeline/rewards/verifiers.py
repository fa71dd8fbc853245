"""What runs inside a verifier process: reward functions are found by name and called with three strings.

A reward function is `function(prompt, response, answer)` and returns a number, or (number, {part: number}) where the
parts explain it. This module is imported by every worker, so it stays light.
"""

from __future__ import annotations

import importlib
import json
import math
import signal
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from pipeline.child_process import die_with_parent

MATH_VERIFY_TIMEOUT_S = 5


class Judgment(NamedTuple):
    """What a worker sends back; plain values only. `failed` is a reason, with `detail` for the log."""

    reward: float
    parts: dict[str, float]
    failed: str | None = None
    detail: str = ""


@lru_cache(maxsize=4)
def resolve(reward: str) -> Callable[[str, str, str], Any]:
    """The function called `package.module:function`. Raises ImportError, AttributeError or ValueError."""
    module, colon, name = reward.partition(":")
    if not colon:
        raise ValueError(f"{reward!r} is not package.module:function")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise ValueError(f"{reward!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def serve(pipe: Connection, reward: str, parent: int) -> None:
    """Body of a worker: import the reward function, say so, then judge what comes until the pipe ends.

    Messages are JSON, not pickle: foreign code writes into this pipe and the run reads from it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are the run's business; Slurm signals every process
    # One that hangs would outlive a run that was killed, as it does where there is no Linux. The kernel watches the
    # thread that spawned this process, one of the pool's: `close` kills the workers before it ends the threads.
    die_with_parent(parent)
    try:
        resolve(reward)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an import runs foreign code; what it raised is the answer
        pipe.send_bytes(_encode(Judgment(0.0, {}, "raised", f"{type(error).__name__}: {error}")))
        return
    pipe.send_bytes(_encode(Judgment(0.0, {})))
    while True:
        try:
            texts = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(_encode(judge(reward, *texts)))


def encode_texts(prompt: str, response: str, answer: str) -> bytes:
    """The message for one sample."""
    return json.dumps([prompt, response, answer]).encode()


def decode_judgment(message: bytes) -> Judgment:
    """What a worker sent."""
    return Judgment(*json.loads(message))


def _encode(judgment: Judgment) -> bytes:
    return json.dumps(judgment).encode()


def judge(reward: str, prompt: str, response: str, answer: str) -> Judgment:
    """Call the reward function; whatever it does short of killing the process becomes a Judgment."""
    try:
        return _as_judgment(resolve(reward)(prompt, response, answer))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: its failure costs its own sample only
        return Judgment(0.0, {}, "raised", f"{type(error).__name__}: {error}")


def _as_judgment(result: Any) -> Judgment:
    value, parts = result if isinstance(result, tuple) else (result, {})
    try:
        reward = float(value)
        numbers = {str(name): float(part) for name, part in parts.items()}
    except (TypeError, ValueError, AttributeError):
        return Judgment(0.0, {}, "bad_result", f"returned {result!r:.200}, expected a number or (number, parts)")
    if not all(math.isfinite(number) for number in (reward, *numbers.values())):
        return Judgment(0.0, {}, "non_finite", f"returned {result!r:.200}")
    return Judgment(reward, numbers)


def math_verify(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1 if the response's last answer equals `answer` as mathematics, else 0 (the `math-verify` package).

    `answer` is LaTeX, with or without `$` or `\\boxed`, or a plain number, expression or choice. The package's
    own limits use SIGALRM, which works because a worker runs verifiers in its main thread; the worker's deadline stands
    behind them.
    """
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    if not gold:
        raise ValueError(f"answer {answer!r} is not mathematics that math-verify can parse")
    found = parse(response, parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    return float(verify(gold, found, timeout_seconds=MATH_VERIFY_TIMEOUT_S))


def exact_match(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001
    """1 if the response, without its end-of-sequence token, is the answer and nothing else; otherwise 0."""
    return float(response == answer)
