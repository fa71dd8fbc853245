"""Bad input through the command line: one clear line, a non-zero exit, no traceback, nothing started or lost.

Mistakes that are refused before anything starts are listed in tests/unit/launch/test_first_day_mistakes.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import evenkeel, make_model, make_recipe


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    make_model(folder / "model")
    return folder


def refused(*arguments: str | Path, in_process: bool = True) -> str:
    """The one line that the command says, beside what was said before."""
    done = evenkeel(*arguments, in_process=in_process, timeout=100)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr + done.stdout
    lines = [
        line
        for line in done.stderr.strip().splitlines()
        if line and not line.startswith(("recipe: ", "warning: ", "note: ", "starting "))
    ]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("error: ")


def test_unknown_recipe_key(workshop: Path) -> None:
    recipe = make_recipe(workshop, workshop / "model", "key", rollout=dict(max_tokens=3))
    assert "unknown key rollout.max_tokens" in refused("train", recipe, in_process=False)


@pytest.mark.slow
def test_an_engine_that_never_comes_up_shows_the_end_of_its_log(workshop: Path) -> None:
    recipe = make_recipe(
        workshop, workshop / "model", "engine", rollout=dict(extra_args=["--no-such-option"], start_deadline_s=90)
    )
    assert "--no-such-option" in refused("train", recipe)


def test_a_run_directory_that_is_none(workshop: Path) -> None:
    for command in (("runs", "show"), ("report",), ("verify", "history")):
        assert str(workshop) in refused(*command, workshop)


def test_a_jsonl_line_that_is_not_json(workshop: Path) -> None:
    recipe = make_recipe(workshop, workshop / "model", "lines")
    (workshop / "prompts.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n{oops\n')
    assert "prompts.jsonl, line 2" in refused("train", recipe)


def test_a_reward_that_cannot_be_imported(workshop: Path) -> None:
    recipe = make_recipe(workshop, workshop / "model", "reward")
    recipe.write_text(recipe.read_text().replace("tests.support.rewards:digit_share", "no.such:reward"))
    assert "no.such" in refused("train", recipe)
