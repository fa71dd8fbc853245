"""Read and write small files that several processes and hosts share.

Files are replaced atomically or created exclusively: a reader sees the old or the new content, never half of it.
Temporary names contain the host and a random number, since process ids repeat across containers. A full disk raises
DiskFullError, which is fatal: committed files stay, and the same command resumes once there is room.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, TypeVar

from pipeline.errors import DeadlineExceededError, DiskFullError, StoreError

NUMBER = "[0-9]{6}|[1-9][0-9]{6,17}"
"""The pattern of a number in file names, as `numbered` writes it; not `000003.bak`, `0000000003` or `٠٠٠٠٠٣`."""
FIRST_POLL_S = 0.01
_SLOWEST_POLL_S = 1.0
VISIBLE_S = 90.0
"""Longest time, with margin, until another host sees a new file: attributes are cached up to 60 s."""
OLD_S = 300.0
REREAD_S = 1.0
"""Seconds of retries for an unreadable file: shared file systems may show it empty, or fail, while it is replaced."""
MODEL_JSON_BYTES = 16 << 20
"""Largest JSON file that describes a model or its tokenizer, such as config.json: the largest have some MB."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, a used up quota, a file that may not grow."""
SPARE_BYTES = 1 << 20
"""Room for files beside the next one: events, records, a log's last lines."""
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of file systems without hard links. Other errors, such as a full disk, explain themselves."""
_OF_WHAT_LIES_THERE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.ENAMETOOLONG),
    None,  # raised by a library
)
"""Errors that damage can cause: a missing file, a folder, a circular link or a socket in its place, a bad offset."""
_TORCH_SAYS = (
    *("No space left on device", "Disk quota exceeded", "file write failed", "iostream error"),
    "unexpected pos ",  # its writer notices at the end that less was written
)
_UNITS = ("bytes", "KB", "MB", "GB", "TB")
_TEMPORARY = re.compile(r"\..+\.[\w-]+-[0-9a-f]{12}\.tmp")
T = TypeVar("T")


def unique_suffix() -> str:
    """Return `HOST-RANDOM`, unique across hosts."""
    host = re.sub(r"[^\w-]", "-", socket.gethostname())[:40]
    return f"{host}-{uuid.uuid4().hex[:12]}"


def temporary_name(path: Path) -> Path:
    """Return a hidden, unique name beside `path`, for incomplete content."""
    return path.with_name(f".{path.name}.{unique_suffix()}.tmp")


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def slower(pause_s: float) -> float:
    """Return the pause after one of `pause_s`, so that long waits poll a shared file system less often. Pauses stay a
    twentieth of the wait so far: every step begins with two such waits."""
    return min(1.05 * pause_s, _SLOWEST_POLL_S)


def await_visible(path: Path, deadline_s: float = VISIBLE_S) -> None:
    """Wait for a file that another host has made. Raises DeadlineExceededError."""
    give_up, pause_s = time.monotonic() + deadline_s, FIRST_POLL_S
    while not path.exists():
        if time.monotonic() >= give_up:
            raise DeadlineExceededError(
                f"{path} was made on another host, and is not seen here {deadline_s:g} s later; see whether this host "
                "has the run's file system mounted, and measure it with `evenkeel doctor --hosts`"
            )
        time.sleep(pause_s)
        pause_s = slower(pause_s)


def is_there(path: Path) -> bool:
    """Return whether `path` exists, also when another host has just made it. An NFS client remembers that a name was
    missing until it sees that the folder has changed, and it asks for that when the folder is opened."""
    with suppress(FileNotFoundError):
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    return path.exists()


def drop_listing(folder: Path) -> None:
    """Have this host list a folder anew: it may remember an older listing for a minute, until it changes the folder
    itself. A folder that is not there stays so."""
    probe = temporary_name(folder / "listing")
    with suppress(FileNotFoundError):
        probe.mkdir()
        probe.rmdir()


def changed_ns(folder: Path) -> int:
    """Return a time in ns that changes when a file of the folder comes, goes or is replaced; 0 without a folder."""
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime_ns
    return 0


def remove_leftovers(folder: Path, fence: Callable[[], None]) -> list[str]:
    """Delete temporary files that earlier starts of a role left in a folder of this role alone, and return their names.
    A superseded start that is still writing then fails, as it must. `fence` raises where a later start has taken over;
    it is called after the listing, so all listed files are older than this start or than that later one."""
    names = sorted(name for name in os.listdir(folder) if is_temporary(name)) if folder.is_dir() else []
    fence()
    for name in names:
        _remove(folder / name)
    return names


def remove_leftovers_of(path: Path) -> None:
    """Delete temporary files of `path`. A process that is still writing one fails."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[\w-]+\.tmp")
    for name in os.listdir(path.parent) if path.parent.is_dir() else []:
        if ours.fullmatch(name) and is_temporary(name):
            _remove(path.with_name(name))


