"""Read and write small files that several processes, and several hosts, share.

A file is replaced atomically or created exclusively: a reader sees the old one or the new one, never half of it.
Temporary names hold the host and a random number: process ids repeat, from one container to the next. A full disk is
met by DiskFullError, which is fatal: what is committed stays, and the same command goes on once there is room.
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
"""Regular expression of a number in the name of a file or folder, as `numbered` writes it. Of what others leave beside
ours, `000003.bak` is none, nor are `0000000003`, `٠٠٠٠٠٣`, or two hundred digits."""
FIRST_POLL_S = 0.01
_SLOWEST_POLL_S = 1.0
VISIBLE_S = 90.0
"""Longest time, with margin, until a file that one host made is seen by another: attributes are cached up to 60 s."""
OLD_S = 300.0
REREAD_S = 1.0
"""How long a file that cannot be read is read again: file systems of several hosts may show it empty, or answer with an
error, for a moment while it is replaced."""
MODEL_JSON_BYTES = 16 << 20
"""Of a JSON file that describes a model or its tokenizer, such as config.json: the largest have some MB."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, a used up quota, a file that may not grow."""
SPARE_BYTES = 1 << 20
"""For what is written beside it: events, records, a log's last lines."""
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""What file systems answer that have none. Other errors, such as a full disk, say themselves what is wrong."""
_OF_WHAT_LIES_THERE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.ENAMETOOLONG),
    None,  # raised by a library
)
"""What damage can make the system say: the file is missing, or a folder, a link in a circle or a socket, or it names a
place in it that cannot be."""
_TORCH_SAYS = (
    *("No space left on device", "Disk quota exceeded", "file write failed", "iostream error"),
    "unexpected pos ",  # its writer finds at the end that less was written
)
_UNITS = ("bytes", "KB", "MB", "GB", "TB")
_TEMPORARY = re.compile(r"\..+\.[\w-]+-[0-9a-f]{12}\.tmp")
T = TypeVar("T")


def unique_suffix() -> str:
    """Return `HOST-RANDOM`, which no other call returns, here or on another host."""
    host = re.sub(r"[^\w-]", "-", socket.gethostname())[:40]
    return f"{host}-{uuid.uuid4().hex[:12]}"


def temporary_name(path: Path) -> Path:
    """Return a name beside `path`, hidden and unique, for what is not complete yet."""
    return path.with_name(f".{path.name}.{unique_suffix()}.tmp")


def is_temporary(name: str) -> bool:
    """Return whether `temporary_name` made the name."""
    return _TEMPORARY.fullmatch(name) is not None


def slower(pause_s: float) -> float:
    """Return the pause after one of `pause_s`: a long wait asks a shared file system ever less often. A pause is a
    twentieth of what was waited before it, so that what came meanwhile is seen as soon: every step begins by two such
    waits."""
    return min(1.05 * pause_s, _SLOWEST_POLL_S)


def await_visible(path: Path, deadline_s: float = VISIBLE_S) -> None:
    """Wait for a file that is known to be there, but that another host made. Raises DeadlineExceededError."""
    give_up, pause_s = time.monotonic() + deadline_s, FIRST_POLL_S
    while not path.exists():
        if time.monotonic() >= give_up:
            raise DeadlineExceededError(
                f"{path} was made on another host, and is not seen here {deadline_s:g} s later; see whether this host "
                "has the run's file system mounted, and measure it with `evenkeel doctor --hosts`"
            )
        time.sleep(pause_s)
        pause_s = slower(pause_s)


def remove_leftovers(folder: Path, fence: Callable[[], None]) -> list[str]:
    """Delete the temporary files and folders that earlier starts of a role left in a folder that this role alone
    writes. Returns their names. A superseded start may still be writing one: it fails, as it must.

    `fence` raises where a later start has taken over. It is called after the listing, so whoever was listed had begun
    before this start, or before that later one.
    """
    names = sorted(name for name in os.listdir(folder) if is_temporary(name)) if folder.is_dir() else []
    fence()
    for name in names:
        _remove(folder / name)
    return names


def remove_leftovers_of(path: Path) -> None:
    """Delete what killed processes left under temporary names of `path`. Who is still at work on one fails."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[\w-]+\.tmp")
    for name in os.listdir(path.parent) if path.parent.is_dir() else []:
        if ours.fullmatch(name) and is_temporary(name):
            _remove(path.with_name(name))


def remove_old_leftovers(folders: Iterable[Path]) -> None:
    """Delete temporary files and folders that killed processes left in folders that several roles write. Complete ones
    take milliseconds; who was frozen for minutes fails when it goes on."""
    for folder in folders:
        names = [*filter(is_temporary, os.listdir(folder) if folder.is_dir() else [])]
        if not names:
            continue
        # A host's own clock may be ahead of the file system's, and what others are writing would look old.
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
    """Delete a folder that no reader may find half deleted: it loses its name first. What cannot be deleted at once, as
    on NFS while it is read, is left to the next start's `remove_leftovers`."""
    aside = temporary_name(folder)
    folder.rename(aside)
    _remove(aside)


