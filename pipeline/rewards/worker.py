"""Run a worker: the trusted process between the run and the code that scores.

    pool (the run) ◀──verdict pipe──▶ worker ◀──socket──▶ runner: the reward function, confined
                                             ◀──stdout──▶ or a program that a model wrote, confined
                                             or a built-in reward, called by the worker itself

The worker alone holds the verdict pipe, and it runs no foreign code. It answers each request with exactly one verdict,
which names the request and holds only a reason and finite numbers. Under bubblewrap it is process 1 of the sandbox;
under Landlock it stands outside, and its children are confined. It ends when the pipe closes.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import resource
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pipeline.child_process import die_with_parent
from pipeline.rewards.calling import KINDS, Wants, describe_error, judge, resolve, wants_of
from pipeline.rewards.children import Children, RunIsGoneError, prepare_child
from pipeline.rewards.messages import (
    KEY_CHARACTERS,
    MAX_JUDGMENT_BYTES,
    MAX_REQUEST_BYTES,
    READY,
    START_DEADLINE_S,
    BadMessageError,
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Judgment,
    decode_judgment,
    decode_texts,
    encode_judgment,
    failure,
)
from pipeline.rewards.programs import ProgramJudge
from pipeline.rewards.sandbox.confine import WATCH_EVERY_S, Confinement, OverLimitError, hide_from_others
from pipeline.rewards.verifiers import MATH_VERIFY, PYTHON_TESTS

_PR_SET_CHILD_SUBREAPER = 36
_LATER_S = 5.0
"""Seconds that a process with async calls may take beyond their deadlines."""
_PERHAPS_OF_AN_EARLIER_SAMPLE = frozenset(("crashed", "bad_result", "memory", "processes", "files"))


def main() -> None:
    """Read the settings from the socket at standard input, then answer requests until it closes."""
    hide_from_others(hidden=True)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run handles them; Slurm signals every process
    verdicts = Channel(os.dup(0))  # under a number that no child of this process gets
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    settings = json.loads(verdicts.receive(MAX_REQUEST_BYTES, START_DEADLINE_S))
    rung, scratch = settings["rung"], None
    if rung or settings["reward"] == PYTHON_TESTS:  # the only writable folder, and the home of what runs
        scratch = Path("/tmp") if rung == "bubblewrap" else Path(tempfile.mkdtemp(prefix="evenkeel-reward-"))
        os.environ.update(HOME=str(scratch), TMPDIR=str(scratch))
        with suppress(OSError):
            os.chdir(scratch)
    children = Children(verdicts, settings["memory_mib"] * 2**20, scratch, namespace=rung == "bubblewrap")
    try:
        confinement = None
        if rung is not None:
            assert scratch is not None
            confinement = Confinement.of(settings, scratch)
        judge: BuiltInJudge | FunctionJudge | ProgramJudge
        problem: Judgment | None = None
        if settings["built_in"]:
            judge = BuiltInJudge(settings)
            problem = judge.start()
        elif settings["reward"] == PYTHON_TESTS:
            assert scratch is not None
            limits = dict(deadline_s=settings["deadline_s"], tolerance=settings["program_tolerance"])
            judge = ProgramJudge(children, scratch, confinement, **limits)
        else:
            judge = FunctionJudge(settings, children, confinement)
            problem = judge.start()
        wants = dict.fromkeys(judge.wants, 1.0) if isinstance(judge, FunctionJudge) else {}
        ready = Judgment(0.0, wants, None, str(scratch or ""))
        verdicts.send(encode_judgment(READY, problem or ready), START_DEADLINE_S)
        while problem is None:
            request = verdicts.receive(MAX_REQUEST_BYTES, math.inf)
            key, texts = request[:KEY_CHARACTERS].decode(), request[KEY_CHARACTERS:]
            verdicts.send(encode_judgment(key, judged(judge, texts)), START_DEADLINE_S)
    except (RunIsGoneError, ChannelClosedError):
        pass
    finally:
        children.end()


def judged(judge: BuiltInJudge | FunctionJudge | ProgramJudge, texts: bytes) -> Judgment:
    """Return the verdict on one request. An error in our own code fails the sample, since a fresh worker would fail as
    well. Errors of the operating system may pass; they are raised, the worker ends, and a fresh one is asked."""
    try:
        return judge.judge(texts)
    except (RunIsGoneError, OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - see above
        return failure("raised", f"{type(error).__name__}: {error}")


class BuiltInJudge:
    """A judge that calls a trusted built-in reward in this process. The run keeps the deadline and kills the worker,
    since a function that computes in C blocks every thread of its process. The kernel limits its memory."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._used = False

    def start(self) -> Judgment | None:
        """Import the reward function and return the problem, or None."""
        settings = self._settings
        die_with_parent(settings["run_pid"])
        hard, most = resource.getrlimit(resource.RLIMIT_DATA)[1], settings["memory_mib"] * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        os.chdir(settings["folder"])
        sys.path[:] = settings["path"]
        try:
            resolve(settings["reward"])
            if settings["reward"] == MATH_VERIFY:  # takes a second: not within the deadline of the first sample
                importlib.import_module("pipeline.rewards.mathematics")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an import raised is the answer
            return failure("raised", f"{type(error).__name__}: {error}")
        os.dup2(0, 2)  # nobody reads stderr any more, and libraries that warn would block on a full pipe
        return None

    def judge(self, texts: bytes) -> Judgment:
        """Score one sample. Raises RunIsGoneError when memory runs out that earlier samples may have used."""
        samples = [{**sample, "tolerance": self._settings["math_tolerance"]} for sample in decode_texts(texts)]
        judgment = judge(self._settings["reward"], samples)
        was_used, self._used = self._used, True
        if judgment.failed == "memory" and was_used:
            raise RunIsGoneError(judgment.detail)
        return judgment