def remove_old_leftovers(folders: Iterable[Path]) -> None:
    """Delete old temporary files in folders of several roles. A process that was frozen for minutes then fails."""
    for folder in folders:
        names = [*filter(is_temporary, os.listdir(folder) if folder.is_dir() else [])]
        if not names:
            continue
        # A host's clock may be ahead of the file system's, and new files would look old.
        probe, now = temporary_name(folder / "clock"), 0.0
        with suppress(OSError):
            probe.touch()
            now = probe.stat().st_mtime
            probe.unlink(missing_ok=True)
        for name in names:
            with suppress(OSError):
                path = folder / name
                if now - max(one.lstat().st_mtime for one in (path, *path.rglob("*"))) > OLD_S:
                    _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that no reader finds half of it: rename it first. Files that cannot be deleted at once, as on
    NFS while they are read, are left to the next start's `remove_leftovers`."""
    aside = temporary_name(folder)
    folder.rename(aside)
    _remove(aside)


def move_to_free_name(temporary: Path, target: Path) -> bool:
    """Rename a folder to `target` unless that is a folder with files; return whether it did. Durable either way."""
    try:
        temporary.rename(target)
        moved = True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        moved = False
    fsync_directory(target.parent)
    return moved


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` with `text`, durably: fsync of the file, rename, fsync of the folder."""
    with replacing(path) as file:
        file.write(text.encode())


def create_exclusively(path: Path, text: str) -> None:
    """Create `path` with `text`, complete and durable. Raises FileExistsError for all but the first process."""
    with creating(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` once it is written and durable."""
    with _durable(path) as (file, temporary):
        yield file
    temporary.replace(path)
    fsync_directory(path.parent)


@contextmanager
def creating(path: Path, before: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """Yield a new file that gets the name `path` once it is durable and `before` has not raised. Raises FileExistsError
    for a taken name: unlike a rename, a hard link replaces nothing."""
    with _durable(path) as (file, temporary):
        yield file
    try:
        before()
        try:
            os.link(temporary, path)
        except FileExistsError:
            # Over NFS, a successful link's answer may be lost and the request repeated.
            if temporary.stat().st_nlink != 2:
                raise
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            raise StoreError(
                f"{path} cannot be created by a hard link ({error.strerror}); put the run on a file system that has "
                "them (see `evenkeel doctor`)"
            ) from error
    except FileExistsError:
        fsync_directory(path.parent)  # the first process may not have synced yet, and the caller relies on the file
        raise
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


@contextmanager
def _durable(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as file:
            yield file, temporary
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


_synced: set[Path] = set()
"""Folders that this process has made durable, or found so."""


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably, if missing. Each is durable before another is made in it, so of those
    that are there only the deepest may have been left by a process that was killed before its fsync."""
    to_make = [folder.absolute()]
    while not to_make[-1].is_dir():
        to_make.append(to_make[-1].parent)
    deepest = to_make.pop()
    if deepest not in _synced:
        if os.access(deepest.parent, os.R_OK | os.W_OK):  # else no process of ours has made it
            fsync_directory(deepest.parent)
        _synced.add(deepest)
    for one in reversed(to_make):
        one.mkdir(exist_ok=True)
        fsync_directory(one.parent)
        _synced.add(one)


def fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_present(*folders: Path) -> None:
    """Make renames and removals durable, before a role finishes: no later start would repeat them."""
    for folder in folders:
        if folder.is_dir():
            fsync_directory(folder)


def machine_failure(error: BaseException) -> OSError | None:
    """Return the failure of a mount, disk, limit or permission behind `error`, if any: the file may be intact."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno not in _OF_WHAT_LIES_THERE:
            return cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError, and ValueError for anything else (a pipe would block)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ValueError("it is a folder, expected a file" if stat.S_ISDIR(mode) else "it is no regular file")


def read_at_most(path: Path, num_bytes: int) -> bytes:
    """Read a whole file. Raises as `open_regular`, and ValueError, without reading, for a larger file."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > num_bytes:
            raise ValueError(f"it is larger than {num_bytes >> 20} MiB")
        data = file.read(num_bytes + 1)
    if len(data) > num_bytes:
        raise ValueError(f"it is larger than {num_bytes >> 20} MiB")
    return data


def read_if_it_ends(path: Path, ending: bytes, num_bytes: int, otherwise: str) -> bytes:
    """Read a whole file if its last `num_bytes` contain `ending`, else raise ValueError(`otherwise`)."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        last = file.read(num_bytes)
        if ending not in last:
            raise ValueError(otherwise)
        file.seek(0)
        return file.read()


def asked_again(look: Callable[[], T], *, is_whole: Callable[[T], bool] | None = None) -> T:
    """Return the result of `look` once `is_whole`, or after REREAD_S. Raises FileNotFoundError or a lasting OSError."""
    give_up = time.monotonic() + REREAD_S
    while True:
        is_last = time.monotonic() > give_up
        try:
            found = look()
            if is_whole is None or is_whole(found) or is_last:
                return found
        except FileNotFoundError:
            raise
        except OSError:
            if is_last:
                raise
        time.sleep(REREAD_S / 20)


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raise DiskFullError when the file system of `folder` lacks room for `num_bytes` more; quotas are not seen."""
    with suppress(OSError):  # a file system that cannot tell fails when it is full
        found = os.statvfs(folder)
        free, needed = found.f_bavail * found.f_frsize, num_bytes + SPARE_BYTES
        if free < needed:
            raise DiskFullError(
                f"the disk of {folder} is too full for {what}: it needs {amount(needed)}, {amount(free)} are free; "
                f"free {amount(needed - free)} more, then give the same command: it goes on from what is committed"
            )


@contextmanager
def as_disk_full(folder: Path, what: str = "a file of it") -> Iterator[None]:
    """Raise DiskFullError for errors in the block that a full disk caused, torch's errors without an errno included."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        met: BaseException | None = error
        for _ in range(20):  # an error and its causes
            if isinstance(met, OSError) and met.errno in FULL:
                what, trouble = str(met.filename or what), os.strerror(met.errno or 0)
                break
            if isinstance(met, RuntimeError) and any(words in str(met) for words in _TORCH_SAYS):
                trouble = " ".join(str(met).split())[:200]
                break
            met = None if met is None else met.__cause__ or met.__context__
        else:
            raise
        with suppress(OSError):
            found = os.statvfs(folder)
            trouble += f", {amount(found.f_bavail * found.f_frsize)} are free"
        raise DiskFullError(
            f"the disk of {folder} is full: {what} could not be written ({trouble}); free some space, then give the "
            "same command: it goes on from what is committed"
        ) from error


def size_of(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        if path.is_file():
            found += path.stat().st_size
    return found


def amount(num_bytes: float) -> str:
    """Format a size, as `3.4 GB`."""
    power = min(int(math.log(max(num_bytes, 1), 1000) + 1e-9), len(_UNITS) - 1)
    return f"{num_bytes / 1000**power:.{min(power, 1)}f} {_UNITS[power]}"
