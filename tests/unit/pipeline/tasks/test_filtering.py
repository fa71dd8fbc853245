"""A filter of the user's own decides which rows are problems, and a run notices when it has changed its mind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.task_sections import DataTask
from pipeline.errors import RecipeError
from pipeline.tasks import build_task
from pipeline.tasks.data import digest, digest_of_data

LIMIT = 7
ROWS = 160


def low(answer: str) -> bool:
    return int(answer) % 10 < LIMIT


def hard(metadata: dict[str, Any]) -> bool:
    return bool(metadata["level"] == "hard")


def prompted(prompt: str, *, least: int = 0) -> bool:
    return int(prompt.removesuffix("=")) >= least


def everything(**given: Any) -> bool:
    return {*given} == {"prompt", "answer", "metadata"}


def undecided(prompt: str) -> str:
    return "yes"


def broken(metadata: dict[str, Any]) -> bool:
    return bool(metadata["grade"])


def greedy(prompt: str, response: str) -> bool:
    return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [dict(prompt=f"{n}=", answer=n, level="hard" if n % 2 else "easy") for n in range(ROWS)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "p.jsonl"


def section(path: Path, name: str | None, **more: Any) -> DataTask:
    function = None if name is None else f"{__name__}:{name}"
    return DataTask.model_validate(dict(name="data", path=path, filter=function, **more))


def answers(task: DataTask) -> list[int]:
    """Of all problems, in training or held out."""
    built = build_task(task, 0)
    problems = [built.problem(i) for i in range(built.num_prompts)]
    problems += [built.held_out(i) for i in range(built.num_held_out)]
    return sorted(int(problem.answer) for problem in problems)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("low", [n for n in range(ROWS) if n % 10 < LIMIT]),
        ("hard", [n for n in range(ROWS) if n % 2]),
        ("prompted", list(range(ROWS))),
        ("everything", list(range(ROWS))),
        (None, list(range(ROWS))),
    ],
)
def test_rows_that_it_keeps_are_the_problems(path: Path, name: str | None, kept: list[int]) -> None:
    task = section(path, name)
    assert answers(task) == kept
    out = ROWS - len(kept)
    notes = build_task(task, 0).notes
    assert any(f"{out} of {ROWS} rows are left out by" in note for note in notes) == bool(out)


def test_held_out_rows_are_filtered_too(path: Path, tmp_path: Path) -> None:
    apart = tmp_path / "held_out.jsonl"
    apart.write_text("".join(json.dumps(dict(prompt=f"{n}=", answer=n)) + "\n" for n in range(1000, 1010)))
    built = build_task(section(path, "low", held_out_path=apart), 0)
    assert built.num_held_out == LIMIT


def test_each_source_may_have_one(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(dict(prompt=f"{n}=", answer=n)) + "\n" for n in range(1000, 1100)))
    sources = [dict(path=path, filter=f"{__name__}:hard"), dict(path=other)]
    task = DataTask.model_validate(dict(name="data", sources=sources))
    assert {n for n in answers(task) if n < ROWS} == {n for n in range(ROWS) if n % 2}
    assert digest(task) != digest_of_data(path, other)


def test_a_filter_that_changed_its_mind_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = section(path, "low")
    frozen = task.model_copy(update=dict(sha256=digest(task)))
    build_task(frozen, 0)
    assert frozen.sha256 != digest_of_data(path)
    monkeypatch.setattr(f"{__name__}.LIMIT", 6)
    with pytest.raises(RecipeError, match=r"is not the data of this run, or task\.filter keeps other rows of it"):
        build_task(frozen, 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("undecided", "line 1.*returned 'yes', expected True or False"),
        ("broken", "line 1.*failed .KeyError: 'grade'.; correct it"),
        ("greedy", "asks for response, expected some of prompt, answer, metadata"),
        ("missing", "cannot be imported .AttributeError.*put the folder that holds it on PYTHONPATH"),
    ],
)
def test_what_is_no_filter_is_refused(path: Path, name: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        build_task(section(path, name), 0)


def complete(prompt: str | None, answer: str | None) -> bool:
    return bool(prompt) and answer is not None


@pytest.mark.parametrize(
    "lacking", [dict(answer=None), dict(prompt=None), dict(prompt=""), dict(answer={"value": None})]
)
def test_rows_that_lack_something_can_be_left_out(path: Path, lacking: dict[str, Any]) -> None:
    columns = dict(answer="answer.value" if lacking.get("answer") else "answer")
    rows: list[dict[str, Any]] = [
        dict(prompt=f"{n}=", answer=dict(value=n) if columns["answer"] != "answer" else n) for n in range(ROWS)
    ]
    rows[3] |= lacking
    rows[5] |= dict.fromkeys(lacking)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = section(path, "complete", columns=columns)
    assert answers(task) == [n for n in range(ROWS) if n not in (3, 5)]
    assert digest(task) != digest(task.model_copy(update=dict(filter=None)))
    with pytest.raises(RecipeError, match=r"line 4( has no|: prompt is empty)"):
        build_task(section(path, None, columns=columns), 0)
