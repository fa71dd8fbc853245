"""Check whether the Python program in a response passes the tests in the answer (`python_tests`).

The answer is a JSON list of tests of two kinds:

    {"input": "3 4\\n", "output": "7\\n"}            the program reads standard input and prints
    {"call": "add(3, 4)", "value": 7}              the expression, evaluated after the program, has this JSON value

Programs are judged as by contest judges: a program that crashes fails, whatever it printed; output is compared token by
token; a call may name a method of the program's `class Solution`, as at LeetCode; names of typing are defined.

Each test runs in a fresh, confined process that knows neither the expected output nor the value. The process prints its
result and the worker compares. So a program cannot pass by ending early, redefining `==` or looking up the answer.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from pipeline.rewards.children import Children, prepare_child
from pipeline.rewards.messages import Judgment, decode_texts, failure
from pipeline.rewards.sandbox.confine import WATCH_EVERY_S, Confinement, OverLimitError

MAX_OUTPUT_BYTES = 2**20
TOLERANCE = 1e-6
"""Tolerance for printed numbers with a fraction, as at Codeforces and AtCoder."""
_PYTHON = re.compile(r"\W*py(?:thon)?[\d.]*\b", re.IGNORECASE)
_NAMES = """\
from typing import *
from math import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from builtins import *
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
"""
"""What judges give a program, so that it may write `List[int]` without an import, and LeetCode's nodes."""
_STARTER = (
    _NAMES
    + """\
with open("program.py", "rb") as file:
    exec(compile(file.read(), "program.py", "exec"), globals())
"""
)
_CALLER = (
    f"NAMES = {_NAMES!r}\n"
    + """\
import json, sys, types
module = sys.modules["program"] = types.ModuleType("program")
program = module.__dict__
exec(NAMES, program)
given = dict(program)
with open("program.py", "rb") as file:
    exec(compile(file.read(), "program.py", "exec"), program)
calls = dict(program)  # the program itself goes on with the names that it knows: Solution.gcd may call gcd
def method(name):
    return lambda *values, **named: getattr(program["Solution"](), name)(*values, **named)
for name in dir(program.get("Solution", object)):
    if not name.startswith("_") and program.get(name) is given.get(name):
        calls[name] = method(name)
print("\\n" + json.dumps(eval(CALL, calls)))
"""
)
_NUMBER = re.compile(r"[+-]?(?=[\d.]*\d)\d*\.?\d*(?:[eE][+-]?\d+)?", re.ASCII)
_LONGEST_INTEGER = 4000
"""Digits of the longest integer that is read as a number: reading is quadratic, and Python refuses 4,300."""


class _LongInteger(str):
    """An integer as its JSON digits, which decide equality."""


@dataclass(frozen=True, kw_only=True)
class ProgramTest:
    """A program's input and the expected result. `call` is None where the program reads standard input."""

    given: str
    expected: Any
    call: str | None = None


def program_in(response: str) -> str:
    """Return the last fenced block marked as Python, else the last block without a mark, else the whole response.
    Blocks of other languages show output, or how to call the program."""
    blocks = [(said.strip(), code) for said, code in blocks_in(response.replace("\r\n", "\n")) if code.strip()]
    python = [code for said, code in blocks if _PYTHON.match(said)]
    found = python or [code for said, code in blocks if not said]
    return dedent(found[-1]) if found else response  # a block in a list is indented


def blocks_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield the mark and the code of each fenced block. A fence is the first run of three backticks or more in a line
    without later backticks. The block ends before a run as long at the end of a line, or with the text. Each line is
    read once; a regular expression takes quadratic time on a run of backticks."""
    fence, said = 0, ""
    code: list[str] = []
    for line in text.split("\n"):
        if not fence:
            run = line[line.find("```") :] if "```" in line else ""
            said = run.lstrip("`")
            fence, code = (0 if "`" in said else len(run) - len(said)), []
            continue
        ended = line.rstrip(" \t")
        before = ended.rstrip("`")
        if len(ended) - len(before) < fence:
            code.append(line)
            continue
        yield said, "\n".join([*code, before])
        fence = 0
    if fence:
        yield said, "\n".join(code)


def parse_tests(answer: str) -> list[ProgramTest]:
    """Return the tests in an answer. Raises ValueError for an answer that is not a list of tests."""
    try:
        listed = json.loads(answer, parse_int=_integer)
    except (ValueError, RecursionError):
        raise ValueError(f"answer {answer[:80]!r} is not JSON, expected a list of tests") from None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"answer {answer[:80]!r} is not a list of one test or more")
    tests = []
    for entry in listed:
        match entry:
            case {"input": str(given), "output": str(output)} if len(entry) == 2:
                tests.append(ProgramTest(given=given, expected=output))
            case {"call": str(call), "value": value} if len(entry) == 2:
                tests.append(ProgramTest(given="", expected=value, call=call))
            case _:
                both = '{"input", "output"} nor {"call", "value"}'
                raise ValueError(f"test {str(entry)[:80]!r} is neither {both}, all text")
    return tests


def passes(test: ProgramTest, output: str, tolerance: float = TOLERANCE) -> bool:
    """Return whether the output is the expected one, token by token, whatever white space is between tokens. Numbers
    with a fraction may differ by `tolerance`, or by that share of the expected number."""
    if test.call is None:
        found, expected = output.split(), test.expected.split()
        # Integers are compared as text: 0010 may be a row of bits, and is not 10.
        return len(found) == len(expected) and all(
            one == other
            or (
                not other.lstrip("+-").isdecimal()
                and all(map(_NUMBER.fullmatch, (one, other)))
                and _close(float(one), float(other), tolerance)
            )
            for one, other in zip(found, expected, strict=True)
        )
    try:
        value = json.loads(output.rstrip().rpartition("\n")[2], parse_int=_integer)
        return _same(value, test.expected, tolerance)
    except (ValueError, RecursionError, OverflowError):  # the last of an integer that is too large for a float
        return False


def _integer(digits: str) -> int | _LongInteger:
    return int(digits) if len(digits) <= _LONGEST_INTEGER else _LongInteger(digits)


def _close(found: float, expected: float, tolerance: float) -> bool:
    """Return whether two numbers differ by the tolerance or that share of the expected number at most; by the share
    alone where the expected number is below the tolerance."""
    size = abs(expected)
    allowed = tolerance * (size if 0.0 < size < tolerance else max(1.0, size))
    return math.isfinite(expected) and abs(found - expected) <= allowed


def _same(found: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two JSON values are equal, numbers with a fraction up to the tolerance."""
    if isinstance(found, float) or isinstance(expected, float):
        numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (found, expected))
        return numbers and _close(float(found), float(expected), tolerance)
    if type(found) is not type(expected):
        return False
    if isinstance(found, list):
        return len(found) == len(expected) and all(
            _same(*pair, tolerance) for pair in zip(found, expected, strict=True)
        )
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(
            _same(value, expected[key], tolerance) for key, value in found.items()
        )
    return bool(found == expected)


