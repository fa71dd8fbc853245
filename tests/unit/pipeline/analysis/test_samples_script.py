"""The script of the page of samples: it hides, orders and marks what the page holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.analysis.run_log import RunLog
from pipeline.analysis.samples import write_samples
from pipeline.data.batch import Batch, Completion, Group, Prompt, Sample
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.support.batches import CONTRACT
from tests.support.scripted_page import ScriptedPage
from tests.support.written_runs import write_run

STEPS = (
    {"one=": [("abc", 1.0), ("AB", 0.9)], "two=": [("abab", 1.0), ("x", -1.0)]},
    {"Bee=": [("x", 0.5), ("y", 0.0)], "four=": [("four", 0.0), ("z", 0.0)]},
)
"""Step → prompt → responses with their rewards. Spreads of rewards: 0.1, 2, 0.5 and 0."""
GAPS = {"one=": 0.3, "two=": 0.0, "Bee=": np.inf, "four=": 0.02}
"""The largest distance of learner and engine in a group; inf is not a number that JavaScript could read."""
PROMPTS = [prompt for step in STEPS for prompt in step]


def sample(tokenizer: Tokenizer, text: str, reward: float, truncated: bool) -> Sample:
    tokens = tokenizer.encode(text)
    completion = Completion.given(tokens, [-0.5] * len(tokens), version=0)
    return Sample(completion=replace(completion, finish="length") if truncated else completion, reward=reward)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run of two steps, in which both answers of `four=` are truncated and one of `two=`."""
    folder = tmp_path_factory.mktemp("run")
    write_character_tokenizer(folder / "m", "".join(sorted(set("=" + "abcdefghijklmnopqrstuvwxyzAB"))))
    run = RunDirectory(write_run(folder, 0, overrides=dict(model=dict(path=str(folder / "m")))))
    tokenizer = Tokenizer.load(folder / "m")
    for index, step in enumerate(STEPS):
        groups = [
            Group(
                prompt=Prompt(group=2 * index + place, text="", answer="", tokens=tuple(tokenizer.encode(prompt))),
                samples=tuple(
                    sample(tokenizer, text, reward, prompt == "four=" or text == "abab") for text, reward in responses
                ),
            )
            for place, (prompt, responses) in enumerate(step.items())
        ]
        commit(run, tokenizer, index, groups, [GAPS[prompt] for prompt in step])
    return write(run)


def commit(run: RunDirectory, tokenizer: Tokenizer, index: int, groups: list[Group], gaps: list[float]) -> None:
    """… and what the learner says: the gap is at each token of a group."""
    contract = replace(CONTRACT, tokenizer_sha256=tokenizer.sha256)
    end = 2 * index + len(groups)
    batch = Batch.from_groups(index, groups, contract=contract, dropped=(), next_group=end, recipe_sha256="cd" * 32)
    BatchStore(run.batches).commit(batch)
    sizes = [sum(len(one.completion.tokens) for one in group.samples) for group in groups]
    run.write_logprobs(index, np.array(batch.rollout_logprobs) + np.repeat(gaps, sizes).astype(np.float32))


def write(run: RunDirectory) -> str:
    path: Path | None = write_samples(RunLog.read(run.path))
    assert path is not None
    return path.read_text()


@pytest.fixture
def page(source: str) -> ScriptedPage:
    return ScriptedPage(source)


def test_at_first_everything_is_shown_and_the_controls_too(page: ScriptedPage) -> None:
    assert page.controls_are_shown()
    assert page.told() == "4 of 4 groups"
    assert page.prompts() == PROMPTS
    assert (page.framed(), page.marked()) == ([], [])


def test_a_step_is_shown_alone_and_all_again(page: ScriptedPage) -> None:
    page.enter("step", "1")
    assert (page.told(), page.prompts()) == ("2 of 4 groups", ["Bee=", "four="])
    page.enter("step", "")
    assert page.prompts() == PROMPTS


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("gap", ["Bee=", "one=", "four=", "two="]),
        ("spread", ["two=", "Bee=", "one=", "four="]),
        ("truncated", ["four=", "two=", "one=", "Bee="]),
    ],
)
def test_groups_are_ordered_by_what_the_list_says(page: ScriptedPage, order: str, first: list[str]) -> None:
    page.enter("order", order)
    assert page.prompts() == first
    page.enter("order", "")
    assert page.prompts() == PROMPTS


def test_search_takes_capitals_for_small_letters_and_looks_at_prompts_and_responses(page: ScriptedPage) -> None:
    page.enter("search", "B")
    assert page.prompts() == ["one=", "two=", "Bee="]
    assert page.told() == "3 of 4 groups, 4 texts hold “B”"
    assert page.framed() == ["abc", "AB", "abab"], "the prompt that holds it is no response"
    page.enter("search", "")
    assert (page.prompts(), page.framed(), page.told()) == (PROMPTS, [], "4 of 4 groups")


def test_what_was_found_is_marked_across_tokens_each_time_that_it_is_there(page: ScriptedPage) -> None:
    page.enter("search", "ab")
    assert page.marked() == ["a|b", "A|B", "a|b", "a|b"]
    page.enter("search", "Four=")
    assert page.marked() == ["four="], "a prompt is one text"
    page.enter("search", "")
    assert page.marked() == []


def test_step_order_and_search_hold_together(page: ScriptedPage) -> None:
    page.enter("order", "spread")
    page.enter("search", "x")
    assert page.prompts() == ["two=", "Bee="]
    page.enter("step", "1")
    assert (page.prompts(), page.framed(), page.marked()) == (["Bee="], ["x"], ["x"])
    assert page.told() == "1 of 4 groups, 1 text holds “x”"


def test_nothing_found_is_said(page: ScriptedPage) -> None:
    page.enter("search", "nowhere")
    assert (page.prompts(), page.told()) == ([], "0 of 4 groups, 0 texts hold “nowhere”")


def test_a_browser_that_cannot_mark_text_still_searches(source: str) -> None:
    page = ScriptedPage(source, marks=False)
    page.enter("search", "ab")
    assert (page.prompts(), page.marked()) == (["one=", "two="], [])


def test_a_choice_that_a_list_does_not_offer_is_no_test(page: ScriptedPage) -> None:
    with pytest.raises(Exception, match="order offers no worst"):
        page.enter("order", "worst")
