"""Why a process ended, for a one-line message: by which signal, and what its log says first and last about it."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path

from pipeline.child_process import log_text

_AT = r"^(?:\[[^\]]*\]:?\s*)*"
"""What logs put before a line: a rank, a time."""
_ERROR = re.compile(
    _AT + r"(?:error: |ERROR: |[\w ./-]+: error: |Fatal Python error: |[\w.]*(?:Error|Exception|Interrupt)(?:: |$))"
)
"""A line on which Python, argparse, uvicorn or this program says what went wrong."""
_ROOT_CAUSE = "Root Cause (first observed failure)"
_RANK_KILLED = re.compile(r"rank\s*:\s*(\d+).*?Signal (\d+) \(\w+\) received by PID \d+", re.DOTALL)
_LACKS_PART = re.compile(r"AttributeError: module 'sglang[\w.]*' has no attribute")
"""What SGLang logs of a part that could not be imported. Why it could not is said later."""
_PLACE = re.compile(_AT)


def ending(status: int) -> str:
    """How a process ended whose exit status is `status`; minus the signal, or 128 and the signal as shells say it."""
    number = -status if status < 0 else status - 128
    with suppress(ValueError):
        if number > 0:
            return f"killed by signal {number} ({signal.Signals(number).name})"
    return f"ended with status {status}"


def first_error(text: str) -> str | None:
    """The first line of a log that says what went wrong: those after it are often its consequences."""
    for line in text.splitlines():
        if _is_error(line) and not _LACKS_PART.search(line):
            return _PLACE.sub("", line).strip()
    return None


def _is_error(line: str) -> bool:
    """Whether a line says what went wrong. torchrun ends a log with a long account of its own, in which its exception
    comes last and says nothing."""
    return _ERROR.match(line) is not None and "ChildFailedError" not in line


def last_lines(text: str, lines: int) -> str:
    """The last lines that are not empty, on one line."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(said[-lines:])


def last_error(text: str, lines: int = 8) -> str:
    """The last line of a log that says what went wrong, or else its last lines. Where torchrun names a rank that was
    killed, that."""
    if (killed := _RANK_KILLED.search(text.partition(_ROOT_CAUSE)[2])) is not None:
        return f"rank {killed[1]} was {ending(-int(killed[2]))}"
    said = [line.strip() for line in text.splitlines() if _is_error(line.strip())]
    return said[-1] if said else last_lines(text, lines)


def log_tail(log: Path, lines: int = 8) -> str:
    """`last_error` of a file."""
    try:
        return last_error(log_text(log), lines)
    except OSError:
        return "(no log)"
