"""The commands of a page of the documentation, run in one shell in an empty folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.pages import ROOT


def run_page(commands: str, folder: Path, programs: Path, deadline_s: float, without: str = "") -> str:
    """What they said. They find `evenkeel` and `python3` as pip installs them, in `programs`; variables of the
    environment that begin with `without` are left out. What they left running is ended. Fails where one of them does.
    """
    for name, arguments in (("evenkeel", f" {programs}/start.py"), ("python3", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "start.py").write_text("from launch.cli import main\n\nmain()\n")
    environment = {key: value for key, value in os.environ.items() if not (without and key.startswith(without))}
    environment |= dict(PATH=f"{programs}:{os.environ['PATH']}", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    said = folder / "said.txt"
    with said.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-c", f"set -eu\n{commands}"],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            status: int | str = shell.wait(deadline_s)
        except subprocess.TimeoutExpired:
            status = f"not done after {deadline_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # nothing runs in the background
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait(20)
    assert status == 0, f"status: {status}\n{said.read_text()[-4000:]}"
    return said.read_text()
