"""A checkpoint brings back what the loop must remember, or refuses to."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.checksums import fingerprints, list_checksums, write_sealed
from pipeline.data.epochs import claim
from pipeline.data.files import is_temporary, remove_leftovers
from pipeline.data.run_directory import unfenced
from pipeline.errors import CorruptCheckpointError, DiskFullError, StoreError, SupersededError
from pipeline.trainer.checkpoints import COMMIT, Checkpoints, commit, verify
from tests.support.one_rank import OneRank


class Learner(OneRank):
    def __init__(self, weights: str = "weights") -> None:
        self.weights = weights

    def save(self, directory: Path) -> None:
        (directory / "shard").write_text(self.weights)

    def load(self, directory: Path) -> None:
        self.weights = (directory / "shard").read_text()


def test_the_loops_state_comes_back_with_its_step(tmp_path: Path) -> None:
    learner: Any = Learner()
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(learner) == (0, {})
    for step in (4, 8):
        checkpoints.save(learner, step, {"entropy": 0.1 + step, "solve_rate": 0.3})
    assert checkpoints.restore(learner) == (8, {"entropy": 8.1, "solve_rate": 0.3})


def test_a_state_that_was_touched_is_refused(tmp_path: Path) -> None:
    learner: Any = Learner()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(learner, 4, {"entropy": 1.0})
    (tmp_path / "000004" / "loop_state.json").write_text('{"entropy": 2.0}\n')
    with pytest.raises(CorruptCheckpointError, match=r"loop_state\.json"):
        checkpoints.restore(learner)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ('{"entropy": "x"}\n', "'entropy' is 'x', expected a number"),
        ('{"entropy": NaN}\n', "'entropy' is nan, expected a number"),
        ('{"entropy": {"a": 1}}\n', "'entropy' is {'a': 1}, expected a number"),
        ("[1]\n", "it holds no JSON object"),
    ],
)
def test_a_state_that_no_loop_wrote_is_refused(tmp_path: Path, state: str, message: str) -> None:
    """Though its checksum and the checkpoint's COMMIT agree with it."""
    learner: Any = Learner()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(learner, 4, {"entropy": 1.0})
    write_sealed(tmp_path / "000004" / "loop_state.json", state)
    commit(tmp_path / "000004", 4)
    with pytest.raises(CorruptCheckpointError, match=message) as refused:
        checkpoints.restore(learner)
    assert "loop_state.json" in str(refused.value)


def test_a_checkpoint_without_a_state_is_of_a_loop_without_memory(tmp_path: Path) -> None:
    """As `evenkeel sft` and earlier versions wrote them."""
    learner: Any = Learner()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(learner, 4, {})
    assert checkpoints.restore(learner) == (4, {})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Looking(Learner):
        def save(self, directory: Path) -> None:
            seen.append(names(tmp_path))
            super().save(directory)

    learner: Any = Looking()
    Checkpoints(tmp_path, keep=1).save(learner, 4, {})
    Checkpoints(tmp_path, keep=1).save(learner, 8, {})
    assert [[is_temporary(name) for name in listed] for listed in seen] == [[True], [True, False]]
    assert names(tmp_path) == ["000008"]


def test_of_two_learners_that_save_a_step_the_first_is_kept(tmp_path: Path) -> None:
    first, second, reader = Learner("first"), Learner("second"), Learner()
    for learner in (first, second):
        Checkpoints(tmp_path, keep=2).save(learner, 4, {})  # type: ignore[arg-type]
    assert names(tmp_path) == ["000004"]
    assert Checkpoints(tmp_path, keep=2).restore(reader) == (4, {})  # type: ignore[arg-type]
    assert reader.weights == "first"


def test_a_folder_without_commit_gives_way(tmp_path: Path) -> None:
    learner: Any = Learner()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(learner, 4, {})
    (tmp_path / "000004" / COMMIT).unlink()
    assert checkpoints.restore(learner) == (0, {})
    checkpoints.save(learner, 4, {"entropy": 1.0})
    assert checkpoints.restore(learner) == (4, {"entropy": 1.0})
    assert names(tmp_path) == ["000004"]


def test_a_thawed_learner_commits_no_checkpoint(tmp_path: Path) -> None:
    old = claim(tmp_path, "learner")
    folder = tmp_path / "checkpoints"
    learner: Any = Learner()
    thawed = Checkpoints(folder, keep=1, fence=old.check)
    thawed.save(learner, 4, {})
    new = Checkpoints(folder, keep=1, fence=claim(tmp_path, "learner").check)
    for attempt in (lambda: thawed.save(learner, 8, {}), lambda: remove_leftovers(folder, old.check)):
        with pytest.raises(SupersededError):
            attempt()
    assert names(folder) == ["000004"], "what gets no name fills no disk"
    assert new.restore(learner) == (4, {})


