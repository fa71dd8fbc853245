"""Child processes that write to a log and do not outlive their parent, however it dies.

Run as a script (`python child_process.py SIGNAL PARENT IGNORED COMMAND…`) it becomes COMMAND, with the kernel asked to
send SIGNAL when the process PARENT dies, and with the signals IGNORED (numbers, by comma) ignored from its start on. It
needs the standard library only.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

PARENT_VARIABLE = "EVENKEEL_PARENT"
"""Environment of a rank: the process that has started it. Taken out as it is read: children have another parent."""


LOG_BYTES = 8 << 20
"""As many of the first and of the last bytes of a log are read. A log grows for as long as its process runs."""


KILLED_S = 30.0
"""So long a killed process may take to end. One that is in the midst of a call to a disk or a driver (state D) ends
when that answers, which may be never."""


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies. Linux only; elsewhere nothing happens.

    `parent` is the process id that the parent itself gave; by default that of PARENT_VARIABLE, or else the parent that
    this process has now, which is another one where the first has died already. The kernel watches the parent's
    *thread*: start children from a thread that lives as long as they should.
    """
    if sys.platform != "linux":
        return
    if parent is None:
        parent = int(os.environ.pop(PARENT_VARIABLE, "") or os.getppid())
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it died before the kernel knew
        os.kill(os.getpid(), signal_number)


def program_environment() -> dict[str, str]:
    """This process's environment, in which `python -P -m` finds our packages where this process found them.

    An empty entry of PYTHONPATH would mean the folder that the user is in, whose `pipeline.py` must not hide ours. An
    installed wheel is found without help; named first, its folder would stand before the standard library.
    """
    root = str(Path(__file__).resolve().parents[1])
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    installed = root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    paths = named if installed else [root, *named]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return environment | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def log_text(log: Path, begin: int = 0) -> str:
    """What a log says from byte `begin` on. Of a long one its beginning, in which the first error is, and its end.
    Raises OSError."""
    with log.open("rb") as file:
        file.seek(begin)
        data = file.read(2 * LOG_BYTES)
        if file.read(1):
            file.seek(-LOG_BYTES, os.SEEK_END)
            data = data[:LOG_BYTES] + b"\n" + file.read(LOG_BYTES)
    return data.decode(errors="replace")


