"""Build a virtual environment from a complete lock file: `python3.11 ops/install.py VENV LOCK`.

Packages are installed with --no-deps: the lock names every one, and SGLang's own list would bring gigabytes that only
GPUs need. Torch alone may need more than the lock has: where the index has no CPU build, its CUDA build comes with
packages of its own. Three pip processes share the work, since unpacking and not the network is the slow part. Triton,
for tests of kernels, lies in VENV/triton and not on the path. VENV/.installed is written last, when torch,
Megatron-Core and SGLang can be imported there.
"""

from __future__ import annotations

import subprocess
import sys
import time
import venv
from pathlib import Path

HEAVY = ("torch", "sglang", "sglang-router", "triton", "transformers", "scipy", "xgrammar", "sympy")
"""About half of the bytes: one pip process unpacks these, another the rest."""
LINE_EVERY_S = 4.0
MUST_IMPORT = ("torch", "megatron.core", "sglang")
SHOWN = ("Collecting", "Downloading", "Installing", "Building", '{"module"')
"""Beginnings of the lines of a log that say what goes on."""
ABSENT = """
from importlib import metadata
from pip._vendor.packaging.requirements import Requirement
for need in map(Requirement, metadata.requires("torch") or []):
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        try:
            metadata.version(need.name)
        except metadata.PackageNotFoundError:
            print(need.name)
"""
"""Prints what the torch of an environment needs and the environment lacks."""


def main(folder: Path, lock: Path) -> None:
    """Fill the environment, or end with one line that says why not. A second call goes on where the first ended."""
    stamp, python = folder / ".installed", folder / "bin" / "python"
    stamp.unlink(missing_ok=True)
    if not python.exists():
        say(f"making {folder}")
        venv.create(folder, with_pip=True)
    pins = [line for line in lock.read_text(encoding="utf-8").splitlines() if "==" in line]
    heavy = [pin for pin in pins if pin.split("==")[0] in HEAVY]
    say(f"installing {len(pins)} pinned packages into {folder}; 2.5 GB, about two minutes where the network is fast")
    pip(
        folder,
        ["--no-deps", *heavy],
        ["--no-deps", *(pin for pin in pins if pin not in heavy)],
        ["--no-deps", "--upgrade", "--target", str(folder / "triton"), "-r", "ops/locks/triton.txt"],
    )
    lacking = subprocess.run([python, "-c", ABSENT], capture_output=True, encoding="utf-8", check=True).stdout.split()
    if lacking:
        say(
            f"this index has torch for CUDA only. It works without a GPU and needs more packages ({len(lacking)} and "
            "theirs): 7 GB in all instead of 2.5. To have the small one: Ctrl-C, make clean, then make install with "
            "the PyTorch project's index of CPU wheels in PIP_EXTRA_INDEX_URL"
        )
        pip(folder, ["--constraint", str(lock), *(pin for pin in pins if pin.startswith("torch=="))])
    pip(folder, ["--no-deps", "--no-build-isolation", "--editable", "."])
    say(f"trying to import {', '.join(MUST_IMPORT)}")
    if failed := run(folder, ["-P", "-m", "launch.doctor.imports", *MUST_IMPORT]):
        print("".join(f"    {line}\n" for line in lines_of(failed)[-3:]))
        sys.exit(f"error: {folder} is full, and broken: see above; make clean, then make install again")
    stamp.touch()
    say(f"ready: {folder}; for the command evenkeel: source {folder}/bin/activate")


def pip(folder: Path, *jobs: list[str]) -> None:
    """Run `pip install` with each list of arguments, all at a time. Ends the program where one fails."""
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    if failed := run(folder, *(["-m", "pip", "install", *options, *job] for job in jobs)):
        print("".join(f"    {line}\n" for line in lines_of(failed)[-12:]))
        sys.exit("error: pip failed, its last lines are above; mend what they name, then call the same again")


def run(folder: Path, *commands: list[str]) -> Path | None:
    """Run the environment's Python once for each list of arguments, all at a time, with a line every few seconds.

    Returns the log of the first that fails, and stops the others; None where all succeed.
    """
    logs = [folder / f"install-{number}.log" for number in range(len(commands))]
    running = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("w", encoding="utf-8") as file:
            python = [str(folder / "bin" / "python"), *command]
            running.append(subprocess.Popen(python, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
    site = next((folder / "lib").glob("python3.*")) / "site-packages"
    shown = time.monotonic()
    try:
        while not all(process.poll() == 0 for process in running):
            for process, log in zip(running, logs, strict=True):
                if process.poll():
                    return log
            if time.monotonic() - shown > LINE_EVERY_S:
                shown = time.monotonic()
                busy = [log for process, log in zip(running, logs, strict=True) if process.poll() is None]
                doing = [[line for line in lines_of(log) if line.startswith(SHOWN)][-1:] for log in busy]
                there = len(list(site.glob("*.dist-info")))
                say(f"{there} packages are there; " + "; ".join(line[:50] for lines in doing for line in lines))
            time.sleep(0.1)
        return None
    finally:
        for process in running:
            process.kill()
            process.wait()


def lines_of(log: Path) -> list[str]:
    """Return the lines of a log that hold anything."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"{time.monotonic() - BEGUN:4.0f} s  {text}", flush=True)


if __name__ == "__main__":
    BEGUN = time.monotonic()
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        sys.exit(f"error: need Python 3.11 or 3.12, got {sys.version.split()[0]}; make PYTHON=... names another")
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
