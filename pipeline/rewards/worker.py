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
import json
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.rewards.built_in import BuiltInJudge
from pipeline.rewards.channel import Channel, ChannelClosedError
from pipeline.rewards.children import Children, RunIsGoneError
from pipeline.rewards.functions import START_DEADLINE_S, FunctionJudge
from pipeline.rewards.judgment import MAX_REQUEST_BYTES, Judgment, encode_judgment, failure, split_request
from pipeline.rewards.programs import ProgramJudge
from pipeline.rewards.runner import FOREVER_S, READY
from pipeline.rewards.sandbox.confine import Confinement
from pipeline.rewards.sandbox.limits import hide_from_others
from pipeline.rewards.verifiers import PYTHON_TESTS

_PR_SET_CHILD_SUBREAPER = 36
_Judge = BuiltInJudge | FunctionJudge | ProgramJudge


def main() -> None:
    """Read the settings from the socket that is standard input, then serve until it ends."""
    hide_from_others(hidden=True)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are the run's business; Slurm signals every process
    verdicts = _own_channel()
    settings = json.loads(verdicts.receive(MAX_REQUEST_BYTES, START_DEADLINE_S))
    rung = settings["rung"]
    scratch = _make_scratch(rung) if rung or settings["reward"] == PYTHON_TESTS else None
    memory_bytes = settings["memory_mib"] * 2**20
    children = Children(verdicts, memory_bytes, scratch, namespace=rung == "bubblewrap")
    try:
        _serve(verdicts, _judge_of(settings, children), scratch)
    except (RunIsGoneError, ChannelClosedError):
        pass
    finally:
        children.end()


def _serve(verdicts: Channel, judge: _Judge, scratch: Path | None) -> None:
    """Say whether the reward function can be imported, then answer request after request."""
    problem = judge.start()
    wants = judge.wants.numbers() if isinstance(judge, FunctionJudge) else {}
    ready = Judgment(0.0, wants, None, str(scratch or ""))
    verdicts.send(encode_judgment(READY, problem or ready), START_DEADLINE_S)
    while problem is None:
        key, texts = split_request(verdicts.receive(MAX_REQUEST_BYTES, FOREVER_S))
        verdicts.send(encode_judgment(key, judged(judge, texts)), START_DEADLINE_S)


def judged(judge: _Judge, texts: bytes) -> Judgment:
    """The verdict on one request. A sample over which our own code stumbles is a failed one: a fresh worker would
    stumble as well. What the system refuses may pass; it is raised, the worker ends, and a fresh one is asked."""
    try:
        return judge.judge(texts)
    except (RunIsGoneError, OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - see above
        return failure("raised", f"{type(error).__name__}: {error}")


def _judge_of(settings: dict[str, Any], children: Children) -> _Judge:
    if settings["built_in"]:
        return BuiltInJudge(
            settings["reward"],
            settings["memory_mib"] * 2**20,
            path=settings["path"],
            folder=Path(settings["folder"]),
            run_pid=settings["run_pid"],
            tolerance=settings["math_tolerance"],
        )
    confinement = None
    if settings["rung"] is not None:
        assert children.scratch is not None
        confinement = Confinement(
            rung=settings["rung"],
            memory_bytes=settings["memory_mib"] * 2**20,
            scratch=children.scratch,
            pieces=tuple((Path(path), whole) for path, whole in settings["pieces"]),
            landlock_abi=settings["landlock_abi"],
        )
    if settings["reward"] == PYTHON_TESTS:
        assert children.scratch is not None
        return ProgramJudge(
            children,
            children.scratch,
            confinement,
            deadline_s=settings["deadline_s"],
            tolerance=settings["program_tolerance"],
        )
    return FunctionJudge(
        settings["reward"],
        children,
        confinement,
        path=settings["path"],
        folder=Path(settings["folder"]),
        deadline_s=settings["deadline_s"],
        retries=settings["retries"],
    )


def _make_scratch(rung: str | None) -> Path:
    """The only folder that can be written to, which is also the home of what runs. Under bubblewrap it is in memory."""
    folder = Path("/tmp") if rung == "bubblewrap" else Path(tempfile.mkdtemp(prefix="evenkeel-reward-"))
    os.environ.update(HOME=str(folder), TMPDIR=str(folder))
    with suppress(OSError):
        os.chdir(folder)
    return folder


def _own_channel() -> Channel:
    """The socket that is standard input, moved to where no child of this process gets it."""
    moved = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    return Channel(moved, moved)
