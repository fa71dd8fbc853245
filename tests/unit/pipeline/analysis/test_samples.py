"""Samples as a page and as text: what they show, that nothing in a text gets out of its place, and that a page stays
small."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.advantages.compute import AdvantageComputer
from pipeline.analysis.report import write_report
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.samples import (
    SAMPLE_COLUMNS,
    Background,
    choose,
    render_batch,
    sample_rows,
    visible,
    write_samples,
)
from pipeline.data.batch import Batch, Completion, DroppedGroup, EpisodeFacts, Group, Prompt, Sample, StopReason
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.rollout.evaluation import kept_responses
from pipeline.tasks import build_task
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.support.batches import CONTRACT, batch_of_rewards, episode
from tests.support.written_runs import write_run

HOSTILE = "</script><script>document.title=1</script></b>\"'><img src=x onerror=a()>{{7*7}}&lt;\x00\x1b\u202e\n"
CHARACTERS = "".join(sorted(set(HOSTILE + "0123456789=abcdefghijklmnopqrstuvwxyz ")))
VOID = {"meta", "br", "img", "link", "input", "hr"}


@dataclass
class Page(HTMLParser):
    """Tags, attributes, and the text of each element of class `text`; fails where a tag is closed out of order."""

    source: str
    open: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    within: int = -1

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if "text" in (dict(attrs).get("class") or "").split():
            self.texts.append("")
            self.within = len(self.open)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.within = -1 if len(self.open) < self.within else self.within

    def handle_data(self, data: str) -> None:
        if self.within >= 0:
            self.texts[-1] += data


@dataclass
class Written:
    """A run whose batches a test writes."""

    run: RunDirectory
    tokenizer: Tokenizer

    def commit(
        self, index: int, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, problem: int = -1
    ) -> Batch:
        """A batch of groups: each its prompt, and its responses with their rewards. All ask one `problem`."""
        batch = Batch.from_groups(
            index,
            [
                Group(
                    prompt=Prompt(
                        group=number,
                        text="",
                        answer="",
                        tokens=tuple(self.tokenizer.encode(prompt)),
                        problem=problem,
                    ),
                    samples=tuple(
                        Sample(completion=self._completion(text, index), reward=reward, reward_parts=dict(right=reward))
                        for text, reward in responses
                    ),
                )
                for number, (prompt, responses) in enumerate(groups, 100 * index)
            ],
            contract=replace(CONTRACT, tokenizer_sha256=self.tokenizer.sha256),
            dropped=(),
            next_group=100 * index + len(groups),
            recipe_sha256="cd" * 32,
        )
        BatchStore(self.run.batches).commit(batch)
        return batch

    def commit_episodes(self, *samples: Sample) -> Batch:
        """Batch 0, of one group of episodes that begin with the prompt "go="."""
        prompt = Prompt(group=0, text="", answer="", tokens=tuple(self.tokenizer.encode("go=")))
        batch = Batch.from_groups(
            0,
            [Group(prompt=prompt, samples=samples)],
            contract=replace(CONTRACT, tokenizer_sha256=self.tokenizer.sha256),
            dropped=(),
            next_group=1,
            recipe_sha256="cd" * 32,
        )
        BatchStore(self.run.batches).commit(batch)
        return batch

    def episode(self, *said: str, prompt: str = "go=", **how: Any) -> Sample:
        """An episode of turns and, between them, what a tool said."""
        ids = [self.tokenizer.encode(text) for text in said]
        return episode(ids[::2], ids[1::2], prompt=self.tokenizer.encode(prompt), **how)

    def _completion(self, text: str, index: int) -> Completion:
        tokens = self.tokenizer.encode(text)
        return Completion.given(tokens, [-0.5] * len(tokens), version=max(index - 1, 0))

    def page(self) -> str:
        page = write_samples(RunLog.read(self.run.path))
        assert page == self.run.path / "samples.html"
        return page.read_text()


@pytest.fixture
def written(tmp_path: Path) -> Written:
    write_character_tokenizer(tmp_path / "m", CHARACTERS)
    run = write_run(tmp_path, 0, overrides=dict(model=dict(path=str(tmp_path / "m"))))
    return Written(RunDirectory(run), Tokenizer.load(tmp_path / "m"))


def test_a_run_without_a_batch_has_no_page_and_no_link(written: Written) -> None:
    assert write_samples(RunLog.read(written.run.path)) is None
    assert "samples.html" not in write_report(written.run.path).read_text()


def test_siblings_with_reward_parts_length_finish_version_and_colors(written: Written) -> None:
    batch = written.commit(4, [("12=", [("abc", 1.0), ("de", 0.25)])])
    gaps = np.array([0.0, 0.02, -0.06, 0.3, -np.inf], np.float32)
    written.run.write_logprobs(4, np.array(batch.rollout_logprobs) + gaps)
    page = written.page()
    assert Page(page).texts == ["12=", "abc", "de"]
    for expected in (
        '<p class="reward">1 <small>reward, advantage 0.7071</small></p>',
        "<p>right 0.25</p>",
        "3 tokens, stop,\nversion 3 (age 1), |log-ratio| up to 0.06 at token 3",
        "2 tokens, stop,\nversion 3 (age 1), |log-ratio| up to inf at token 2",
        '<b title="+0, p 0.607">a</b><b class="more1" title="+0.02, p 0.607">b</b>',
        '<b class="less2" title="-0.06, p 0.607">c</b>',
        '<b class="more3" title="+0.3, p 0.607">d</b><b class="broken" title="-inf, p 0.607">e</b>',
        "2 samples of 1 of the 1 groups in 1 of 1 batches\n(step 4)",
        "largest |log-ratio| inf",
    ):
        assert expected in page
    assert "has not scored" not in page


def forked_and_late(written: Written) -> Batch:
    """An episode with a branch behind its first turn, and one that a budget ended."""
    forked = EpisodeFacts(
        stopped=StopReason.FINISHED, turns=3, tool_calls=2, tool_s=1.5, turn_rewards=(np.nan, 0.5, np.nan)
    )
    late = EpisodeFacts(stopped=StopReason.WALL_CLOCK, turns=1)
    return written.commit_episodes(
        written.episode("ab", "12", "cd", "3", "e", fork=1, facts=forked, reward=1.0),
        written.episode("x", prompt="other=", facts=late),
    )


def test_an_episode_is_a_conversation_with_masks_gaps_rewards_by_turn_and_branches(written: Written) -> None:
    batch = forked_and_late(written)
    gaps = np.zeros(batch.num_response_tokens, np.float32)
    gaps[3] = 0.3  # the second token of turn 2
    written.run.write_logprobs(0, np.where(batch.loss_mask, batch.rollout_logprobs + gaps, 0.0).astype(np.float32))
    page = written.page()
    assert Page(page).texts == ["go=", "turn 1ab", "12", "turn 2, reward 0.5cdtool3turn 3e", "other=", "turn 1x"], (
        "what the model read before stands there once: the group's prompt, what follows a branch, another prompt"
    )
    for expected in (
        "<p>3 turns, 2 tool calls,\n1.5 s in tools and environment, finished</p>",
        '1 turn, 0 tool calls,\n0 s in tools and environment, stopped: <span class="warn">wall clock</span>',
        "<strong>Row 2 branches from row 1, behind 1 of its turns</strong>: 4 tokens, stop,",
        '<b title="+0, p 0.368">c</b><b class="more3" title="+0.3, p 0.368">d</b></span>',
        '<span class="said tool"><small>tool</small><b title="masked">3</b></span>',
        "2 samples of 1 of the 1 groups",
        "2 of 2 samples",
    ):
        assert expected in page


def test_a_long_episode_is_cut_in_the_middle_and_keeps_its_turns_numbers(written: Written) -> None:
    said = [text for turn in range(300) for text in ("abcdefghij" * 12, "0123456789" * 12)][:-1]
    facts = EpisodeFacts(stopped=StopReason.FINISHED, turns=300)
    written.commit_episodes(written.episode(*said, facts=facts))
    page = written.page()
    assert "1 response of more than 48000 tokens is cut in the middle." in page
    [text] = [text for text in Page(page).texts if "left out" in text]
    assert re.findall("turn ([0-9]+)", text)[132:136] == ["133", "134", "234", "235"]


def test_what_was_said_in_an_episode_is_text_beside_its_numbers(written: Written) -> None:
    batch = forked_and_late(written)
    rows = list(sample_rows(batch, written.tokenizer, Background(written.run.path)))
    assert [list(row) for row in rows] == [list(SAMPLE_COLUMNS)] * 3
    names = ("episode", "branch_of", "branched_at", "turns", "turn_rewards", "stopped", "tool_calls")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (0, None, 0, 1, [None], "finished", 2),
        (0, 0, 5, 2, [0.5, None], "finished", 2),
        (1, None, 0, 1, [None], "wall_clock", 0),
    ]
    assert [(one["kind"], one["tokens"], one["text"]) for one in rows[1]["said"]] == [
        ("sampled", 2, "cd"),
        ("tool", 1, "3"),
        ("sampled", 1, "e"),
    ]
    text = text_of(written, batch)
    assert "sample 1, group 0, episode 0, branched from sample 0 behind 5 tokens" in text
    assert [line for line in text if line.startswith(("  sampled", "  tool"))][1:3] == [
        "  sampled   cd",
        "  tool      3",
    ]


def test_no_text_of_a_run_gets_out_of_its_place(written: Written) -> None:
    written.commit(0, [(HOSTILE, [(HOSTILE, 1.0)])])
    page = written.page()
    parsed = Page(page)
    assert parsed.texts == [visible(HOSTILE, "⏎\n")] * 2
    assert not {"img", "script"} & {tag for tag, _ in parsed.tags}
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page)


def test_the_browser_may_run_nothing_and_fetch_nothing(written: Written) -> None:
    written.commit(0, [("1=", [("a", 1.0)])])
    page = written.page()
    [policy] = [str(found["content"]) for tag, found in Page(page).tags if "http-equiv" in found]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    assert "://" not in page
    assert re.findall(r"(?:src|href)=\"([^\"]*)", page) == ["report.html"]


def test_a_page_stays_small_and_says_what_it_leaves_out(written: Written) -> None:
    text = "abcdefghij" * 40
    for step in range(9):
        written.commit(step, [(f"{step}=", [(text, float(member % 2)) for member in range(10)])] * 5)
    page = written.page()
    assert "192 samples of 24 of the 30 groups in 6 of 9 batches\n(steps 0, 2, 3, 5, 6, 8)" in page
    assert "192 responses of more than 250 tokens are cut in the middle." in page
    assert "8 of 10 samples" in page
    assert len(page) < 3_000_000


def test_a_damaged_batch_is_named_and_the_others_are_shown(written: Written) -> None:
    for step in (0, 1):
        written.commit(step, [("1=", [("ab", 0.0)])])
    path = BatchStore(written.run.batches).path(1)
    path.write_bytes(path.read_bytes()[:-20])
    page = written.page()
    assert '<p class="warn">Batch 1: ' in page
    assert Page(page).texts == ["1=", "ab"]


def test_the_reference_answer_and_what_a_sample_is_trained_with_stand_beside_it(written: Written) -> None:
    recipe = written.run.recipe()
    answer = build_task(recipe.task, recipe.run.seed).problem(3).answer
    batch = written.commit(0, [("12=", [("a", 1.0), ("b", 0.0), ("c", 0.0)])], problem=3)
    advantages = AdvantageComputer.of(recipe).compute_advantages(batch).values
    page = written.page()
    assert f'Reference answer: <span class="text">{answer}</span>' in page
    rows = list(sample_rows(batch, written.tokenizer, Background(written.run.path)))
    assert [(row["answer"], row["metadata"], row["advantage"]) for row in rows] == [
        (answer, {}, float(value)) for value in advantages
    ]
    text = list(render_batch(batch, written.tokenizer, Background(written.run.path)))
    assert f"  answer    {answer}" in text
    for value in advantages:
        assert f"reward, advantage {value:.4g}<" in page
        assert f"  advantage {value:.4g}" in text
    assert advantages[0] > 0 > advantages[1]


def test_held_out_answers_are_shown_by_version(written: Written) -> None:
    written.commit(0, [("1=", [("a", 1.0)])])
    prompt = Prompt(group=0, text="<31>", answer="13", tokens=(1,))
    for version, text in ((0, "31"), (20, "1" * 5000 + "3")):
        sample = Sample(completion=written._completion("a", 1), reward=float(version > 0), reward_parts={})
        kept = kept_responses([prompt] * 20, [[sample] * 9] * 20, lambda _, text=text: text)
        assert (len(kept), len(kept[0]["samples"])) == (8, 4)
        answered = dict(version=24, due=20, answered=[[20, 5], [24, 6]]) if version else {}
        written.run.write_evaluation(version, answered | dict(responses=kept))
    page = written.page()
    of_two = "<summary>Due at version 20; tokens of answers: 5 of version 20, 6 of version 24</summary>"
    assert page.index(of_two) < page.index("<summary>Version 0</summary>")
    assert page.count("&lt;31&gt;") == 16
    assert "1 … 1" in page, "of a long answer the two ends"
    assert "1" * 2001 not in page
    damaged = written.run.evaluations / "000000.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"31", b"32", 1))
    page = written.page()
    assert "Evaluation of version 0: " in page
    assert f"<code>evenkeel repair {written.run.path}</code>" in page
    assert of_two in page


def test_the_widest_spread_the_truncated_and_the_worst_token_are_among_the_groups() -> None:
    batch = batch_of_rewards([[0.5, 0.5]] * 6 + [[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    truncated = np.zeros(18, np.bool_)
    truncated[15] = True
    batch = replace(batch, truncated=truncated)
    learner = batch.rollout_logprobs.copy()
    learner[batch.response_offsets[16]] -= 2.0
    shown, facts = choose(batch, learner)
    assert list(facts) == [0, 6, 7, 8]
    assert (facts[6]["reward_spread"], facts[7]["num_truncated"]) == (1.0, 1)
    assert facts[8]["worst_gap"] == pytest.approx(2.0)
    assert batch.group[shown].tolist() == [0, 0, 6, 6, 7, 7, 8, 8]


def test_a_gap_that_is_not_finite_is_the_worst_and_unsampled_tokens_have_none() -> None:
    batch = batch_of_rewards([[0.0, 1.0], [0.0, 1.0]], unsampled=0.5, seed=3)
    learner = np.where(batch.loss_mask, batch.rollout_logprobs + 0.25, 99.0).astype(np.float32)
    learner[batch.response_offsets[2]] = -np.inf
    assert not batch.loss_mask.all()
    facts = choose(batch, learner)[1]
    assert [facts[group]["worst_gap"] for group in (0, 1)] == [pytest.approx(0.25), np.inf]


def text_of(written: Written, batch: Batch, **how: Any) -> list[str]:
    return list(render_batch(batch, written.tokenizer, Background(written.run.path), **how))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\tb\r", "a⏎⇥b␍"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\u202eevil\u200b\x00", "\\u202eevil\\u200b\\x00"),
        ("é漢🙂", "é漢🙂"),
    ],
)
def test_nothing_invisible_reaches_the_terminal(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_names_and_reasons_of_a_file_command_no_terminal(written: Written) -> None:
    batch = written.commit(0, [("1=", [("a", 1.0)])])
    parts = {"\x1b]0;owned\x07[red]": next(iter(batch.reward_parts.values()))}
    dropped = (DroppedGroup(group=9, reason="\x1b[2J\r\nall is well"),)
    text = "\n".join(text_of(written, replace(batch, reward_parts=parts, dropped=dropped)))
    assert all(character.isprintable() or character == "\n" for character in text)
    assert r"\x1b]0;owned\x07[red]" in text
