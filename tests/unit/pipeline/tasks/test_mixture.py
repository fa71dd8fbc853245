"""Several weighted sources: who is asked when, and what each problem knows of where it comes from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config.task_sections import DataTask
from pipeline.errors import RecipeError
from pipeline.tasks import PromptOrder, build_task
from pipeline.tasks.data import digest
from pipeline.tasks.mixture import MixedOrder, Mixture, fitting, order_of, parts_of, shares

SIZES = dict(math=30, chat=4)


def write(path: Path, name: str, count: int, **more: str) -> dict[str, str]:
    lines = [json.dumps(dict(prompt=f"{name} {number}", answer="1", **more)) for number in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return dict(path=str(path))


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        write(tmp_path / "math.jsonl", "math", 80) | dict(weight=3.0, reward="python_tests"),
        write(tmp_path / "chat.v2.jsonl", "chat", 40, text="columns of its own")
        | dict(columns=dict(prompt="prompt", answer=None), system_prompt="Be brief."),
    ]


def section(sources: list[dict[str, Any]], **more: Any) -> DataTask:
    return DataTask.model_validate(dict(name="data", sources=sources, chat_template=True, reward="my:own") | more)


def mixture(sources: list[dict[str, Any]]) -> Mixture:
    task = build_task(section(sources), seed=0)
    assert isinstance(task, Mixture)
    return task


def test_an_evaluation_has_a_prompt_of_each_source(sources: list[dict[str, Any]]) -> None:
    sources[0]["weight"], sources[1]["weight"] = 200.0, 1.0
    task = mixture(sources)
    plain = [task.held_out(index).source for index in range(4)]
    assert plain == ["math"] * 4
    chosen = task.measured(4)
    assert chosen[:3] == [0, 1, 2]
    assert [task.held_out(index).source for index in chosen] == ["math"] * 3 + ["chat.v2"]
    assert task.measured(1) == [0], "there is no room"
    for count in (task.num_held_out, task.num_held_out + 4):
        assert task.measured(count) == [*range(task.num_held_out)]
    sources[1]["weight"] = 200.0
    assert mixture(sources).measured(4) == [0, 1, 2, 3], "where each is there already, nothing changes"


def test_a_source_says_of_the_columns_what_differs(tmp_path: Path) -> None:
    row = json.dumps(dict(question="asked", prompt="another", sys="Be kind.", solution="1"))
    (tmp_path / "p.jsonl").write_text(row + "\n")
    columns = dict(prompt="question", answer="solution", system_prompt="sys")
    task = section([dict(path=str(tmp_path / "p.jsonl"), columns=dict(answer=None))], columns=columns)
    [source] = task.sources
    assert source.columns is not None
    assert source.columns.model_dump() == dict(prompt="question", answer=None, system_prompt="sys")
    assert DataTask.model_validate(task.model_dump(mode="json")) == task
    assert task.of(source).columns == source.columns
    with pytest.raises(ValidationError, match="sources"):
        section(5, columns=columns)  # type: ignore[arg-type]


def test_problems_of_a_mixture_know_their_source_and_its_reward(sources: list[dict[str, Any]]) -> None:
    task = mixture(sources)
    found = [task.problem(index) for index in range(task.num_prompts)]
    for name, problems in task.problems.items():
        assert {found[index].source for index in problems} == {name}
        assert all(found[index].text.startswith(name[:4]) for index in problems)
    assert task.problems["math"].stop == task.problems["chat.v2"].start
    math, chat = found[0], found[-1]
    assert (math.reward, math.answer, math.messages) == ("pipeline.rewards.verifiers:python_tests", "1", ())
    assert (chat.reward, chat.answer, chat.messages[0]["content"]) == ("my:own", "", "Be brief.")
    assert [part.reward for part in parts_of(task)] == [math.reward, chat.reward]


def test_held_out_prompts_take_turns_by_weight(sources: list[dict[str, Any]]) -> None:
    task = mixture(sources)
    found = [task.held_out(index).source for index in range(task.num_held_out)]
    assert {"math", "chat.v2"} == set(found)
    assert Counter(found) == {one.name: one.task.num_held_out for one in task.sources}
    assert "chat.v2" in found[:3], "the first few are of every source"


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 1.0), (0.2, 0.8), (999.0, 1.0)])
def test_any_groups_in_a_row_hold_the_shares(weights: tuple[float, float]) -> None:
    order = MixedOrder(SIZES, weights, seed=1)
    of_math = [order.problem(group) < 30 for group in range(2500)]
    share = weights[0] / sum(weights)
    for first in (0, 7, 990, 1999):
        for count in (1, 16, 100, 500):
            assert abs(sum(of_math[first : first + count]) - share * count) <= 2.0


def test_a_source_asks_all_its_problems_before_one_comes_again() -> None:
    order = MixedOrder(SIZES, (3.0, 1.0), seed=1)
    asked = [order.problem(group) for group in range(3000)]
    for problems in (range(30), range(30, 34)):
        own = [problem for problem in asked if problem in problems]
        for epoch in range(len(own) // len(problems)):
            assert sorted(own[epoch * len(problems) :][: len(problems)]) == list(problems)


def test_a_group_asks_the_same_whatever_was_asked_before() -> None:
    whole = [MixedOrder(SIZES, (1.0, 1.0), seed=1).problem(group) for group in range(1200)]
    resumed = MixedOrder(SIZES, (1.0, 1.0), seed=1)
    assert [resumed.problem(group) for group in range(1100, 1200)] == whole[1100:]
    assert [MixedOrder(SIZES, (1.0, 1.0), seed=2).problem(group) for group in range(1200)] != whole
    with pytest.raises(ValueError, match="expected 0 or more"):
        resumed.problem(-1)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_shares_are_whole_none_is_lost(weights: list[float]) -> None:
    counts = shares(weights, 1000)
    assert sum(counts) == 1000
    assert min(counts) >= 1
    raised = sum(count == 1 for count in counts)
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - 1000 * weight / sum(weights)) <= 1 + raised


def test_what_is_too_long_is_left_out_of_its_source(sources: list[dict[str, Any]]) -> None:
    whole = mixture(sources)
    fitted = fitting(whole, lambda problems: [9 if p.text.endswith("1") else 1 for p in problems], 5)
    assert isinstance(fitted, Mixture)
    assert fitted.num_prompts < whole.num_prompts
    assert [note.split(":")[0] for note in fitted.notes] == ["math", "chat.v2"]
    assert {len(each) for each in fitted.problems.values()} == {one.task.num_prompts for one in fitted.sources}
    assert isinstance(order_of(fitted, 0), MixedOrder)
    assert isinstance(order_of(fitted.sources[0].task, 0), PromptOrder)


def test_the_digest_is_of_all_sources(sources: list[dict[str, Any]]) -> None:
    first = digest(section(sources))
    assert digest(section(sources[::-1])) != first
    with Path(sources[1]["path"]).open("a", encoding="utf-8") as file:
        file.write("\n")
    assert digest(section(sources)) != first
    with pytest.raises(RecipeError, match=r"math.jsonl or .*chat.v2.jsonl is not the data of this run"):
        build_task(section(sources, sha256=first), seed=0)


def test_a_prompt_of_two_sources_must_not_be_held_out_by_one(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    write(tmp_path / "other.jsonl", "math", 3)
    sources[1]["held_out_path"] = str(tmp_path / "other.jsonl")
    with pytest.raises(RecipeError, match=r"source math trains on 'math \d', which chat.v2 holds out; .*remove it"):
        build_task(section(sources), seed=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(sources=[]), "neither path nor sources is given, expected one of them; set task.path, or task.sources"),
        (dict(path="p.jsonl"), "both path and sources are given"),
        (dict(held_out_path="h.jsonl"), "give each of task.sources its own"),
        (dict(sources=[dict(path="a/train.jsonl"), dict(path="b/train.jsonl")]), "two sources are called 'train'"),
        (dict(sources=[dict(path="a.jsonl", weight=0.0)]), "sources.0.weight\n.*greater than 0"),
        (dict(chat_template=False), "set task.chat_template to true"),
    ],
)
def test_what_cannot_be_meant_is_refused(sources: list[dict[str, Any]], change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        section(**{"sources": sources, **change})
