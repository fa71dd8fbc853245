"""Runs tries in a forked process: one that hangs, eats the memory or crashes is one verdict, and the others go on.

The deadline is processor time, so that a busy machine condemns nothing. A try that sleeps, and gets no processor time
because it asks for none, is ended by the clock.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import psutil

CPU_DEADLINE_S = 10.0
ASLEEP_S = 30.0
APART_S = 250.0
MEMORY_BYTES = 2 << 30
"""Address space that a try may take, beside what was there before."""


def run_tries(name: str, seeds: Sequence[int]) -> dict[int, str]:
    """The verdict of each seed of a kind."""
    importlib.import_module(f"tests.chaos.malformed.{name}").prepare()
    verdicts: dict[int, str] = {}
    while waiting := [seed for seed in seeds if seed not in verdicts]:
        verdicts |= _in_a_process(name, waiting)
    return verdicts


def run_apart(name: str, count: int) -> dict[int, str]:
    """The verdicts of the first seeds, from an interpreter that has loaded nothing else: a fork of a process with many
    libraries and threads may crash by itself."""
    command = [sys.executable, "-m", __name__, name, str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=APART_S, check=True)
    return {int(seed): verdict for seed, verdict in json.loads(done.stdout.splitlines()[-1]).items()}


def _in_a_process(name: str, seeds: Sequence[int]) -> dict[int, str]:
    """Verdicts up to the first seed that ends the process, which has one too."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="evenkeel-malformed-") as folder:
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks beside threads
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _tell_verdicts(name, seeds, writer, Path(folder))
        os.close(writer)
        try:
            return _collect(pid, reader)
        finally:
            os.close(reader)


def _tell_verdicts(name: str, seeds: Sequence[int], writer: int, folder: Path) -> NoReturn:
    status = 1
    try:
        faulthandler.disable()  # a crash is told by the verdict
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        bound = psutil.Process().memory_info().vms + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
        module = importlib.import_module(f"tests.chaos.malformed.{name}")
        for seed in seeds:
            own = folder / str(seed)
            own.mkdir()
            os.write(writer, json.dumps([seed, None]).encode() + b"\n")
            try:
                verdict = module.attempt(seed, own)
            except BaseException as error:  # noqa: BLE001 - whatever a try lets out is what it found
                place = traceback.extract_tb(error.__traceback__)[-1]
                verdict = f"raised {type(error).__name__}: {str(error)[:200]!a} in {place.filename}:{place.lineno}"
            os.write(writer, json.dumps([seed, verdict]).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


def _collect(pid: int, reader: int) -> dict[int, str]:
    verdicts: dict[int, str] = {}
    buffered, current, process = b"", None, psutil.Process(pid)
    began = busy = 0.0
    awake, why = time.monotonic(), ""
    poll = select.poll()  # select() knows no descriptor past 1,023
    poll.register(reader, select.POLLIN)
    while True:
        if poll.poll(500):
            if not (data := os.read(reader, 1 << 16)):
                break
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                seed, verdict = json.loads(line)
                current = seed if verdict is None else None
                if verdict is not None:
                    verdicts[seed] = verdict
            began = busy = _cpu_s(process)
            awake = time.monotonic()
            continue
        if (now := _cpu_s(process)) > busy or _is_runnable(process):
            busy, awake = now, time.monotonic()
        if not why and now - began > CPU_DEADLINE_S:
            why = f"past its deadline of {CPU_DEADLINE_S:g} s of processor time"
            os.kill(pid, signal.SIGKILL)
        elif not why and time.monotonic() - awake > ASLEEP_S:
            why = f"past its deadline: asleep for {ASLEEP_S:g} s"
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if current is not None:
        verdicts[current] = why or f"ended its process, with status {os.waitstatus_to_exitcode(status)}"
    elif status:
        raise RuntimeError(f"the process of the tries ended with status {os.waitstatus_to_exitcode(status)}")
    return verdicts


def _is_runnable(process: psutil.Process) -> bool:
    """Whether it waits for a processor, or for a disk."""
    try:
        return process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    except psutil.Error:
        return False


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


if __name__ == "__main__":
    print(json.dumps(run_tries(sys.argv[1], range(int(sys.argv[2])))))
