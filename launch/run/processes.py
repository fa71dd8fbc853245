"""The programs of a run as child processes: their commands, and the reason that they leave behind when they give up."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

from pipeline import errors
from pipeline.child_process import (
    ChildProcess,
    log_tail,
    make_scratch,
    program_environment,
    remove_scratch,
    scratch_environment,
)
from pipeline.data.checksums import read_sealed_json, write_sealed_json
from pipeline.data.files import as_disk_full, unique_suffix
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import (
    FATAL_EXIT_CODE,
    STOPPED_EXIT_CODE,
    SUPERSEDED_EXIT_CODE,
    EvenKeelError,
    FatalError,
    StoppedError,
    StoreError,
    SupersededError,
)

LOOPBACK = "127.0.0.1"
_POLL_S = 0.25
_DEATH_S = 10.0


def child_environment() -> dict[str, str]:
    """This process's environment, with one thread a process unless the user says otherwise: all share the cores.

    The folder that the user is in must not stand before our packages: a `pipeline.py` there would hide ours. Programs
    put it at the end of their path (pipeline.child_process.append_working_folder_to_path).
    """
    return program_environment() | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONSAFEPATH": "1"}


def torchrun(num_processes: int, module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command that runs `module` once a rank on this machine (launch.run.torchrun). `options` are torchrun's, by
    which several machines meet, too; without any the ranks meet on loopback."""
    return [
        *(sys.executable, "-P", "-m", "launch.run.torchrun"),
        *(options or rendezvous_options(0, LOOPBACK, 0, LOOPBACK)),
        *("--max-restarts", "0", "--nproc-per-node", str(num_processes), "-m", module, *arguments),
    ]


def rendezvous_options(node: int, host: str, port: int, address: str, nodes: int = 1) -> list[str]:
    """torchrun's options by which the agents of `nodes` machines meet at `port` of node 0, which the others know as
    `host`; `address` is that of this node. Port 0 is a free one, for one machine."""
    return [
        *("--nnodes", str(nodes), "--node-rank", str(node), "--local-addr", address),
        *("--rdzv-backend", "evenkeel", "--rdzv-endpoint", host),
        *("--rdzv-conf", f"rank={node},host={host},port={port},address={address}"),
    ]


def run_ranks(
    run: RunDirectory,
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str],
    watch: Callable[[], None] = lambda: None,
    deadline_s: float = math.inf,
) -> None:
    """Run ranks to their end, calling `watch` as they go. Raises FatalError with the reason that a rank left, or with
    the end of the log, when they fail or take longer than `deadline_s`."""
    notes, scratch = FatalNotes(run), make_scratch("ranks")
    ranks = ChildProcess(command, log, {**env, **scratch_environment(scratch)})
    give_up = time.monotonic() + deadline_s
    try:
        while ranks.poll() is None and time.monotonic() < give_up:
            watch()
            time.sleep(_POLL_S)
    finally:
        ranks.stop()
        remove_scratch(scratch)
    if ranks.poll() != 0:
        raise FatalError(notes.error() or f"the {log.stem} died: {log_tail(log)}; the same command tries again")


def run_child(run: RunDirectory, name: str, body: Callable[[], None]) -> NoReturn:
    """Body of a supervised program: a FatalError leaves its one line where the supervisor looks for it."""
    try:
        with as_disk_full(run.path):
            body()
    except SupersededError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        os._exit(SUPERSEDED_EXIT_CODE)
    except FatalError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave_fatal_note(run, name, error)
        os._exit(FATAL_EXIT_CODE)  # other ranks may wait in a collective: no orderly goodbye
    except StoppedError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        os._exit(STOPPED_EXIT_CODE)
    except EvenKeelError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    end_process(0)


def end_process(status: int) -> NoReturn:
    """End this process at once: helper threads and process groups must not keep a program alive that has finished."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_tree(pid: int) -> None:
    """Kill a process and all below it, whatever sessions they have: torchrun gives each rank one, and may hang."""
    try:
        top = psutil.Process(pid)
        tree = [*top.children(recursive=True), top]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([process for process in tree if process.pid != pid], timeout=_DEATH_S)


class ProcessTree(ChildProcess):
    """A program that is killed with all below it."""

    def kill(self) -> None:
        """One that has ended has given its number back: whoever has it now is left alone."""
        if self.poll() is None:
            end_tree(self.pid)
        super().kill()


def leave_fatal_note(run: RunDirectory, process: str, error: Exception) -> None:
    """Say why `process` gives up."""
    folder = run.logs / "fatal"
    note = dict(process=process, error=type(error).__name__, message=str(error), time=time.time())
    with suppress(OSError):  # on a full disk: the supervisor finds that out for itself
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed_json(folder / f"{process}-{unique_suffix()}.json", note)


@dataclass
class FatalNotes:
    """The notes that are left from now on: what is there already was left by earlier processes. No clock is asked."""

    run: RunDirectory
    _before: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._before = frozenset(path.name for path in (self.run.logs / "fatal").glob("*.json"))

    def error(self, process: str = "") -> FatalError | None:
        """Return the error of a new note, of the process whose name begins so; None when there is none."""
        for path in sorted((self.run.logs / "fatal").glob("*.json")):
            if path.name.startswith(process) and path.name not in self._before:
                try:
                    note = read_sealed_json(path, "it is only shown")
                    kind, message = getattr(errors, str(note["error"]), None), str(note["message"])
                except (OSError, StoreError, KeyError):
                    continue
                return (kind if isinstance(kind, type) and issubclass(kind, FatalError) else FatalError)(message)
        return None


def what_is_saved(run: RunDirectory, steps: int) -> str:
    """`RUN holds 12 batches and the checkpoint of step 10 of 100; the same command goes on from there`."""
    saved, batches = max(run.saved_steps(), default=0), BatchStore(run.batches).next_index
    checkpoint = f"the checkpoint of step {saved} of {steps}" if saved else "no checkpoint yet"
    sampled = f"{batches} batch{'' if batches == 1 else 'es'} and " if batches else ""
    onward = "goes on from there" if saved or batches else "begins again"
    return f"{run.path} holds {sampled}{checkpoint}; the same command {onward}"


@contextmanager
def saying_what_is_saved(run: RunDirectory, steps: int) -> Iterator[None]:
    """Ctrl-C that ends the block at once says what is saved: the KeyboardInterrupt carries it."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what_is_saved(run, steps)) from None