def move_to_free_name(temporary: Path, target: Path) -> bool:
    """Give a folder the name `target`, unless a folder that is not empty has it. Returns whether it did. Durable in
    both cases: whoever was first may not have come to that."""
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
    """Create `path` with `text`, durably and complete. Of several processes, on any host, only one succeeds.

    Raises FileExistsError when the file is there already.
    """
    with creating(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name `path`, in place of what had it, once it is written and durable."""
    with _durable(path) as (file, temporary):
        yield file
    temporary.replace(path)
    fsync_directory(path.parent)


@contextmanager
def creating(path: Path, before: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """A new file that takes the name `path` once it is written and durable, and `before` has not raised. Raises
    FileExistsError when another file has the name by then: a hard link, unlike a rename, never replaces one."""
    with _durable(path) as (file, temporary):
        yield file
    try:
        before()
        try:
            os.link(temporary, path)
        except FileExistsError:
            # Over NFS the answer to a link that succeeded may be lost, and asked again.
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
        fsync_directory(path.parent)  # whoever was first may not have come to that, and the caller relies on the file
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


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, durably; nothing if it is there."""
    missing = [one for one in (folder, *folder.parents) if not one.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in reversed(missing):
        fsync_directory(one.parent)


def fsync_directory(directory: Path) -> None:
    """Make renames inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_present(*folders: Path) -> None:
    """Make renames and removals inside those of the folders durable that are there: before a role says that it has
    finished, for nobody starts it again to remove what a power cut would bring back."""
    for folder in folders:
        if folder.is_dir():
            fsync_directory(folder)


def machine_failure(error: BaseException) -> OSError | None:
    """Return the failure of a mount, a disk, a limit or a permission that made `error`, if one did: it says nothing
    about what was written, and may be gone the next time."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno not in _OF_WHAT_LIES_THERE:
            return cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read. Raises ValueError for what is none (a pipe would be waited for), and OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ValueError("it is a folder, expected a file" if stat.S_ISDIR(mode) else "it is no regular file")


def read_at_most(path: Path, num_bytes: int) -> bytes:
    """Return a whole file. Raises as `open_regular` does, and ValueError for a larger file, of which nothing is
    read."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > num_bytes:
            raise ValueError(f"it is larger than {num_bytes >> 20} MiB")
        data = file.read(num_bytes + 1)
    if len(data) > num_bytes:
        raise ValueError(f"it is larger than {num_bytes >> 20} MiB")
    return data


def read_if_it_ends(path: Path, ending: bytes, num_bytes: int, otherwise: str) -> bytes:
    """Return a whole file of any size, of which only the last `num_bytes` are read unless `ending` is in them. Raises
    as `open_regular` does, and ValueError, which says `otherwise`."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        last = file.read(num_bytes)
        if ending not in last:
            raise ValueError(otherwise)
        file.seek(0)
        return file.read()


def asked_again(look: Callable[[], T], *, is_whole: Callable[[T], bool] = lambda _: True) -> T:
    """Return what `look` returns, as soon as that `is_whole`, or in the end. Raises FileNotFoundError at once, and
    another OSError where it stays for REREAD_S."""
    give_up = time.monotonic() + REREAD_S
    while True:
        is_last = time.monotonic() > give_up
        try:
            if is_whole(found := look()) or is_last:
                return found
        except FileNotFoundError:
            raise
        except OSError:
            if is_last:
                raise
        time.sleep(REREAD_S / 20)


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raise DiskFullError when the file system of `folder` has no room for `num_bytes` more (a quota is met later)."""
    with suppress(OSError):  # a file system that cannot say it will say it when it is full
        found = os.statvfs(folder)
        free, needed = found.f_bavail * found.f_frsize, num_bytes + SPARE_BYTES
        if free < needed:
            raise DiskFullError(
                f"the disk of {folder} is too full for {what}: it needs {amount(needed)}, {amount(free)} are free; "
                f"free {amount(needed - free)} more, then give the same command: it goes on from what is committed"
            )


@contextmanager
def as_disk_full(folder: Path, what: str = "a file of it") -> Iterator[None]:
    """Raise DiskFullError for whatever a full disk made the block raise, torch's errors without a number included."""
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
    """Return how many bytes all files in a folder, and in those within it, have."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def amount(num_bytes: float) -> str:
    """Return `3.4 GB`."""
    power = min(int(math.log(max(num_bytes, 1), 1000) + 1e-9), len(_UNITS) - 1)
    return f"{num_bytes / 1000**power:.{min(power, 1)}f} {_UNITS[power]}"