class Slow(Learner):
    """Writes a piece at each look, beside whatever its owner does."""

    def __init__(self, pieces: int, fails_at: int | None = None) -> None:
        super().__init__()
        self.pieces, self.fails_at = pieces, fails_at

    def begin_save(self, directory: Path) -> Any:
        return _Pieces(directory, self.weights, self.pieces, self.fails_at)


class _Pieces:
    def __init__(self, directory: Path, weights: str, pieces: int, fails_at: int | None) -> None:
        self._directory, self._weights, self._pieces, self._fails_at = directory, weights, pieces, fails_at

    hashed: Any = {}  # noqa: RUF012

    def advance(self, wait_s: float) -> bool:
        if self._pieces == self._fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._pieces -= 1
        if self._pieces == 0:
            (self._directory / "shard").write_text(self._weights)
        return self._pieces == 0


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    learner: Any = Slow(pieces=3)
    checkpoints = Checkpoints(tmp_path, keep=2)
    learner.weights = "of step 4"
    checkpoints.begin_save(learner, 4, {"entropy": 0.25})
    learner.weights = "of step 5"
    assert [checkpoints.advance(learner) for _ in range(2)] == [None, None]
    assert [is_temporary(name) for name in names(tmp_path)] == [True], "a kill now finds no checkpoint, and no half one"
    saved = checkpoints.advance(learner, to_the_end=True)
    assert saved is not None
    assert saved.step == 4
    assert checkpoints.advance(learner) is None, "it is told once"
    assert checkpoints.restore(learner) == (4, {"entropy": 0.25})
    assert learner.weights == "of step 4"


def test_who_only_reads_leaves_what_a_learner_is_writing(tmp_path: Path) -> None:
    """`evenkeel quant-map suggest RUN` restores the newest checkpoint of a run that may be training."""
    learner: Any = Slow(pieces=2)
    training = Checkpoints(tmp_path, keep=2)
    training.save(learner, 4, {})
    learner.pieces = 2
    training.begin_save(learner, 8, {})
    assert Checkpoints(tmp_path, keep=1).restore(Learner()) == (4, {})  # type: ignore[arg-type]
    assert training.advance(learner, to_the_end=True) is not None
    assert names(tmp_path) == ["000004", "000008"]


def test_a_kill_while_a_checkpoint_is_written_costs_that_one_alone(tmp_path: Path) -> None:
    learner: Any = Slow(pieces=2)
    killed = Checkpoints(tmp_path, keep=2)
    killed.save(learner, 4, {"entropy": 1.0})
    killed.begin_save(learner, 8, {"entropy": 2.0})
    killed.advance(learner)
    started_again = Checkpoints(tmp_path, keep=2)
    remove_leftovers(tmp_path, unfenced)
    assert names(tmp_path) == ["000004"]
    assert started_again.restore(learner) == (4, {"entropy": 1.0})


def test_one_save_is_under_way_at_most(tmp_path: Path) -> None:
    learner: Any = Slow(pieces=2)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.begin_save(learner, 4, {})
    with pytest.raises(ValueError, match="the checkpoint of step 4 is not written yet"):
        checkpoints.begin_save(learner, 8, {})


def test_a_disk_that_fills_up_beside_training_ends_it_in_order(tmp_path: Path) -> None:
    learner: Any = Slow(pieces=3, fails_at=2)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.begin_save(learner, 4, {})
    assert checkpoints.advance(learner) is None
    with pytest.raises(DiskFullError, match="the checkpoint of step 4 could not be written"):
        checkpoints.advance(learner)
    assert names(tmp_path) == [], "what gets no name must not fill the disk"
    assert checkpoints.advance(learner) is None


def test_a_commit_that_fails_is_raised_by_the_look_after_it(tmp_path: Path) -> None:
    def superseded() -> None:
        raise SupersededError("start 2 has taken over")

    learner: Any = Learner()
    checkpoints = Checkpoints(tmp_path, keep=2, fence=superseded)
    checkpoints.begin_save(learner, 4, {})
    with pytest.raises(SupersededError, match="start 2"):
        checkpoints.advance(learner, to_the_end=True)
    assert names(tmp_path) == []


