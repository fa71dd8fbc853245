"""Run the programs of a run as child processes: their commands, their ends, and the notes that explain a failure."""

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
from pipeline.data.files import as_disk_full, make_folder, unique_suffix
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
    """Return this process's environment, with one thread by default, since all processes share the cores.

    PYTHONSAFEPATH keeps a `pipeline.py` of the working folder from hiding ours; programs add that folder last.
    """
    return program_environment() | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONSAFEPATH": "1"}


def torchrun(num_processes: int, module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs `module` once per rank on this machine. `options` are torchrun's, such as
    `rendezvous_options`; by default the ranks meet on loopback."""
    return [
        *(sys.executable, "-P", "-m", "launch.run.torchrun"),
        *(options or rendezvous_options(0, LOOPBACK, 0, LOOPBACK)),
        *("--max-restarts", "0", "--nproc-per-node", str(num_processes), "-m", module, *arguments),
    ]


def rendezvous_options(node: int, host: str, port: int, address: str, nodes: int = 1) -> list[str]:
    """Return torchrun's options with which the agents of `nodes` machines meet at `port` of node 0, known to the others
    as `host`. `address` is this node's. Port 0 is any free port, for one machine."""
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
    """Run ranks to their end, calling `watch` meanwhile. Raises FatalError if they fail or exceed `deadline_s`, with
    the note that a rank left or the end of the log."""
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
    """Run `body` as a supervised program, and end the process; a FatalError leaves a note for the supervisor."""
    try:
        with as_disk_full(run.path):
            body()
    except SupersededError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        os._exit(SUPERSEDED_EXIT_CODE)
    except FatalError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave_fatal_note(run, name, error)
        os._exit(FATAL_EXIT_CODE)  # no orderly exit: other ranks may wait in a collective
    except StoppedError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        os._exit(STOPPED_EXIT_CODE)
    except EvenKeelError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    end_process(0)


def end_process(status: int) -> NoReturn:
    """End this process at once, without waiting for helper threads and process groups."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_tree(pid: int) -> None:
    """Kill a process and its descendants in all sessions: torchrun gives each rank a session, and may hang."""
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
    """A child process that is killed with all its descendants."""

    def kill(self) -> None:
        """Kill the tree of a running process; the number of an ended process may belong to another one."""
        if self.poll() is None:
            end_tree(self.pid)
        super().kill()


def leave_fatal_note(run: RunDirectory, process: str, error: Exception) -> None:
    folder = run.logs / "fatal"
    note = dict(process=process, error=type(error).__name__, message=str(error), time=time.time())
    with suppress(OSError):  # a full disk, which the supervisor notices itself
        make_folder(folder)
        write_sealed_json(folder / f"{process}-{unique_suffix()}.json", note)


@dataclass
class FatalNotes:
    """The fatal notes written after this object is made. Earlier notes are known by name, since clocks may differ."""

    run: RunDirectory
    _before: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._before = frozenset(path.name for path in (self.run.logs / "fatal").glob("*.json"))

    def error(self, process: str = "") -> FatalError | None:
        """Return the error of a new note by a process whose name begins with `process`; None without such a note."""
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
    """Return `RUN holds 12 batches and the checkpoint of step 10 of 100; the same command goes on from there`."""
    saved, batches = max(run.saved_steps(), default=0), BatchStore(run.batches).next_index
    checkpoint = f"the checkpoint of step {saved} of {steps}" if saved else "no checkpoint yet"
    sampled = f"{batches} batch{'' if batches == 1 else 'es'} and " if batches else ""
    onward = "goes on from there" if saved or batches else "begins again"
    return f"{run.path} holds {sampled}{checkpoint}; the same command {onward}"


@contextmanager
def saying_what_is_saved(run: RunDirectory, steps: int) -> Iterator[None]:
    """Add a message that says what is saved to a KeyboardInterrupt that ends the block."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what_is_saved(run, steps)) from None
