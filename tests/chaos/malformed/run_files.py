"""A run directory in which files are damaged, replaced or joined by strangers, and the commands that read one."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from launch.convert.new_model import new_model
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from tests.chaos.malformed.mutations import judged_line, mutated_bytes, mutated_data
from tests.support.batches import batch_of_rewards
from tests.support.runs import evenkeel
from tests.support.written_runs import write_run

COUNT = 1000
IN_MAKE_TEST = 10
_STRANGERS = (
    "000003.bak", "latest", "a\nb.jsonl", "\x1b[2J.json", "x.json", "x.jsonl", ".jsonl", "-000001.jsonl", "9" * 200,
    "learner-000001.jsonl.gz", "learner-٠٠٠٠٠١.jsonl", "000001.zarr.zip.bak", "x.npy", "00000٣.json", ".DS_Store",
)  # fmt: skip
_NOT_OURS = ("model/", "base/")
"""Other tries are about models."""


def prepare() -> None:
    """Makes the run that the tries change."""
    _good()


@cache
def _good() -> Path:
    """A run of three steps, with batches, log-probabilities and a policy. It lives as long as the process."""
    root = Path(tempfile.mkdtemp(prefix="evenkeel-run-files-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    new_model(root / "base", hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
    overrides = dict(model=dict(path=str(root / "base")), rollout=dict(prompts_per_batch=2, group_size=2))
    run = RunDirectory(write_run(root, 3, steps=3, overrides=overrides))
    store = BatchStore(run.batches)
    for index in range(3):
        batch = batch_of_rewards([[1.0, 0.0], [0.5, 0.25]], index=index, seed=index, vocabulary=40)
        batch.group[:] += 2 * index
        object.__setattr__(batch, "next_group", 2 * (index + 1))
        store.commit(batch)
        run.write_learner_logprobs(index, np.full(len(batch.rollout_logprobs), -1.0, np.float32))
    run.set_published(3)
    run.write_evaluation(3, dict(pass_at_1=0.5))
    return run.path


def attempt(seed: int, folder: Path) -> str:
    """Change one to three files of a run, and run a command that reads it."""
    rng = random.Random(f"run files/{seed}")
    run = folder / "demo"
    shutil.copytree(_good(), run)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change(rng, run)
    before = _ledger(run)
    for command in rng.sample(_COMMANDS, 2):
        arguments = [str(run) if word == "RUN" else word for word in command]
        done = evenkeel(*arguments)
        verdict = _judged(done.returncode, done.stderr)
        if verdict != "ok":
            return f"{' '.join(command)}: {verdict}"
    return "ok" if _ledger(run) == before else "the ledger of the run has changed"


_COMMANDS = (
    ("runs", "show", "RUN"), ("runs", "show", "RUN", "--json"), ("report", "RUN"), ("verify", "history", "RUN"),
    ("verify", "history", "RUN", "--json"), ("trajectories", "show", "RUN", "1"), ("trajectories", "show", "RUN", "0"),
    ("scaling", "fit", "RUN"), ("scaling", "compare", "RUN", "RUN", "--json"), 
    ("train", "--replay", "RUN"),
)  # fmt: skip


def _judged(status: int, stderr: str) -> str:
    if status not in (0, 1):
        return f"status {status}: {stderr[:300]!a}"
    lines = [line for line in stderr.splitlines() if not line.startswith(("warning: ", "note: "))]
    if not lines:
        return "ok"
    if len(lines) > 1 or not lines[0].startswith("error: "):
        return f"not one line: {stderr[:300]!a}"
    return judged_line(lines[0])


def _ledger(run: Path) -> dict[str, str]:
    """Name → digest of everything in `batches`."""
    batches = run / "batches"
    names = sorted(os.listdir(batches)) if batches.is_dir() else []
    files = (batches / name for name in names)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() if _plain(file) else "" for file in files}


def _plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _change(rng: random.Random, run: Path) -> None:
    files = sorted(path for path in run.rglob("*") if _plain(path))
    how = rng.random()
    if not files:
        return
    path = rng.choice(files)
    if how < 0.45:
        path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    elif how < 0.7:
        _change_data(rng, path)
    elif how < 0.85:
        _replace(rng, path)
    else:
        _add(rng, rng.choice([run, *(folder for folder in sorted(run.rglob("*")) if folder.is_dir())]), path)


def _change_data(rng: random.Random, path: Path) -> None:
    """JSON in every line of a log, or in a file; other files get a nasty text."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(mutated_data(rng, json.loads(lines[at])))
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    except (ValueError, IndexError):
        path.write_bytes(
            rng.choice((b"", b"\0" * 64, b"-1", b"9" * 5000, b"NaN", b"[]", b"{}", b"\xff\xfe", b"3\n4\n"))
        )


def _replace(rng: random.Random, path: Path) -> None:
    path.unlink()
    match rng.randrange(5):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(path)
        case 2:
            path.symlink_to(path.with_name("nowhere"))
        case 3 if path.parent.name != "demo":
            shutil.rmtree(path.parent)
            path.parent.write_bytes(b"x")
        case _:
            pass


def _add(rng: random.Random, folder: Path, like: Path) -> None:
    stranger = folder / rng.choice((*_STRANGERS, like.name + "x"))
    if not stranger.exists() and not stranger.is_symlink():
        rng.choice((stranger.mkdir, lambda: stranger.write_bytes(b"x"), lambda: stranger.symlink_to(stranger)))()
