"""The learner's ranks on one host: started by torchrun, asked to save and end, and ended with all below them."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from launch.run.processes import ProcessTree
from launch.run.waiting import BEGUN, log_file
from pipeline.scratch import make_scratch, remove_scratch, scratch_environment
from pipeline.trainer.batch_source import STOP_FILE_VARIABLE


class _Torchrun(ProcessTree):
    """Ranks die with torchrun (launch.run.learn_rank), and torchrun with the agent.

    Slurm signals every process of a step. The agent alone answers SIGTERM, by the stop file: a rank that died of it
    would not save.
    """

    when_parent_dies = signal.SIGKILL
    ignored = (signal.SIGTERM, signal.SIGINT)


class Ranks:
    """A context manager that leaves no process behind."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._folder = make_scratch("learner")
        self._stop_file = self._folder / "stop"
        given = {**environment, **scratch_environment(self._folder), STOP_FILE_VARIABLE: str(self._stop_file)}
        self._torchrun = _Torchrun(command, log_file(), given, own_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._torchrun.kill()
        remove_scratch(self._folder)

    def poll(self) -> int | None:
        """Exit status of torchrun; None while it runs."""
        return self._torchrun.poll()

    def ask_to_stop(self) -> None:
        """Rank 0 finds the file at its next step, and tells the others."""
        self._stop_file.touch()

    @property
    def have_begun(self) -> bool:
        """Whether there may be anything to save. Until then ranks import, join and load, and look for no file."""
        return self._stop_file.with_name(BEGUN).exists()
