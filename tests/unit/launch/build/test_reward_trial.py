"""A reward that cannot work is refused before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from launch.build import rewards
from launch.build.rewards import check_reward
from pipeline.config.recipe import Recipe
from pipeline.data.checksums import write_sealed
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError, RewardError, RunConflictError
from pipeline.rewards.sandbox.choice import SandboxChoice, choose
from pipeline.rewards.sandbox.confine import Rung
from pipeline.rewards.verifiers import MATH_VERIFY, PYTHON_TESTS
from pipeline.rewards.worker_process import Sandbox
from pipeline.tasks.task import Problem

EXAMPLES = str(Path(__file__).parents[2] / "pipeline/rewards")


class Answers:
    """A task of these answers; the last is held out."""

    characters = None
    chat_template = False

    def __init__(self, reward: str, *answers: str) -> None:
        self.reward, self._answers = reward, answers

    num_prompts = property(lambda self: len(self._answers) - 1)
    num_held_out = 1

    def problem(self, index: int) -> Problem:
        return Problem(text=f"question {index}", answer=self._answers[index])

    def held_out(self, index: int) -> Problem:
        return Problem(text="held out", answer=self._answers[-1])

    def demonstration(self, index: int) -> None:
        """There is none."""


@pytest.fixture(autouse=True)
def examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([EXAMPLES, os.environ.get("PYTHONPATH", "")]))


def check(tmp_path: Path, reward: str, *answers: str, share: float = 0.1, sandbox: str = "none") -> None:
    recipe = Recipe.model_validate(
        dict(
            run=dict(name="trial", steps=1),
            model=dict(path=tmp_path),
            task=dict(name="sort_digits"),
            reward=dict(sandbox=sandbox, max_failed_share=share),
        )
    )
    check_reward(RunDirectory(tmp_path / "not there yet"), recipe, Answers(reward, *answers))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("gives_a_dict", r"bad_result: returned \{'score': 1.0\}, expected a number"),
        ("gives_none", "bad_result: returned None, expected a number"),
        ("gives_nan", "non_finite: returned nan"),
        ("raises", "raised: KeyError: 'score'"),
        ("async_raises", "raised: KeyError: 'score'"),
    ],
)
def test_a_broken_reward_is_named_with_what_it_did(tmp_path: Path, function: str, said: str) -> None:
    with pytest.raises(RewardError, match=rf"failed on 7 of 7 samples.*the first, {said}"):
        check(tmp_path, f"reward_examples:{function}", "yes", "no")


def test_a_judge_that_fails_now_and_then_is_not_refused(tmp_path: Path) -> None:
    """Every tenth call, the first among them: one of the four that a trial begins with."""
    check(tmp_path, "reward_examples:fails_at_every_tenth_call", "yes", "no", "no")
    with pytest.raises(RewardError, match=r"failed on 1 of 1 samples, at most a share of 0 may"):
        check(tmp_path, "reward_examples:fails_at_every_tenth_call", "yes", "no", "no", share=0.0)


def test_a_reward_that_cannot_be_called_is_refused_before_it_is(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot be imported or called: TypeError: .*'extra'; name some of prompt, "):
        check(tmp_path, "reward_examples:wants_four", "yes", "no")


def test_in_the_sandbox_of_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    if choose().rung is None:
        pytest.skip("no sandbox here")
    try:
        check(tmp_path, "reward_examples:by_keyword", "yes", "no", sandbox="auto")
    except RecipeError as error:
        pytest.fail(str(error))
    with pytest.raises(RewardError, match="KeyError"):
        check(tmp_path, "reward_examples:raises", "yes", "no", sandbox="auto")


def given(patch: pytest.MonkeyPatch, rung: Rung | None) -> list[Sandbox | None]:
    """The machine allows this rung at most. Returns the sandboxes of trials, which try nothing from here on."""
    seen = list[Sandbox | None]()

    @contextmanager
    def verifiers(reward: str, recipe: Recipe, sandbox: Sandbox | None, log: None) -> Iterator[str]:
        seen.append(sandbox)
        yield reward

    patch.setattr(
        rewards, "choose", lambda needs: SandboxChoice(rung=rung, refused={"bubblewrap": "bwrap is not installed"})
    )
    patch.setattr(rewards, "_verifiers", verifiers)
    patch.setattr(rewards, "try_reward", AsyncMock())
    return seen


@pytest.mark.parametrize("reward", ["reward_examples:by_keyword", PYTHON_TESTS])
def test_without_a_sandbox_code_of_others_is_not_tried(
    reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = given(monkeypatch, None)
    with pytest.raises(RecipeError, match=r"no sandbox for it \(bubblewrap: bwrap is not installed\).*sandbox to none"):
        check(tmp_path, reward, "yes", "no", sandbox="auto")
    assert not tried
    check(tmp_path, MATH_VERIFY, "yes", "no", sandbox="auto")
    check(tmp_path, reward, "yes", "no", sandbox="none")
    assert tried == [None, None]


def test_a_trial_hides_the_run_and_its_key_and_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = given(monkeypatch, "landlock")
    monkeypatch.setenv("EVENKEEL_API_KEY_FILE", str(tmp_path / "key"))
    check(tmp_path, "reward_examples:by_keyword", "yes", "no", sandbox="auto")
    (sandbox,) = tried
    assert sandbox is not None
    assert sandbox.hidden == (tmp_path / "not there yet", tmp_path / "key")
    assert not (tmp_path / "not there yet").exists()


def test_a_trial_in_less_than_the_run_began_with_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = given(monkeypatch, "landlock")
    RunDirectory(tmp_path / "not there yet").path.mkdir()
    write_sealed(RunDirectory(tmp_path / "not there yet").sandbox_file, "bubblewrap\n")
    with pytest.raises(RunConflictError, match=r"began .* under bubblewrap, and here there is only landlock"):
        check(tmp_path, "reward_examples:by_keyword", "yes", "no", sandbox="auto")
    assert not tried


def test_math_verify_names_an_answer_that_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match=r"does not accept 2 of 8 answers as right, the first ' '; write them .* by task\.filter"
    ):
        check(tmp_path, MATH_VERIFY, *"12", " ", *"3456", "  ")
