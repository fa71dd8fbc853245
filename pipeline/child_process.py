"""Start child processes that write to a log and end with their parent, find errors in logs, and keep scratch folders.

Run as a script (`python child_process.py SIGNAL PARENT IGNORED COMMAND…`), this file becomes COMMAND: the kernel sends
it SIGNAL when the process PARENT dies, and it starts with the signals IGNORED (numbers, by comma) ignored. The script
imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

PARENT_VARIABLE = "EVENKEEL_PARENT"
"""Environment variable with the process id of a rank's starter. Reading removes it: children have another parent."""


LOG_BYTES = 8 << 20
"""Bytes read at the start and at the end of a log, which grows as long as its process runs."""


KILLED_S = 30.0
"""Seconds for a killed process to end. In a disk or driver call (state D) it ends when the call returns, if ever."""


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies. Linux only; elsewhere nothing happens.

    `parent` is the parent's process id, by default from PARENT_VARIABLE, or else the present parent's, another process
    if the parent has died. The kernel watches the parent's *thread*: start children from a thread that lives long
    enough.
    """
    if sys.platform != "linux":
        return
    if parent is None:
        parent = int(os.environ.pop(PARENT_VARIABLE, "") or os.getppid())
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal_number)


def program_environment() -> dict[str, str]:
    """Return this process's environment with our packages importable by `python -P -m`. An empty entry of PYTHONPATH
    would mean the working folder, whose `pipeline.py` must not hide ours. An installed wheel needs no entry, and its
    folder would come before the standard library."""
    root = str(Path(__file__).resolve().parents[1])
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    installed = root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    paths = named if installed else [root, *named]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return environment | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def log_text(log: Path, begin: int = 0) -> str:
    """Return a log from byte `begin` on; of a long log its start, with the first error, and its end. Raises OSError."""
    with log.open("rb") as file:
        file.seek(begin)
        data = file.read(2 * LOG_BYTES)
        if file.read(1):
            file.seek(-LOG_BYTES, os.SEEK_END)
            data = data[:LOG_BYTES] + b"\n" + file.read(LOG_BYTES)
    return data.decode(errors="replace")


def append_working_folder_to_path() -> None:
    """Let imports of a user's `package.module:Class` find the folder in which the command was given."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