class FunctionJudge:
    """A judge that calls a reward function in a confined process, and replaces a process that breaks a rule."""

    def __init__(self, settings: Mapping[str, Any], children: Children, confinement: Confinement | None) -> None:
        self.wants: Wants = frozenset()
        self._settings, self._confinement = settings, confinement
        self._children = children
        self._deadline_s: float = settings["deadline_s"]
        self._channel: Channel | None = None
        self._used = False

    def start(self) -> Judgment | None:
        """Start a fresh process that imports the reward function, and return the problem, or None."""
        self._end()
        self._children.empty_scratch()
        mine, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _become_runner(theirs.detach(), self._settings, self._confinement)
        theirs.close()
        self._channel = Channel(mine.detach())
        self._children.pid = pid
        judgment = self._reply(READY, START_DEADLINE_S)
        if judgment.failed is not None:
            self._end()
            return judgment
        self.wants = KINDS & judgment.parts.keys()
        self._used = False
        self._children.left_any()  # what the import started may stay
        return None

    def judge(self, texts: bytes) -> Judgment:
        """Return the verdict on one request. A failure that an earlier request may have caused (an unexpected message,
        a crash, too much memory) is retried in a fresh process."""
        if self._channel is not None and self._channel.pending:
            self._end()
        was_used = self._channel is not None and self._used
        judgment = self._ask(texts)
        if was_used and self._channel is None and judgment.failed in _PERHAPS_OF_AN_EARLIER_SAMPLE:
            judgment = self._ask(texts)
        return judgment

    def _ask(self, texts: bytes) -> Judgment:
        if self._channel is None and (problem := self.start()) is not None:
            return failure("crashed", f"it could not be started again: {problem.detail}")
        assert self._channel is not None
        key, self._used = secrets.token_hex(KEY_CHARACTERS // 2), True
        # The process ends each call of an async function itself.
        deadline_s = self._deadline_s + (_LATER_S if "concurrent" in self.wants else 0.0)
        judgment = self._reply(key, deadline_s, key.encode() + texts)
        if self._channel is not None and self._children.left_any():
            self._end()
        return judgment

    def _reply(self, key: str, deadline_s: float, request: bytes | None = None) -> Judgment:
        """Return the answer to `key`, or the reason why the process was killed."""
        assert self._channel is not None
        try:
            if request is not None:
                self._channel.send(request, deadline_s)
            message = self._channel.receive(MAX_JUDGMENT_BYTES, deadline_s, self._children.look, WATCH_EVERY_S)
            return decode_judgment(key, message)
        except ChannelTimeoutError:
            self._end()
            return failure("timeout", f"killed after {deadline_s:g} s")
        except BadMessageError as error:
            self._end()
            return failure("bad_result", f"it wrote what was not asked for: {error}")
        except OverLimitError as error:
            self._end()
            return failure(str(error), f"killed for using too much: {error}")
        except ChannelClosedError:
            return failure("crashed", f"its process ended with status {self._end()}")

    def _end(self) -> int | None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        return self._children.kill()


def _become_runner(descriptor: int, settings: Mapping[str, Any], confinement: Confinement | None) -> NoReturn:
    """Run the reward function in this process, whose one socket leads to its worker. Each sample arrives with a key
    that nobody can guess. The process cannot look into the worker, and what it prints is discarded."""
    status = 1
    try:
        prepare_child([descriptor])
        # Slurm sends SIGINT and SIGTERM to every process; this process ends with the run.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.chdir(settings["folder"])
        channel = Channel(descriptor)
        try:
            if confinement is not None:
                confinement.enter()
            sys.path[:] = settings["path"]
            ready = Judgment(0.0, dict.fromkeys(wants_of(resolve(settings["reward"])), 1.0))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an import runs foreign code; its error is the answer
            ready = failure("raised", describe_error(error))
        channel.send(encode_judgment(READY, ready), math.inf)
        while ready.failed is None:
            request = channel.receive(MAX_REQUEST_BYTES, math.inf)
            samples = decode_texts(request[KEY_CHARACTERS:])
            limits = dict(deadline_s=settings["deadline_s"], retries=settings["retries"])
            judgment = judge(settings["reward"], samples, **limits)
            channel.send(encode_judgment(request[:KEY_CHARACTERS].decode(), judgment), math.inf)
        status = 0
    except ChannelClosedError:
        status = 0
    finally:
        os._exit(status)
