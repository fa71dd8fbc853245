"""Batches as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.analysis.trajectories import render_batch, visible
from pipeline.data.batch import VERIFIER_FAILED, Batch, DroppedGroup
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer

MakeBatch = Callable[..., Batch]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_character_tokenizer(tmp_path, "0123456789=\n")
    return Tokenizer.load(tmp_path)


def test_golden(tokenizer: Tokenizer, make_batch: MakeBatch) -> None:
    """Token 1 ends, tokens 2 … 11 are the digits 0 … 9, 12 is "=", 13 a line end."""
    batch = make_batch(4, first_group=5, num_groups=1, dropped=(6,), versions=(3, 3, 4))
    assert list(render_batch(batch, tokenizer, samples=[0, 2])) == [
        "batch 4: 3 samples, 5 response tokens; group 6 dropped: too long",
        "",
        "sample 0, group 5",
        "  prompt    <|end|>5",
        "  response  =⏎",
        "  reward    1",
        "  finish    stop after 3 tokens, engine 0, queued 0.25 s, generated 1.5 s",
        "  versions  3 × 2 tokens, 4 × 1 tokens",
        "",
        "sample 2, group 5",
        "  prompt    <|end|>5",
        "  response  =",
        "  reward    0 (format 0.5, odd/name ü 1)",
        "  finish    length after 1 tokens, engine 2, queued 0.25 s, generated 1.5 s",
        "  versions  3 × 1 tokens",
    ]


def test_an_empty_response(tokenizer: Tokenizer, make_batch: MakeBatch) -> None:
    lines = list(render_batch(make_batch(0, aborted=True), tokenizer, samples=[1]))
    assert lines[4:] == [
        "  response  ",
        "  reward    0",
        "  finish    abort after 0 tokens, engine 1, queued 0.25 s, generated 1.5 s",
        "  versions  none",
    ]


def test_gaps_between_learner_and_rollout(tokenizer: Tokenizer, make_batch: MakeBatch) -> None:
    batch = make_batch(0, num_groups=2)
    learner = batch.rollout_logprobs + np.arange(10, dtype=np.float32) / 8
    lines = list(render_batch(batch, tokenizer, learner_logprobs=learner, samples=[3]))
    assert lines[-4:] == [
        "  token            version   rollout   learner       gap",
        "  6                      0   -0.5000    0.1250   +0.6250",
        "  7                      0   -1.0000   -0.2500   +0.7500",
        "  8                      0   -1.5000   -0.6250   +0.8750",
    ]
    with pytest.raises(ValueError, match=r"learner_logprobs is \(3,\), expected \(10,\)"):
        list(render_batch(batch, tokenizer, learner_logprobs=learner[:3]))


def test_tokens_that_no_engine_sampled_are_shown_as_such(tokenizer: Tokenizer, make_batch: MakeBatch) -> None:
    batch = make_batch(0, num_groups=1)
    unsampled = np.array([False, True, False, False, False])
    lines = list(
        render_batch(replace(batch, loss_mask=~unsampled), tokenizer, samples=[0], learner_logprobs=np.zeros(5, "f4"))
    )
    assert lines[-5:] == [
        "  unsampled 6",
        "  token            version   rollout   learner       gap",
        "  5                      0   -0.5000    0.0000   +0.5000",
        "  6                      0 unsampled",
        "  7                      0   -1.5000    0.0000   +1.5000",
    ]


def test_tokens_that_the_learner_did_not_look_at_are_shown_as_such(tokenizer: Tokenizer, make_batch: MakeBatch) -> None:
    batch = make_batch(0, num_groups=1)
    learner = np.full(5, np.nan, np.float32)
    assert list(render_batch(batch, tokenizer, samples=[2], learner_logprobs=learner))[-1].split()[-3:] == [
        "not",
        "looked",
        "at",
    ]


def test_groups_of_solved_problems_are_counted(tokenizer: Tokenizer, make_batch: MakeBatch) -> None:
    solved = [DroppedGroup(group=group, reason="…", kind="solved") for group in (2, 3)]
    batch = replace(make_batch(0, dropped=(4,)), dropped=(*solved, DroppedGroup(group=4, reason="too long")))
    first = next(render_batch(batch, tokenizer))
    assert first.endswith("; group 4 dropped: too long; 2 groups of solved problems passed over")


def test_a_sample_without_a_reward_says_so(tokenizer: Tokenizer, make_batch: MakeBatch) -> None:
    failed = make_batch(0, num_groups=1)
    failed = replace(failed, reward_parts=failed.reward_parts | {VERIFIER_FAILED: np.array([1.0, np.nan, 1.0], "f4")})
    rewards = [line for line in render_batch(failed, tokenizer) if line.startswith("  reward")]
    assert rewards[0] == "  reward    none: its verifier failed"
    assert not rewards[1].startswith("  reward    none")
    assert rewards[2] == "  reward    none: its verifier failed (format 0.5, odd/name ü 1)"


def test_all_samples_are_shown_by_default(tokenizer: Tokenizer, make_batch: MakeBatch) -> None:
    text = "\n".join(render_batch(make_batch(0), tokenizer))
    assert [f"sample {i}, group {i // 3}" in text for i in range(6)] == [True] * 6


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("a\n\tb\r", "a⏎⇥b␍"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x00", "\\x00"),
        ("\u202eevil\u200b", "\\u202eevil\\u200b"),
        ("é漢🙂", "é漢🙂"),
    ],
)
def test_nothing_invisible_reaches_the_terminal(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(text).isprintable()


def test_names_and_reasons_of_a_file_command_no_terminal(tokenizer: Tokenizer, make_batch: MakeBatch) -> None:
    batch = make_batch(0)
    part = next(iter(batch.reward_parts.values()))
    batch = replace(
        batch,
        reward_parts={"\x1b]0;owned\x07[red]": part},
        dropped=(DroppedGroup(group=9, reason="\x1b[2J\r\nall is well"),),
        next_group=20,
    )
    text = "\n".join(render_batch(batch, tokenizer))
    assert all(character.isprintable() or character == "\n" for character in text)
    assert r"\x1b]0;owned\x07[red]" in text
