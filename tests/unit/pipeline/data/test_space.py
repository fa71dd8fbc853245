"""A full disk: real ones of some hundred kilobytes, in a mount namespace of their own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.data.files import as_disk_full
from pipeline.errors import DiskFullError
from tests.support.runs import ROOT

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def on_a_small_disk(tmp_path: Path, kib: int, program: str) -> str:
    """What a program prints that runs with DISK on a file system of so many KiB. Skips where that is not allowed."""
    mounted = f'mount -t tmpfs -o size={kib}k none {tmp_path} && exec {sys.executable} -c "$PROGRAM"'
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", mounted],
        env=os.environ | dict(PROGRAM=program, DISK=str(tmp_path), PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


EVERY_WRITER = """
import os
from pathlib import Path
import numpy as np
from pipeline.data.event_log import EventLog, read_events, read_metrics
from pipeline.data.files import as_disk_full
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import DiskFullError
from pipeline.trainer.checkpoints import Checkpoints, verify
from tests.support.batches import batch_of_rewards
from tests.support.one_rank import OneRank

disk = Path(os.environ["DISK"])
run = RunDirectory(disk / "run")
run.make_folders()
store, log = BatchStore(run.batches), EventLog(run.path, "collector-000001")
batch = batch_of_rewards([[1.0, 0.0]] * 4)

class Learner(OneRank):
    def save(self, folder):
        (folder / "shard").write_bytes(bytes(200 << 10))

def fill():
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with (disk / "filler").open("ab") as file:
        file.write(bytes(free))

def said(write):
    try:
        with as_disk_full(run.path):
            write()
    except DiskFullError as error:
        print(error)
    else:
        print("nothing was said")

learner = Learner()
writers = [
    lambda: store.commit(batch),
    lambda: log.metrics(0, loss=1.0),
    lambda: run.set_published(3),
    lambda: run.write_logprobs(0, np.zeros(2000, np.float32)),
    lambda: run.write_evaluation(3, {"pass_at_1": 0.5}),
    lambda: Checkpoints(run.checkpoints, 2).save(learner, 1, {}),
]
log.event("saved", step=0, seconds=1.0)
fill()
for write in writers:
    said(write)
left = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())
print("left:", left, "events:", len(read_events(run.path)))
(disk / "filler").unlink()
for write in writers:
    write()
print("then:", store.committed(), run.published_version(), len(read_metrics(run.path)), store.read(0, None).index)
verify(run.checkpoints / "000001", 1)
"""


def test_every_writer_says_a_full_disk_leaves_nothing_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    lines = on_a_small_disk(tmp_path, 3000, EVERY_WRITER).splitlines()
    assert len(lines) == 8, lines
    batch, *small, checkpoint, left, then = lines
    assert "is too full for batch 0: it needs 1.1 MB, 0 bytes are free; free 1.1 MB more" in batch
    assert all("is full: " in line and "No space left on device, 0 bytes are free" in line for line in small), small
    assert "is too full for the checkpoint of step 1" in checkpoint
    assert left == "left: ['events/collector-000001.jsonl', 'metrics/collector-000001.jsonl'] events: 1"
    assert then == "then: [0] 3 1 0"


MIDWAY = """
import os
from pathlib import Path
from pipeline.errors import DiskFullError
from pipeline.trainer.checkpoints import Checkpoints
from tests.support.one_rank import OneRank

disk = Path(os.environ["DISK"])

class Learner(OneRank):
    def save(self, folder):
        (folder / "shard").write_bytes(bytes(1 << 20))
        (folder / "other").write_bytes(bytes(8 << 20))

try:
    Checkpoints(disk / "checkpoints", 2).save(Learner(), 1, {})
except DiskFullError as error:
    print(error)
print(os.listdir(disk / "checkpoints"))
try:
    Checkpoints(disk / "checkpoints", 2, first_bytes=10 << 20).save(Learner(), 1, {})
except DiskFullError as error:
    print(error)
"""


def test_a_checkpoint_that_fills_the_disk_midway_is_removed_and_one_that_will_is_not_begun(tmp_path: Path) -> None:
    full, left, ahead = on_a_small_disk(tmp_path, 4000, MIDWAY).splitlines()
    assert "checkpoints is full: the checkpoint of step 1 could not be written (No space left on device" in full
    assert left == "[]", "what is incomplete must not fill the disk"
    assert "too full for the checkpoint of step 1: it needs 11.5 MB, 4.1 MB are free; free 7.4 MB more" in ahead


def test_what_a_full_disk_makes_others_raise_is_known_by_its_cause(tmp_path: Path) -> None:
    def wrapped() -> None:
        try:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "shard")
        except OSError as error:
            raise RuntimeError("saving failed") from error

    with (
        pytest.raises(DiskFullError, match=r"shard could not be written .Disk quota exceeded"),
        as_disk_full(tmp_path),
    ):
        wrapped()
    with pytest.raises(DiskFullError, match="the model could not be written"), as_disk_full(tmp_path, "the model"):
        raise RuntimeError("[enforce fail at inline_container.cc:659] . file write failed: No space left on device")
    for number in ("pos 704 vs 598", "pos 576 vs 534"):  # as torch 2.13 says it, which saves into a file that is full
        with pytest.raises(DiskFullError, match=number), as_disk_full(tmp_path, "the checkpoint"):
            raise RuntimeError(f"[enforce fail at inline_container.cc:672] . unexpected {number}")
    with pytest.raises(RuntimeError, match="something else"), as_disk_full(tmp_path):
        raise RuntimeError("something else")
    with pytest.raises(PermissionError), as_disk_full(tmp_path):
        raise PermissionError(errno.EACCES, "denied")
