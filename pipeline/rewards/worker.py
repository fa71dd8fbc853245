"""A worker: the trusted process between the run and the code that scores.

    pool (the run) ◀──verdict pipe──▶ worker ◀──socket──▶ runner: the reward function, confined
                                             ◀──stdout──▶ or a program that a model wrote, confined
                                             or a built-in reward, called by the worker itself

The verdict pipe is held by the worker alone, and the worker runs no code of others. It gives exactly one verdict for
each request, names the request in it, and lets through nothing but a reason and finite numbers. Under bubblewrap it is
process 1 of the sandbox; under Landlock it stands outside, and what it forks is confined. It ends when the pipe does.
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
"""How much longer than its own deadlines a process with calls of an async function may take."""
_PERHAPS_OF_AN_EARLIER_SAMPLE = frozenset(("crashed", "bad_result", "memory", "processes", "files"))


def main() -> None:
    """Read the settings from the socket that is standard input, then answer requests until it ends."""
    hide_from_others(hidden=True)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are the run's business; Slurm signals every process
    verdicts = Channel(os.dup(0))  # of a number that no child of this process gets
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    settings = json.loads(verdicts.receive(MAX_REQUEST_BYTES, START_DEADLINE_S))
    rung, scratch = settings["rung"], None
    if rung or settings["reward"] == PYTHON_TESTS:  # the only folder that can be written to, and the home of what runs
        scratch = Path("/tmp") if rung == "bubblewrap" else Path(tempfile.mkdtemp(prefix="evenkeel-reward-"))
        os.environ.update(HOME=str(scratch), TMPDIR=str(scratch))
        with suppress(OSError):
            os.chdir(scratch)
    children = Children(verdicts, settings["memory_mib"] * 2**20, scratch, namespace=rung == "bubblewrap")
    try:
        confinement = None
        if rung is not None:
            assert scratch is not None
            confinement = Confinement(
                rung=rung,
                memory_bytes=settings["memory_mib"] * 2**20,
                scratch=scratch,
                pieces=tuple((Path(path), whole) for path, whole in settings["pieces"]),
                landlock_abi=settings["landlock_abi"],
            )
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
    """The verdict on one request. A sample over which our own code stumbles is a failed one: a fresh worker would
    stumble as well. What the system refuses may pass; it is raised, the worker ends, and a fresh one is asked."""
    try:
        return judge.judge(texts)
    except (RunIsGoneError, OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - see above
        return failure("raised", f"{type(error).__name__}: {error}")


class BuiltInJudge:
    """Scores by a reward of ours that runs no code of others, in this process: one process less takes part.

    The run keeps the deadline and kills the worker: a function that computes in C lets no thread of its own process
    run. The kernel ends the worker with the run, and limits its memory.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._used = False

    def start(self) -> Judgment | None:
        """Import the reward function. Returns what is wrong, or None."""
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
        os.dup2(0, 2)  # libraries warn there, and nobody reads it any more: a full pipe would hold them up
        return None

    def judge(self, texts: bytes) -> Judgment:
        """Score one sample. Raises RunIsGoneError when there is not enough memory and earlier samples may have used it
        up: a fresh worker is asked again."""
        samples = [{**sample, "tolerance": self._settings["math_tolerance"]} for sample in decode_texts(texts)]
        judgment = judge(self._settings["reward"], samples)
        was_used, self._used = self._used, True
        if judgment.failed == "memory" and was_used:
            raise RunIsGoneError(judgment.detail)
        return judgment


class FunctionJudge:
    """One reward function. A process that breaks a rule is killed, and the next sample gets a fresh one."""

    def __init__(self, settings: Mapping[str, Any], children: Children, confinement: Confinement | None) -> None:
        self.wants: Wants = frozenset()
        self._settings, self._confinement = settings, confinement
        self._children = children
        self._deadline_s: float = settings["deadline_s"]
        self._channel: Channel | None = None
        self._used = False

    def start(self) -> Judgment | None:
        """A fresh process that has imported the reward function. Returns what is wrong, or None."""
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
        """The verdict on one request. What an earlier one may have caused (a message that nobody asked for, a crash,
        too much memory) is tried again in a fresh process."""
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
        # The process itself ends calls of an async function, each by itself.
        deadline_s = self._deadline_s + (_LATER_S if "concurrent" in self.wants else 0.0)
        judgment = self._reply(key, deadline_s, key.encode() + texts)
        if self._channel is not None and self._children.left_any():
            self._end()
        return judgment

    def _reply(self, key: str, deadline_s: float, request: bytes | None = None) -> Judgment:
        """The answer to `key`, or the reason why the process was killed."""
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
    """Run the reward function in this process, which holds one socket, to its worker, on which each sample arrives with
    a key that nobody could know before. It cannot look into the worker. What it prints is thrown away."""
    status = 1
    try:
        prepare_child([descriptor])
        # The run stops at SIGINT and SIGTERM, and Slurm sends them to every process; these here end with the run.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.chdir(settings["folder"])
        channel = Channel(descriptor)
        try:
            if confinement is not None:
                confinement.enter()
            sys.path[:] = settings["path"]
            ready = Judgment(0.0, dict.fromkeys(wants_of(resolve(settings["reward"])), 1.0))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an import runs foreign code; what it raised is told
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
