"""The product's own rank programs, forked from a process that has Megatron loaded in place of started by torchrun.

`verify layouts`, `verify parity`, `convert` and `train --replay` run their ranks by launch.run.processes.run_ranks.
Under `forked_programs` the same modules get the same arguments, environment and log, and their exit code counts the
same; what is left out is torchrun itself, which the tests of whole runs use.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.support.ranks import Ranks


@contextmanager
def forked_programs() -> Iterator[None]:
    """While it is open, run_ranks forks."""
    with patch("launch.run.processes.ChildProcess", ForkedProgram):
        yield


class ForkedProgram:
    """What run_ranks asks of a child process, of a program in one or several ranks."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        count, module, arguments = parse(command)
        self._ranks = Ranks(count, run_program, module, arguments, dict(environment), log)
        self._status: int | None = None

    def poll(self) -> int | None:
        """None while all ranks are at work; 0 once all have ended well; 1 once one has not."""
        if self._status is None:
            self._status = self._ranks.status()
        return self._status

    def stop(self) -> None:
        """End what is left of it."""
        status = self.poll()
        self._status = 1 if status is None else status
        self._ranks.close()


def parse(command: Sequence[str]) -> tuple[int, str, list[str]]:
    """Number of ranks, module and arguments of `python -P -m MODULE …` or of a torchrun of it."""
    python, safe_path, flag, module, *arguments = command
    assert (python, safe_path, flag) == (sys.executable, "-P", "-m"), command
    if module != "launch.run.torchrun":
        return 1, module, arguments
    count = int(arguments[arguments.index("--nproc-per-node") + 1])
    module_flag = arguments.index("-m")
    return count, arguments[module_flag + 1], arguments[module_flag + 2 :]


def run_program(module: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """Body of a rank: `python -m module arguments`, its output appended to `log`."""
    mine = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    os.environ.clear()
    os.environ.update(environment | mine)
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
        raise
