"""Which sandbox a run's reward code gets: chosen, recorded, never lowered silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.build import rewards
from launch.doctor import machine
from pipeline.data.event_log import EventLog, read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError, RunConflictError
from pipeline.rewards.sandbox import choice
from pipeline.rewards.sandbox.choice import SandboxChoice, choose
from pipeline.rewards.sandbox.confine import Rung

OWN = "tests.support.rewards:digit_share"
WHY = {"bubblewrap": "bwrap is not installed"}


def given(patch: pytest.MonkeyPatch, rung: Rung | None) -> None:
    refused = {} if rung == "bubblewrap" else WHY if rung else {**WHY, "landlock": "no Landlock"}
    for module in (rewards, machine):
        patch.setattr(module, "choose", lambda *_: SandboxChoice(rung=rung, refused=refused))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def chosen(run: RunDirectory, reward: str = OWN) -> object:
    sandbox = rewards.choose_sandbox(run, [reward], EventLog(run.path, "collector-000001"))
    return sandbox and sandbox.rung


def test_the_rung_is_an_event_and_a_file_of_the_run(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "landlock")
    assert chosen(run) == "landlock"
    (event,) = read_events(run.path, "sandbox")
    assert (event["rung"], event["why"]) == ("landlock", "bubblewrap: bwrap is not installed")
    assert run.sandbox() == "landlock"


def test_a_lower_rung_is_refused_a_higher_one_taken(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "bubblewrap")
    chosen(run)
    given(monkeypatch, "landlock")
    with pytest.raises(RunConflictError, match=r"began .* under bubblewrap, and here there is only landlock .*remove"):
        chosen(run)
    assert [event["rung"] for event in read_events(run.path, "sandbox")] == ["bubblewrap"]
    run.sandbox_file.unlink()
    assert chosen(run) == "landlock"
    given(monkeypatch, "bubblewrap")
    assert chosen(run) == "bubblewrap"


def test_without_a_sandbox_code_of_others_is_refused(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, None)
    with pytest.raises(RecipeError, match=r"no sandbox .*bwrap is not installed; landlock.*reward.sandbox to none"):
        chosen(run)
    assert chosen(run, "pipeline.rewards.verifiers:exact_match") is None
    with pytest.raises(RecipeError, match="no sandbox"):
        chosen(run, "pipeline.rewards.verifiers:python_tests")


def test_the_run_and_its_key_are_hidden(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "landlock")
    monkeypatch.setenv("EVENKEEL_API_KEY_FILE", str(tmp_path / "key"))
    sandbox = rewards.choose_sandbox(run, [OWN], EventLog(run.path, "collector-000001"))
    assert sandbox is not None
    assert (sandbox.hidden, sandbox.runs) == ((run.path, tmp_path / "key"), run.path.parent)


def test_keys_of_the_teacher_and_of_other_jobs_are_hidden_too(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--key-dir` may be a folder that reward code reads."""
    given(monkeypatch, "landlock")
    mine, other, later = (tmp_path / f"slurm-{job}.key" for job in ("7-0", "6-0", "8-2"))
    theirs = tmp_path / "teacher"
    for path in (mine, other, later, tmp_path / "words.txt"):
        path.touch()
    monkeypatch.setenv("EVENKEEL_API_KEY_FILE", str(mine))
    monkeypatch.setenv("EVENKEEL_TEACHER_API_KEY_FILE", str(theirs))
    sandbox = rewards.choose_sandbox(run, [OWN], EventLog(run.path, "collector-000001"))
    assert sandbox is not None
    assert set(sandbox.hidden) == {run.path, mine, other, later, theirs}


def test_rungs_are_tried_from_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: dict[str, str | None] = {"bubblewrap": "code in it makes a socket", "landlock": None}
    monkeypatch.setattr(choice, "what_is_wrong_with", lambda rung, needs: wrong[rung])
    assert choose() == SandboxChoice(rung="landlock", refused={"bubblewrap": "code in it makes a socket"})
    wrong["landlock"] = "no"
    assert choose().rung is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice.shutil, "which", lambda name: None)
    monkeypatch.setattr(choice, "landlock_version", lambda: 0)
    assert choose() == SandboxChoice(rung=None, refused=choice._MISSING)