def test_a_file_that_vanishes_meanwhile_fails_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / f"{name}.distcp").write_text(name)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/model.safetensors").write_text("m")
    monkeypatch.setattr("pipeline.trainer.checkpoints.sync_files", lambda _: (tmp_path / "b.distcp").unlink())
    with pytest.raises(CorruptCheckpointError, match=r"b\.distcp vanished while its checkpoint was committed"):
        commit(tmp_path, 4)
    assert not (tmp_path / COMMIT).exists()
    monkeypatch.setattr("pipeline.data.checksums.fingerprints", lambda files: [None for _ in files])
    with pytest.raises(StoreError, match=r"model\.safetensors vanished while SHA256SUMS was made"):
        list_checksums(tmp_path / "policy")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_was_given_up_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Another rank dies while rank 0 hashes, and the folder outlives its removal, as on NFS where a file is open."""
    learner: Any = Learner()
    checkpoints, removed, hashes = Checkpoints(tmp_path, keep=1), [], threading.Event()
    checkpoints.save(learner, 4, {})

    def slow(files: Any) -> Any:
        assert hashes.wait(20.0)
        return fingerprints(files)

    monkeypatch.setattr("pipeline.trainer.checkpoints.fingerprints", slow)
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **_: removed.append(folder))
    checkpoints.begin_save(learner, 8, {})
    checkpoints.advance(learner)
    [save] = checkpoints._under_way
    assert save.commit is not None
    committing = save.commit._work
    assert committing is not None

    def dead(_: Any) -> None:
        raise RuntimeError("rank 2 died")

    monkeypatch.setattr(learner, "tell", dead)
    monkeypatch.setattr(learner, "is_rank_zero", rank == 0)
    with pytest.raises(RuntimeError, match="rank 2 died"):
        checkpoints.advance(learner)
    hashes.set()
    if rank:
        assert committing.exception(20.0) is None
        assert save.folder not in removed, "rank 0 may be about to give it its name"
    else:
        assert isinstance(committing.exception(20.0), StoreError)
        assert removed == [save.folder]
        assert [name for name in names(tmp_path) if not is_temporary(name)] == ["000004"]


def test_what_cannot_be_deleted_ends_no_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, a file that a reader has open leaves its folder not empty. The new checkpoint has its name by then."""

    def not_empty(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    learner: Any = Learner()
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(learner, 4, {})
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", not_empty)
        checkpoints.save(learner, 8, {})  # 4 is one too many now
        checkpoints.save(learner, 8, {})  # a superseded learner was first
    (tmp_path / "000012").mkdir()
    (tmp_path / "000012" / "half").touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", not_empty)
        checkpoints.save(learner, 12, {})  # what has the name is no checkpoint
    assert [name for name in names(tmp_path) if not is_temporary(name)] == ["000012"]
    assert len(names(tmp_path)) > 1
    assert checkpoints.restore(learner) == (12, {})
    remove_leftovers(tmp_path, unfenced)
    assert names(tmp_path) == ["000012"], "the next start deletes it"


class Ranked(Learner):
    """Rank `rank` of 3, which writes what all have written and hashed."""

    num_ranks = 3

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    def begin_save(self, directory: Path) -> Any:
        shards = [directory / f"__{rank}_0.distcp" for rank in range(5)]
        for shard in shards:
            shard.write_text(shard.name)
        (directory / ".metadata").write_text("index")
        save = super().begin_save(directory)
        save.hashed = {shard.name: one for shard, one in zip(shards, fingerprints(shards), strict=True)}
        return save


def test_rank_zero_reads_no_shard_that_its_writer_has_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def noted(files: Any) -> Any:
        read.extend(file.name for file in files)
        return fingerprints(files)

    monkeypatch.setattr("pipeline.trainer.checkpoints.fingerprints", noted)
    learner: Any = Ranked()
    Checkpoints(tmp_path, keep=1).save(learner, 4, {"entropy": 1.0})
    assert sorted(read) == [".metadata", "loop_state.json", "shard"]
    monkeypatch.undo()
    verify(tmp_path / "000004", 4)


def test_a_flipped_byte_in_the_shard_of_any_rank_is_found_by_one_rank(tmp_path: Path) -> None:
    learner: Any = Ranked()
    Checkpoints(tmp_path, keep=1).save(learner, 4, {})
    folder = tmp_path / "000004"
    for file in sorted(path for path in folder.iterdir() if path.name != COMMIT):
        whole = file.read_bytes()
        file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        finders = []
        for rank in range(3):
            try:
                Checkpoints(tmp_path, keep=1).restore(Ranked(rank))  # type: ignore[arg-type]
            except CorruptCheckpointError as error:
                finders.append((rank, file.name in str(error)))
        if match := re.match(r"__(\d)_", file.name):
            assert finders == [(int(match[1]) % 3, True)], "the rank of the writer's number"
        else:
            assert len(finders) == (3 if file.name == "loop_state.json" else 1), "a state is read by rank 0 alone"
        file.write_bytes(whole)
    assert [Checkpoints(tmp_path, keep=1).restore(Ranked(rank)) for rank in range(3)] == [(4, {})] * 3  # type: ignore[arg-type]


def test_a_shard_that_vanishes_after_it_was_hashed_fails_the_commit(tmp_path: Path) -> None:
    class Vanishing(Ranked):
        def begin_save(self, directory: Path) -> Any:
            save = super().begin_save(directory)
            (directory / "__3_0.distcp").unlink()
            return save

    learner: Any = Vanishing()
    with pytest.raises(CorruptCheckpointError, match=r"__3_0\.distcp vanished or changed"):
        Checkpoints(tmp_path, keep=1).save(learner, 4, {})
    assert names(tmp_path) == []
