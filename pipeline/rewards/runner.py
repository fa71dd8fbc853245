"""The process in which a reward function runs. It is started by a worker, which it cannot look into.

It holds one socket, to its worker, on which each sample arrives with a key that nobody could know before. What it
prints is thrown away.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from pipeline.rewards.calling.judge import judge, resolve, said_of
from pipeline.rewards.calling.wants import Wants
from pipeline.rewards.channel import Channel, ChannelClosedError
from pipeline.rewards.judgment import MAX_REQUEST_BYTES, Judgment, decode_texts, encode_judgment, failure, split_request
from pipeline.rewards.sandbox.confine import Confinement
from pipeline.rewards.sandbox.limits import hide_from_others

READY = "ready"
"""The key of the first message, which says whether the reward function was imported."""
FOREVER_S = math.inf


class RunnerLimits(NamedTuple):
    """Of calls of the function: seconds of each call of an async one, and how often what failed on the way is asked
    again."""

    deadline_s: float
    retries: int


def fork_runner(
    reward: str, path: Sequence[str], folder: Path, confinement: Confinement | None, limits: RunnerLimits
) -> tuple[int, Channel]:
    """Start a process for a reward function: its id, and this side of its socket."""
    mine, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _become_runner(theirs, reward, path, folder, confinement, limits)
    theirs.close()
    descriptor = mine.detach()
    return pid, Channel(descriptor, descriptor)


def prepare_child(keep: Sequence[int]) -> None:
    """After a fork: a process group of its own, standard streams that lead nowhere unless kept, nothing else open."""
    os.setsid()
    hide_from_others(hidden=False)
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in {0, 1, 2}.difference(keep):
        os.dup2(nowhere, descriptor)
    start = 3
    for descriptor in sorted(number for number in keep if number > 2):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def _become_runner(
    channel: socket.socket,
    reward: str,
    path: Sequence[str],
    folder: Path,
    confinement: Confinement | None,
    limits: RunnerLimits,
) -> NoReturn:
    status = 1
    try:
        descriptor = channel.detach()
        prepare_child([descriptor])
        # The run stops at SIGINT and SIGTERM, and Slurm sends them to every process; these here end with the run.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.chdir(folder)
        _run(Channel(descriptor, descriptor), reward, path, confinement, limits)
        status = 0
    finally:
        os._exit(status)


def _run(
    channel: Channel, reward: str, path: Sequence[str], confinement: Confinement | None, limits: RunnerLimits
) -> None:
    try:
        if confinement is not None:
            confinement.enter()
        sys.path[:] = path
        wants = Wants.of(resolve(reward))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an import runs foreign code; what it raised is the answer
        channel.send(encode_judgment(READY, failure("raised", said_of(error))), FOREVER_S)
        return
    channel.send(encode_judgment(READY, Judgment(0.0, wants.numbers())), FOREVER_S)
    while True:
        try:
            key, texts = split_request(channel.receive(MAX_REQUEST_BYTES, FOREVER_S))
        except ChannelClosedError:
            return
        judgment = judge(reward, decode_texts(texts), deadline_s=limits.deadline_s, retries=limits.retries)
        channel.send(encode_judgment(key, judgment), FOREVER_S)
