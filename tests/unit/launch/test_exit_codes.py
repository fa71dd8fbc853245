"""How a command ends: one line and an exit status, whatever it met."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from launch.exit_codes import FAULT_EXIT_CODE, run_command
from pipeline.errors import RecipeError
from tests.support.runs import ROOT, evenkeel


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RecipeError("a\nb\x1b[2J"), 1, "error: a b\\x1b[2J"),
        (RecipeError("x" * 25_000_000), 1, "error: xxx"),
        (OSError(errno.ENOSPC, "No space left on device", "/runs/a"), 1,
         "error: /runs/a: No space left on device (ENOSPC); free some disk space"),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/a", None, "/runs/b"), 1,
         "error: /runs/a → /runs/b: Permission denied (EACCES); give this user the permission"),
        (OSError(errno.EROFS, "Read-only file system", "a\nb"), 1, "error: a b: Read-only file system (EROFS)"),
        (OSError(errno.ENOTBLK, "Block device required"), 1, "error: Block device required (ENOTBLK); see what"),
        (MemoryError(), 1, "error: this machine has too little memory"),
        (KeyboardInterrupt(), 130, "interrupted; the same command goes on from here"),
        (ModuleNotFoundError("x", name="torch.nn"), 1, "error: this command needs torch.nn: pip install"),
        (typer.BadParameter("y" * 10_000), 2, "error: Invalid value: yyy"),
    ],
)  # fmt: skip
def test_one_line_and_a_status(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(raising(error)) == status
    told = capsys.readouterr().err
    assert told.startswith(line)
    assert told.count("\n") == 1
    assert len(told) < 2100


@pytest.mark.parametrize(
    "source",
    ["import ctypes; ctypes.CDLL('libgone.so.9')", "from absent_part import x", "raise ImportError('libc++.so: no')"],
)
def test_a_package_that_cannot_be_imported_is_a_broken_environment(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "package_with_a_fault.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", {"purelib": str(tmp_path), "stdlib": os.path.dirname(os.__file__)}.get)

    def command() -> None:
        import package_with_a_fault  # noqa: F401

    assert run_command(command) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: this Python environment is broken: package_with_a_fault cannot be imported (")
    assert line.count("\n") == 1


def test_a_fault_of_ours_is_one_line_and_its_traceback_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_command(raising(KeyError("x\ny"))) == FAULT_EXIT_CODE
    told = capsys.readouterr().err
    (kept,) = tmp_path.glob("evenkeel-traceback-*.txt")
    assert told.startswith("error: this is a fault of Even Keel, not of what it was given (KeyError: 'x\\ny'")
    assert str(kept) in told
    assert told.count("\n") == 1
    assert "Traceback (most recent call last)" in kept.read_text()


@pytest.mark.parametrize(("command", "status"), [(lambda: None, 0), (raising(typer.Exit(1)), 1)])
def test_what_is_no_error(command: Callable[[], None], status: int) -> None:
    assert run_command(command) == status


def test_a_broken_pipe_that_is_not_ours_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(BrokenPipeError(errno.EPIPE, "Broken pipe"))) == 1
    assert "Broken pipe (EPIPE)" in capsys.readouterr().err


def test_a_reader_that_goes_is_no_error() -> None:
    program = [sys.executable, "-m", "launch.cli", "recipe", "--schema"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nosuch"], "error: No such command 'nosuch'"),
        (["train", "--nosuch"], "error: No such option: --nosuch"),
        (["runs", "show"], "error: Missing argument 'run'"),
        (["trajectories", "show", "x", "nine"], "error: Invalid value for 'batch'"),
        (["trajectories", "show", "x", "9" * 5000], "error: Invalid value for 'batch'"),
        (["plan", "demo", "--gpus", "0", "--gpu-gib", "80"], "error: Invalid value for '--gpus'"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], line: str) -> None:
    done = evenkeel(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 600