def append_working_folder_to_path() -> None:
    """Find the user's `package.module:Class` in the folder that the command was given in."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


def kill_and_wait(process: subprocess.Popen[Any]) -> None:
    """Kill a child of this process and wait until it has ended. After KILLED_S it is said that it has not, and nobody
    waits for it any longer."""
    process.kill()
    try:
        process.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        print(
            f"warning: process {process.pid} was killed and has not ended in {KILLED_S:g} s: it waits for a disk or a "
            f"driver (`ps -o stat,wchan,args -p {process.pid}`); nobody waits for it any longer, and what it holds "
            "stays taken",
            file=sys.stderr,
            flush=True,
        )


class ChildProcess:
    """A running child whose output is appended to `log`, a file that only this user can read; without one it goes where
    this process's own goes."""

    grace_s: ClassVar[float] = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    when_parent_dies: ClassVar[int] = signal.SIGTERM
    ignored: ClassVar[tuple[int, ...]] = ()
    """Signals that the child and all below it ignore, unless they say otherwise."""
    log: Path | None
    log_begin: int = 0
    """Size of the log when the child was started, or at `forget_said`: what is before tells nothing of it."""

    def __init__(
        self, command: Sequence[str], log: Path | None, environment: Mapping[str, str], *, own_session: bool = False
    ) -> None:
        """Start `command`. With `own_session`, Ctrl-C on the terminal does not reach it."""
        self.log = log
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self.log_begin = log.stat().st_size if log.exists() else 0
        # Not as preexec_fn: in a process with threads, Python code between fork and exec may wait for ever.
        ignored = ",".join(str(int(number)) for number in self.ignored)
        wrapper = [sys.executable, "-I", "-S", __file__, str(int(self.when_parent_dies)), str(os.getpid()), ignored]
        descriptor = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                [*wrapper, *command],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                env=dict(environment) if log is None else {**environment, "PYTHONIOENCODING": "utf-8:backslashreplace"},
                start_new_session=own_session,
            )
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @property
    def pid(self) -> int:
        return self._process.pid

    def said(self) -> str:
        """What was written to the log since this child was started; nothing where there is no log."""
        if self.log is None or not self.log.exists():
            return ""
        return log_text(self.log, self.log_begin)

    def forget_said(self) -> None:
        """Count what is in the log now as written before: it explains nothing that comes later."""
        if self.log is not None:
            self.log_begin = self.log.stat().st_size

    def poll(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when it has ended."""
        self._process.terminate()
        try:
            self._process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); returns at once."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        kill_and_wait(self._process)


_AT = r"^(?:\[[^\]]*\]:?\s*)*"
"""What logs put before a line: a rank, a time."""


_ERROR = re.compile(
    _AT + r"(?:error: |ERROR: |[\w ./-]+: error: |Fatal Python error: |[\w.]*(?:Error|Exception|Interrupt)(?:: |$))"
)
"""A line on which Python, argparse, uvicorn or this program says what went wrong."""


_ROOT_CAUSE = "Root Cause (first observed failure)"


_RANK_KILLED = re.compile(r"rank\s*:\s*(\d+).*?Signal (\d+) \(\w+\) received by PID \d+", re.DOTALL)


_LACKS_PART = re.compile(r"AttributeError: module 'sglang[\w.]*' has no attribute")
"""What SGLang logs of a part that could not be imported. Why it could not is said later."""


_PLACE = re.compile(_AT)


def ending(status: int) -> str:
    """How a process ended whose exit status is `status`; minus the signal, or 128 and the signal as shells say it."""
    number = -status if status < 0 else status - 128
    with suppress(ValueError):
        if number > 0:
            return f"killed by signal {number} ({signal.Signals(number).name})"
    return f"ended with status {status}"


def first_error(text: str) -> str | None:
    """The first line of a log that says what went wrong: those after it are often its consequences."""
    for line in text.splitlines():
        if _is_error(line) and not _LACKS_PART.search(line):
            return _PLACE.sub("", line).strip()
    return None


def _is_error(line: str) -> bool:
    """Whether a line says what went wrong. torchrun ends a log with a long account of its own, in which its exception
    comes last and says nothing."""
    return _ERROR.match(line) is not None and "ChildFailedError" not in line


def last_lines(text: str, lines: int) -> str:
    """The last lines that are not empty, on one line."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(said[-lines:])


def log_tail(log: Path, lines: int = 8) -> str:
    """Return the last line of a log that says what went wrong, or else its last lines. Where torchrun names a rank that
    was killed, that."""
    try:
        text = log_text(log)
    except OSError:
        return "(no log)"
    if (killed := _RANK_KILLED.search(text.partition(_ROOT_CAUSE)[2])) is not None:
        return f"rank {killed[1]} was {ending(-int(killed[2]))}"
    said = [line.strip() for line in text.splitlines() if _is_error(line.strip())]
    return said[-1] if said else last_lines(text, lines)


_NAME = re.compile(r"evenkeel-(?:[a-z]+)-(\d+)-\w+")


_SHARED = Path("/dev/shm")


_LENT = re.compile(r"torch_\d+_\d+_\d+")
"""As torch names its files of shared memory."""


def make_scratch(kind: str) -> Path:
    """Make a folder for temporary files of this process; `kind` is for people, in small letters.

    A process that is killed removes nothing. So each folder's name says who made it, and whoever makes the next one
    removes those whose makers are gone.
    """
    remove_left_scratch()
    return Path(tempfile.mkdtemp(prefix=f"evenkeel-{kind}-{os.getpid()}-"))


def remove_left_scratch() -> None:
    """Remove the folders on this machine whose makers are gone."""
    for left in Path(tempfile.gettempdir()).glob("evenkeel-*"):
        if match := _NAME.fullmatch(left.name):
            try:
                os.kill(int(match[1]), 0)
            except ProcessLookupError:
                remove_scratch(left)
            except PermissionError:  # it is there, another user's
                continue


def remove_scratch(folder: Path) -> None:
    """Remove it. Files of shared memory that are named after files in it go, too: SGLang names its own so, and a
    learner leaves the name of what it lends to engines (megatron_bridge.weight_sync.shared_buffer)."""
    with suppress(OSError):
        if folder.stat().st_uid != os.getuid():
            return
        for name in os.listdir(folder):
            lent = [_SHARED / name] if _LENT.fullmatch(name) else []
            for shared in (*_SHARED.glob(f"sglang_loads_{name}_*.shm"), *lent):
                shared.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def scratch_environment(folder: Path) -> dict[str, str]:
    """With which a program puts its temporary files there. What torch has compiled stays where it was: it is used
    again."""
    caches = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": caches}


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]), int(sys.argv[1]))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and COMMAND would inherit that
        signal.signal(number, signal.SIG_DFL)
    for ignored in filter(None, sys.argv[3].split(",")):
        signal.signal(int(ignored), signal.SIG_IGN)
    os.execvp(sys.argv[4], sys.argv[4:])
