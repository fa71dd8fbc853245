"""How a command ends: its exit status, and one line on stderr where something was wrong.

    0  done     1  refused, or it failed: one line says why     2  the command line itself     130  Ctrl-C
    70 a fault of Even Keel's own: one line says where the traceback lies. EVENKEEL_TRACEBACK=1 prints it, whatever the
       error was

A raw traceback buries what the user could do about it. It is kept for whoever mends the fault.
"""

from __future__ import annotations

import errno
import os
import re
import select
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any

import typer

from pipeline.errors import EvenKeelError
from pipeline.importing import EXTRA_OF, REBUILD, how_to_install
from precision.text import one_line

TRACEBACK_VARIABLE = "EVENKEEL_TRACEBACK"
FAULT_EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h: a fault of the program, not of its input."""
ROOMS = frozenset({"precision", "pipeline", "megatron_bridge", "rollout_sglang", "launch", "evenkeel"})
"""Our own packages, which a wheel puts beside everybody's."""
_INTERRUPTED = 130
_PIPE_CLOSED = 141

_REMEDIES = {
    errno.ENOENT: "see whether the path is spelled right and its disk is mounted",
    errno.ENOTDIR: "a part of the path is a file; give another path",
    errno.EISDIR: "give the path of a file",
    errno.EEXIST: "give another path, or remove what is there",
    errno.ENOTEMPTY: "give another path, or remove what is there",
    errno.EACCES: "give this user the permission, or use another folder",
    errno.EPERM: "give this user the permission, or use another folder",
    errno.EROFS: "the file system is mounted read-only; use another folder",
    errno.ENOSPC: "free some disk space and start again",
    errno.EDQUOT: "this user's share of the disk is used up; free some and start again",
    errno.ENAMETOOLONG: "shorten the path or run.name",
    errno.ELOOP: "the path goes through links that lead in a circle; give another path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files",
    errno.ENOMEM: "free some memory and start again",
    errno.EIO: "the disk failed; look at the system's log, and use another one",
    errno.ESTALE: "the shared file system was mounted anew; start again",
}


def end_of(command: Callable[[], object]) -> int:
    """Run a command; returns the exit status, and says in one line what was wrong."""
    try:
        status = command()
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except typer.Exit as end:
        return _flushed(end.exit_code)
    except KeyboardInterrupt as interrupt:
        return _say(f"interrupted; {one_line(interrupt) or 'the same command goes on from here'}", _INTERRUPTED)
    except BaseException as error:
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            traceback.print_exc()
        return _told(error)


def _told(error: BaseException) -> int:
    match error:
        case EvenKeelError():
            return _say(f"error: {one_line(error)}", 1)
        case BrokenPipeError() if _stdout_is_closed():
            return _PIPE_CLOSED
        case ModuleNotFoundError() if (package := (error.name or "").split(".")[0]) in EXTRA_OF:
            return _say(f"error: this command needs {error.name}: {how_to_install(package)}", 1)
        case ImportError() | OSError() if (broken := _broken_package(error)) is not None:
            what = f"{type(error).__name__}: {one_line(error, 200)}"
            return _say(
                f"error: this Python environment is broken: {broken} cannot be imported ({what}); {REBUILD}; "
                "`evenkeel doctor` tries every package",
                1,
            )
        case OSError() if error.errno is not None:
            return _say(f"error: {os_error_line(error)}", 1)
        case MemoryError():
            return _say("error: this machine has too little memory for that; free some, or give the command less", 1)
        case _ if _is_usage(error):
            return _usage(error)
        case _:
            return _say(f"error: {_fault_line(error)}", FAULT_EXIT_CODE)


def _broken_package(error: BaseException) -> str | None:
    """Return the installed package that failed while it was imported; None where something else went wrong.

    A shared library that the loader misses is an ImportError, or from ctypes an OSError without a number.
    """
    if isinstance(error, OSError) and (error.errno is not None or ".so" not in str(error)):
        return None
    site, standard = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(site):
            package = file.relative_to(site).parts[0].removesuffix(".py")
            return None if package in ROOMS else package
        if not file.is_relative_to(standard) and not frame.filename.startswith("<"):
            return None
    return None


def os_error_line(error: OSError) -> str:
    """What could not be done with which file, and what helps, in one line."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    where = f"{one_line(' → '.join(names), 300)}: " if names else ""
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    remedy = _REMEDIES.get(error.errno or 0, "see what the system says about it")
    return f"{where}{one_line(error.strerror or error, 200)} ({name}); {remedy}"


def _fault_line(error: BaseException) -> str:
    what = f"{type(error).__name__}: {one_line(error, 200)}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    kept = _keep_traceback(error)
    there = f"the traceback is in {kept}" if kept is not None else f"set {TRACEBACK_VARIABLE}=1 to see the traceback"
    return f"this is a fault of Even Keel, not of what it was given ({what}{place}); {there}: please report it"


def _keep_traceback(error: BaseException) -> Path | None:
    """A file of its own in the temporary folder; None where there is no room for it."""
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="evenkeel-traceback-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(traceback.format_exception(error)))
        return Path(name)
    return None


def _is_usage(error: BaseException) -> bool:
    """Whether the command line itself is wrong. typer brings its own click, or uses the one that is installed."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def _usage(error: BaseException) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        return 2
    return _say(f"error: {usage_line(error)}", 2)


def _flushed(status: int) -> int:
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    return status


def _say(line: str, status: int) -> int:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    return status


def _stdout_is_closed() -> bool:
    """Whether it was our reader that went, as `head` does; then nothing more is written to it, at exit either."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return closed


_KEY_AND_VALUE = re.compile(r"\((\w[\w.]*=[^\s)]*)")


def usage_line(error: Any) -> str:
    """Of a click exception, without `error:` in front."""
    context = _context(error)
    command = "evenkeel" if context is None else context.command_path
    message = one_line(error.format_message(), 400).rstrip(".")
    return f"{message}; {_meant(error, message, context)}`{command} --help` says what it takes"


def _context(error: Any) -> Any:
    """Which command was read; errors of click's parser do not say, but the frames that they came through do."""
    found = getattr(error, "ctx", None)
    if found is None:
        seen = [frame.f_locals.get("ctx") for frame, _ in walk_tb(error.__traceback__)]
        found = next((one for one in reversed(seen) if hasattr(one, "command_path")), None)
    return found


def _meant(error: Any, message: str, context: Any) -> str:
    """`a recipe's key needs --set before it: --set run.steps=3; `, or nothing."""
    if not _takes_keys(context):
        return ""
    if "extra argument" in message and (given := _KEY_AND_VALUE.search(message)):
        return f"a recipe's key needs --set before it: --set {given[1]}; "
    if "No such option" in message and (keys := _keys_of(str(getattr(error, "option_name", "")))):
        return f"a recipe's key is given by --set: {keys}; "
    return ""


def _takes_keys(context: Any) -> bool:
    return context is not None and any("--set" in one.opts for one in context.command.params)


def _keys_of(option: str) -> str:
    """`--set learner.optimizer.lr=VALUE`, of an option that names a key of the recipe, here or in another trainer."""
    from pipeline.config.meant_keys import known_keys, meant_by

    told = meant_by(option.lstrip("-").replace("-", "_"))
    words = re.split(r"[\s?`]+", told) if told.startswith(("did you mean", "here it is")) else []
    return " or ".join(f"--set {key}=VALUE" for key in words if key in known_keys())
