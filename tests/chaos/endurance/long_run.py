"""A run of many steps with the real programs, watched from outside: every series of measurements must stay flat."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from pipeline.data.event_log import read_events
from pipeline.data.run_directory import RunDirectory
from tests.chaos.endurance.slopes import BOUNDS, HORIZON, Slope, slope
from tests.chaos.endurance.watch import files, holdings, kinds, names
from tests.chaos.kills.driver import write_recipe
from tests.chaos.kills.plan import Plan
from tests.support.runs import ROOT, make_model
from tests.support.runs import environment as usual

EVERY_STEPS = 5
"""Between two measurements."""
POLL_S = 0.25
GRACE_S = 60.0
KEEP = 2
"""Policies and checkpoints that the recipe keeps."""


def stay_flat(
    steps: int,
    folder: Path,
    details: dict[str, Any],
    *,
    every: int = EVERY_STEPS,
    series: Sequence[str] = tuple(BOUNDS),
    horizon: int = HORIZON,
) -> str:
    """The verdict on a run of `steps` steps in `folder`, by those `series`. Called again it goes on where it was."""
    run, measured = begin(folder.absolute(), steps), folder / "measured.jsonl"
    train = start_train(folder.absolute())
    try:
        _watch(train, run, folder / "tmp", measured, every)
        status = train.wait(GRACE_S)
    finally:
        end(train)
        train.wait(GRACE_S)
    details["files"] = dict(kinds(run))
    if status != 0:
        return f"train ended with {status}: {(folder / 'train.err').read_text()[-300:].strip()}"
    shutil.rmtree((folder / "tmp").resolve(), ignore_errors=True)
    return verdict(measured, run, details, series, horizon)


def begin(folder: Path, steps: int, **plan: Any) -> Path:
    """A recipe for a long run in `folder`, and the directory that the run will have."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tmp").is_dir():
        (folder / "tmp").unlink(missing_ok=True)
        (folder / "tmp").symlink_to(tempfile.mkdtemp(prefix="ek-"))  # engines' sockets want a short path
    if not (folder / "model" / "config.json").exists():
        make_model(folder / "model")
    long = Plan("long", plan.get("schedule", "async"), plan.get("channel", "disk"), "tensor_parallel", ())
    overrides = dict(
        run=dict(steps=steps),
        rollout=dict(engines=2),
        learner=dict(tensor_parallel=1, data_parallel=1),
        evaluation=dict(every=50),
        checkpoint=dict(every=10, keep=KEEP),
        weights=dict(keep=KEEP),
    )
    for name, section in plan.get("overrides", {}).items():
        overrides[name] = {**overrides.get(name, {}), **section}
    long.overrides.update(overrides)
    write_recipe(folder, folder / "model", long)
    return folder / "runs" / "run"


def start_train(folder: Path) -> psutil.Popen:
    """`evenkeel train`, in a session and, where the machine permits it, with a /dev/shm of its own."""
    environment = {name: value for name, value in usual().items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "launch.cli", "train", str(folder / "run.yaml"), "--json"]
    with (folder / "train.out").open("ab") as out, (folder / "train.err").open("ab") as err:
        return psutil.Popen(
            [*own_shm(), *command],
            cwd=ROOT,
            env={**environment, "TMPDIR": str((folder / "tmp").resolve())},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def own_shm() -> list[str]:
    """A command before a command, which gives it a /dev/shm of its own; empty where that is not permitted."""
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
    try:
        permitted = subprocess.run([*mount, "true"], capture_output=True).returncode == 0
    except OSError:
        permitted = False
    return mount if permitted else []


def shm_of(process: psutil.Process) -> Path:
    """The /dev/shm that a process sees."""
    return Path("/proc", str(process.pid), "root/dev/shm")


def steps_done(run: Path) -> int:
    """Steps that the newest files of metrics name; cheap, and looked at from outside."""
    newest = max((run / "logprobs").glob("[0-9]*.npy"), default=None)
    return 0 if newest is None else int(newest.stem.partition("-")[0]) + 1


def _watch(train: psutil.Popen, run: Path, tmp: Path, measured: Path, every: int) -> None:
    """Measure every few steps, until the run has ended."""
    due = every
    while train.poll() is None:
        time.sleep(POLL_S)
        if (step := steps_done(run)) >= due:
            due = step + every
            line = dict(step=step, time=time.time(), **measure(train, run, tmp))
            with measured.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def measure(train: psutil.Process, run: Path, tmp: Path) -> dict[str, Any]:
    """What every process holds, and what lies about."""
    found: dict[str, Any] = {}
    for name, process in names(train).items():
        try:
            found[name] = dict(pid=process.pid, **holdings(process))
        except psutil.Error:
            continue
    return dict(processes=found, files=files(shm_of(train), tmp, run))


def verdict(measured: Path, run: Path, details: dict[str, Any], series: Sequence[str], horizon: int) -> str:
    """From the measurements of the newest start of the run; details name each series with its slope."""
    slopes = [one for one in slopes_of(measured, horizon) if one.series.rpartition(".")[2] in series]
    details["slopes"] = [str(one) for one in slopes]
    details["uncertain"] = [one.series for one in slopes if one.is_flat and not one.is_certain]
    wrong = [f"grows: {one}" for one in slopes if not one.is_flat]
    directory = RunDirectory(run)
    for folder in (directory.policies, directory.checkpoints):
        kept = [path.name for path in folder.iterdir() if path.is_dir() and path.name.isdigit()]
        if len(kept) > KEEP + 1:
            wrong.append(f"{len(kept)} folders in {folder.name}, {KEEP} are kept")
    restarts = [f"{event['process']}: {event['reason']}" for event in read_events(run, "restarted")]
    wrong += [f"restarted without a reason of ours: {said}" for said in restarts]
    return "; ".join(wrong) or "ok"


def slopes_of(measured: Path, horizon: int) -> list[Slope]:
    """Every series that one process has over the whole time."""
    steps: dict[str, list[float]] = defaultdict(list)
    values: dict[str, list[float]] = defaultdict(list)
    lines = [json.loads(line) for line in measured.read_text(encoding="utf-8").splitlines()]
    last = {name: process["pid"] for name, process in lines[-1]["processes"].items()}
    for line in lines:
        rows = {
            f"{name}.{key}": value
            for name, process in line["processes"].items()
            if process["pid"] == last.get(name)
            for key, value in process.items()
            if key != "pid"
        }
        rows |= {f"run.{key}": value for key, value in line["files"].items()}
        for series, value in rows.items():
            steps[series].append(line["step"])
            values[series].append(value)
    return [
        slope(name, steps[name], values[name], horizon) for name in sorted(values) if len(values[name]) > len(lines) / 2
    ]


def end(train: psutil.Process) -> list[str]:
    """Kill what is left of a run. Returns what that was, by command line."""
    try:
        left = [*train.children(recursive=True), *([train] if train.is_running() else [])]
    except psutil.NoSuchProcess:
        return []
    names_left = [" ".join(one.cmdline())[-100:] for one in left if one.is_running()]
    for one in left:
        try:
            os.kill(one.pid, 9)
        except ProcessLookupError:
            continue
    return names_left
