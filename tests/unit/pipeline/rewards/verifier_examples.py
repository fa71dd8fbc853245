"""Reward functions that behave well, and badly. Workers import this file by name."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time


def length(prompt: str, response: str, answer: str) -> float:
    return float(len(response) == len(answer))


def behave(prompt: str, response: str, answer: str) -> object:
    """Do what the response says."""
    match response:
        case "hang":
            time.sleep(3600)
        case "hang in C":
            ctypes.CDLL(None).sleep(3600)
        case "hang, deaf to SIGTERM":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        case "exit":
            os._exit(3)
        case "exit 0":
            os._exit(0)
        case "segfault":
            ctypes.string_at(0)
        case "sys.exit":
            sys.exit(4)
        case "raise":
            raise ZeroDivisionError("by zero")
        case "unpicklable":
            raise type("Local", (Exception,), {})(lambda: None)
        case "nan":
            return float("nan")
        case "inf in float32":
            return 1e39
        case "inf in float32, a part":
            return 1.0, {"a": -1e39}
        case "a part for a terminal":
            return 1.0, {"\x1b[2J": 1.0}
        case "nan part":
            return 1.0, {"format": float("inf")}
        case "none":
            return None
        case "parts":
            return 0.5, {"format": 1, "answer": 0.0}
        case "true":
            return True
        case "pid":
            return float(os.getpid())
        case "modules":
            return 1.0, {name: float(name in sys.modules) for name in ("torch", "sglang", "httpx")}
    return 1.0


def echo(prompt: str, response: str, answer: str) -> tuple[float, dict[str, float]]:
    return float(prompt == response == answer), {"characters": float(len(response))}


def variables(prompt: str, response: str, answer: str) -> tuple[float, dict[str, float]]:
    """Which variables of the run this process has."""
    return 1.0, {name: 1.0 for name in os.environ if name == "PATH" or name.startswith("EVENKEEL")}


_hoard: list[bytearray] = []


def hoard(prompt: str, response: str, answer: str) -> float:
    """Take so many MiB, and keep them."""
    _hoard.append(bytearray(int(response) * 2**20))
    return 1.0


not_a_function = 3