def kill_and_wait(process: subprocess.Popen[Any]) -> None:
    """Kill a child and wait until it ends; after KILLED_S, print a warning and return."""
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
    """A running child whose output is appended to `log`, readable by this user only, or else goes to our output."""

    grace_s: ClassVar[float] = 10.0
    when_parent_dies: ClassVar[int] = signal.SIGTERM
    ignored: ClassVar[tuple[int, ...]] = ()
    """Signals that the child and its children ignore by default."""
    log: Path | None
    log_begin: int = 0
    """Size of the log at the child's start or at `forget_said`: earlier content is ignored."""

    def __init__(
        self, command: Sequence[str], log: Path | None, environment: Mapping[str, str], *, own_session: bool = False
    ) -> None:
        """Start `command`. With `own_session`, Ctrl-C on the terminal does not reach it."""
        self.log = log
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self.log_begin = log.stat().st_size if log.exists() else 0
        wrapper = dying_with_this(self.when_parent_dies, self.ignored)
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
        """Return the log since the child's start; "" without a log."""
        if self.log is None or not self.log.exists():
            return ""
        return log_text(self.log, self.log_begin)

    def forget_said(self) -> None:
        """Ignore the log's present content from now on: it explains no later end."""
        if self.log is not None:
            self.log_begin = self.log.stat().st_size

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s`, and wait for the end."""
        self._process.terminate()
        try:
            self._process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        kill_and_wait(self._process)


def dying_with_this(number: int, ignored: Sequence[int] = ()) -> list[str]:
    """Return the words to put before a command so that it gets the signal `number` when this process dies, and begins
    with others ignored. Not by preexec_fn: in a process with threads, Python code between fork and exec may wait
    forever."""
    names = ",".join(str(int(one)) for one in ignored)
    return [sys.executable, "-I", "-S", __file__, str(int(number)), str(os.getpid()), names]


def with_own_python(command: Sequence[str]) -> list[str]:
    """Return a user's command with this interpreter for the word `python`, so that it finds Even Keel's packages."""
    return [sys.executable if word == "python" else word for word in command]


_AT = r"^(?:\[[^\]]*\]:?\s*)*"
"""Prefixes of log lines, such as a rank or a time."""


_ERROR = re.compile(
    _AT + r"(?:error: |ERROR: |[\w ./-]+: error: |Fatal Python error: |[\w.]*(?:Error|Exception|Interrupt)(?:: |$))"
)
"""A line with an error of Python, argparse, uvicorn or this program."""


_ROOT_CAUSE = "Root Cause (first observed failure)"


_RANK_KILLED = re.compile(r"rank\s*:\s*(\d+).*?Signal (\d+) \(\w+\) received by PID \d+", re.DOTALL)


_LACKS_PART = re.compile(r"AttributeError: module 'sglang[\w.]*' has no attribute")
"""SGLang's log line for a part that could not be imported; the reason follows later."""


_PLACE = re.compile(_AT)


def ending(status: int) -> str:
    """Describe how a process ended; `status` is minus the signal or, as in shells, 128 plus the signal."""
    number = -status if status < 0 else status - 128
    with suppress(ValueError):
        if number > 0:
            return f"killed by signal {number} ({signal.Signals(number).name})"
    return f"ended with status {status}"


def first_error(text: str) -> str | None:
    """Return a log's first line with an error: later errors are often its consequences."""
    for line in text.splitlines():
        if _is_error(line) and not _LACKS_PART.search(line):
            return _PLACE.sub("", line).strip()
    return None


def _is_error(line: str) -> bool:
    """Return whether a line is an error, except torchrun's final ChildFailedError, which tells nothing."""
    return _ERROR.match(line) is not None and "ChildFailedError" not in line


def last_lines(text: str, lines: int) -> str:
    """Return the last non-empty lines, joined into one line."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(said[-lines:])


def log_tail(log: Path, lines: int = 8) -> str:
    """Return the killed rank that torchrun names, or a log's last line with an error, or else its last lines."""
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


def make_scratch(kind: str) -> Path:
    """Create a folder for this process's temporary files; `kind` is a lower-case word for people. Its name has our
    process id, since a killed process removes nothing: the next maker removes the folders of dead processes."""
    remove_left_scratch()
    return Path(tempfile.mkdtemp(prefix=f"evenkeel-{kind}-{os.getpid()}-"))


def remove_left_scratch() -> None:
    """Remove the folders on this machine whose makers are dead."""
    for left in Path(tempfile.gettempdir()).glob("evenkeel-*"):
        if match := _NAME.fullmatch(left.name):
            try:
                os.kill(int(match[1]), 0)
            except ProcessLookupError:
                remove_scratch(left)
            except PermissionError:  # the maker lives, as another user
                continue


def remove_scratch(folder: Path) -> None:
    """Remove the folder, and files of shared memory named after its files: SGLang names its files this way, and a
    learner leaves the names of buffers shared with engines (weight_sync.ipc_transport).

    torch's server of shared memory, a process of its own, outlives the last process that uses it by two seconds. Then
    it removes its socket, and aborts without one: a folder with a live server is left to the next maker."""
    with suppress(OSError):
        if folder.stat().st_uid != os.getuid():
            return
        for name in os.listdir(folder):
            lent = [_SHARED / name] if _LENT.fullmatch(name) else []
            for shared in (*_SHARED.glob(f"sglang_loads_{name}_*.shm"), *lent):
                shared.unlink(missing_ok=True)
    if not any(map(_listens, folder.glob("torch-shm-dir-*/manager.sock"))):
        shutil.rmtree(folder, ignore_errors=True)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def scratch_environment(folder: Path) -> dict[str, str]:
    """Return variables that place temporary files in the folder, except compiled kernels, which are used again."""
    return {"TMPDIR": str(folder), **kernel_cache_environment()}


KERNEL_CACHE_VARIABLE = "EVENKEEL_KERNEL_CACHE"
"""Environment variable with the folder of compiled kernels."""


_KERNEL_CACHES: Mapping[str, str] = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "",  # FlashInfer adds .cache/flashinfer
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",  # DeepGEMM's; SGLang 0.5.17 keeps it apart from its own
    "CUDA_CACHE_PATH": "nv",
}
"""Variable of a compiler → its folder below ours. Each tool names files by what they were compiled from, and renames
them into place or holds a lock: processes and hosts share the folder."""


def kernel_cache_environment() -> dict[str, str]:
    """Return variables that keep compiled kernels in a folder that outlives the process: EVENKEEL_KERNEL_CACHE, by
    default ~/.cache/evenkeel/kernels. Those that the user has set stay. Without a home, a folder of this user among the
    temporary files is used. Raises MachineError if the named folder cannot be written."""
    named = os.environ.get(KERNEL_CACHE_VARIABLE)
    usual = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "evenkeel/kernels")
    temporary = Path(tempfile.gettempdir(), f"evenkeel_kernels_{os.getuid()}")
    for folder in [Path(named)] if named else [usual, temporary]:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Code of another user would be run: in a folder that anyone may make, the owner counts.
            if os.access(folder, os.W_OK) and (named or folder.stat().st_uid == os.getuid()):
                own = {name: str(folder.absolute() / below) for name, below in _KERNEL_CACHES.items()}
                return {name: os.environ.get(name) or path for name, path in own.items()}
    if named:
        from pipeline.errors import MachineError

        raise MachineError(
            f"{KERNEL_CACHE_VARIABLE} is {named!r}, a folder that cannot be written; name another one, or unset it"
        )
    return {}


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]), int(sys.argv[1]))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, which COMMAND would inherit
        signal.signal(number, signal.SIG_DFL)
    for ignored in filter(None, sys.argv[3].split(",")):
        signal.signal(int(ignored), signal.SIG_IGN)
    os.execvp(sys.argv[4], sys.argv[4:])
