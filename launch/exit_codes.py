"""End a command with an exit status and, after an error, one line on stderr.

    0  done     1  refused or failed: one line says why     2  usage error     130  Ctrl-C
    70 a fault of Even Keel: one line names the file with the traceback, which would bury that line

EVENKEEL_TRACEBACK=1 prints the traceback of any error.
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
"""Even Keel's packages, which a wheel puts beside all others."""
_USAGE, _INTERRUPTED, _PIPE_CLOSED = 2, 130, 141
_KEY_AND_VALUE = re.compile(r"\((\w[\w.]*=[^\s)]*)")

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


def run_command(command: Callable[[], object]) -> int:
    """Run a command and return its exit status; print an error as one line."""
    try:
        status = command()
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except typer.Exit as end:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        return end.exit_code
    except KeyboardInterrupt as interrupt:
        line = f"interrupted; {one_line(interrupt) or 'the same command goes on from here'}"
        status = _INTERRUPTED
    except BaseException as error:
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            traceback.print_exc()
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            return _PIPE_CLOSED
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            return _USAGE
        line, status = _line_and_status(error)
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    return status


def _line_and_status(error: BaseException) -> tuple[str, int]:
    what = f"{type(error).__name__}: {one_line(error, 200)}"
    match error:
        case EvenKeelError():
            return f"error: {one_line(error)}", 1
        case ModuleNotFoundError() if (package := (error.name or "").split(".")[0]) in EXTRA_OF:
            return f"error: this command needs {error.name}: {how_to_install(package)}", 1
        case ImportError() | OSError() if (broken := _broken_package(error)) is not None:
            return (
                f"error: this Python environment is broken: {broken} cannot be imported ({what}); {REBUILD}; "
                "`evenkeel doctor` tries every package"
            ), 1
        case OSError() if error.errno is not None:
            return f"error: {os_error_line(error)}", 1
        case MemoryError():
            return "error: this machine has too little memory for that; free some, or give the command less", 1
        # typer brings its own click, or uses the one that is installed
        case _ if any(kind.__name__ == "ClickException" for kind in type(error).__mro__):
            return f"error: {_usage_line(error)}", _USAGE
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    there = f"set {TRACEBACK_VARIABLE}=1 to see the traceback"
    with suppress(OSError):  # the disk may be full
        descriptor, name = tempfile.mkstemp(prefix="evenkeel-traceback-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(traceback.format_exception(error)))
        there = f"the traceback is in {name}"
    fault = f"this is a fault of Even Keel, not of what it was given ({what}{place})"
    return f"error: {fault}; {there}: please report it", FAULT_EXIT_CODE


def _broken_package(error: BaseException) -> str | None:
    """Return the installed package whose import failed, or None. A missing shared library is an ImportError, or from
    ctypes an OSError without a number."""
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
    """Return the files of an OSError, its cause and a remedy in one line."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    where = f"{one_line(' → '.join(names), 300)}: " if names else ""
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    remedy = _REMEDIES.get(error.errno or 0, "see what the system says about it")
    return f"{where}{one_line(error.strerror or error, 200)} ({name}); {remedy}"


def _stdout_is_closed() -> bool:
    """Return whether the reader of stdout is gone, as `head` goes; then stdout becomes /dev/null."""
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


def _usage_line(error: Any) -> str:
    """Return the fault of a command line, with the words that were meant. Other trainers take keys of the configuration
    as `key=value` (Hydra) or as `--key value` (argparse); here they stand behind `--set`."""
    context = getattr(error, "ctx", None)
    if context is None:  # errors of click's parser do not say which command was read; the frames do
        seen = [frame.f_locals.get("ctx") for frame, _ in walk_tb(error.__traceback__)]
        context = next((one for one in reversed(seen) if hasattr(one, "command_path")), None)
    command = "evenkeel" if context is None else context.command_path
    message = one_line(error.format_message(), 400).rstrip(".")
    meant = ""
    takes_keys = context is not None and any("--set" in one.opts for one in context.command.params)
    if takes_keys and "extra argument" in message and (given := _KEY_AND_VALUE.search(message)):
        meant = f"a recipe's key needs --set before it: --set {given[1]}; "
    if takes_keys and "No such option" in message:
        from pipeline.config.meant_keys import known_keys, meant_by

        told = meant_by(str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_"))
        words = re.split(r"[\s?`]+", told) if told.startswith(("did you mean", "here it is")) else []
        if keys := " or ".join(f"--set {key}=VALUE" for key in words if key in known_keys()):
            meant = f"a recipe's key is given by --set: {keys}; "
    return f"{message}; {meant}`{command} --help` says what it takes"