class ProgramJudge:
    """A judge that runs programs one after another. The deadline covers all tests of a sample."""

    def __init__(
        self,
        children: Children,
        scratch: Path,
        confinement: Confinement | None,
        *,
        deadline_s: float,
        tolerance: float = TOLERANCE,
    ) -> None:
        self._children = children
        self._scratch = scratch
        self._confinement = confinement
        self._deadline_s = deadline_s
        self._tolerance = tolerance

    def judge(self, texts: bytes) -> Judgment:
        """Return reward 1 if all tests pass, else 0. Parts: `passed`, the share of tests before the first failure;
        `cut`, 1 where a limit ended the failing test."""
        give_up = time.monotonic() + self._deadline_s
        (sample,) = decode_texts(texts)
        try:
            tests = parse_tests(sample["answer"])
        except ValueError as error:
            return failure("raised", str(error))
        program = program_in(sample["response"])
        passed = cut = 0
        for test in tests:
            output, status = self._run(program, test, give_up)
            cut = int(status is None)
            if status != 0 or not passes(test, output, self._tolerance):
                break
            passed += 1
        return Judgment(float(passed == len(tests)), {"passed": passed / len(tests), "cut": float(cut)})

    def _run(self, program: str, test: ProgramTest, give_up: float) -> tuple[str, int | None]:
        """Return a program's output and exit status: 0 for success, None where it exceeded a limit."""
        self._children.empty_scratch()
        start = _STARTER if test.call is None else f"CALL = {test.call!r}\n{_CALLER}"
        for name, text in (("program.py", program), ("start.py", start)):
            (self._scratch / name).write_bytes(text.encode(errors="surrogatepass"))
        reading, writing = os.pipe()
        given = os.memfd_create("given")
        try:
            os.write(given, test.given.encode(errors="surrogatepass"))
            os.lseek(given, 0, os.SEEK_SET)
            pid = os.fork()
            if pid == 0:
                try:
                    os.dup2(given, 0)
                    os.dup2(writing, 1)
                    prepare_child([0, 1])
                    os.chdir(self._scratch)
                    if self._confinement is not None:
                        self._confinement.enter()
                    options = ("-I", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")
                    os.execv(sys.executable, [sys.executable, *options, "start.py"])
                finally:
                    os._exit(1)
            os.close(writing)
            self._children.pid = pid
            output = self._output(reading, give_up)
            return ("", None) if output is None else (output.decode(errors="replace"), self._status(pid, give_up))
        finally:
            self._children.kill()
            os.close(reading)
            os.close(given)

    def _output(self, reading: int, give_up: float) -> bytes | None:
        output, waiting = bytearray(), select.poll()
        waiting.register(reading, select.POLLIN)
        try:
            while len(output) <= MAX_OUTPUT_BYTES:
                self._children.look()
                left_s = give_up - time.monotonic()
                if left_s <= 0.0:
                    return None
                if waiting.poll(min(WATCH_EVERY_S, left_s) * 1000):
                    if not (piece := os.read(reading, 1 << 16)):
                        return bytes(output)
                    output += piece
        except OverLimitError:
            return None
        return None

    def _status(self, pid: int, give_up: float) -> int | None:
        """Return the exit status of a program that has closed its output and may still run; None above a limit. The
        process is not reaped, so it can still be killed."""
        pause_s = 0.0005
        while (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
            try:
                self._children.look()
            except OverLimitError:
                return None
            if time.monotonic() >= give_up:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, WATCH_EVERY_S)
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
