"""Episodes of several turns in batches: their rows, their files, the rules of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.batch import (
    ENVIRONMENT_FAILED,
    Batch,
    EpisodeFacts,
    Episodes,
    Group,
    Prompt,
    Sample,
    Share,
    StopReason,
    TokenKind,
)
from pipeline.data.batch_format import OPTIONAL, arrays_of, attributes_of, check_batch
from pipeline.data.batch_values import Limits, check_values
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from tests.support.batches import CONTRACT, batch_of_episodes, batch_of_rewards, episode

REWARDS = [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.25]]
PROMPT = (7, 8)


def batch_of(*samples: Sample) -> Batch:
    groups = [Group(prompt=Prompt(group=0, text="", answer="", tokens=PROMPT), samples=samples)]
    return Batch.from_groups(0, groups, contract=CONTRACT, dropped=(), next_group=1, recipe_sha256="cd" * 32)


def forked() -> Batch:
    """Turns 1 2 | 3 | 4 5, tool output 10 11 and 12; the last turn is in a row of its own."""
    return batch_of(episode([[1, 2], [3], [4, 5]], [[10, 11], [12]], prompt=PROMPT, fork=2, reward=1.0))


def test_an_episode_is_one_row_with_the_tokens_of_tools_between_its_turns() -> None:
    batch = batch_of(episode([[1, 2], [3]], [[10, 11]], prompt=PROMPT))
    assert batch.rows()[0].tolist() == [7, 8, 1, 2, 10, 11, 3]
    assert batch.loss_mask.tolist() == [True, True, False, False, True]
    assert batch.token_kind is not None
    assert batch.token_kind.tolist() == [0, 0, TokenKind.TOOL, TokenKind.TOOL, 0]
    assert batch.answer_lengths.tolist() == [3]
    assert not batch.interrupted.any()


def test_a_branch_is_a_row_that_repeats_what_it_shares() -> None:
    batch = forked()
    assert [row.tolist() for row in batch.rows()] == [[7, 8, 1, 2, 10, 11, 3], [7, 8, 1, 2, 10, 11, 3, 12, 4, 5]]
    assert batch.episodes is not None
    assert batch.episodes.branch_of.tolist() == [-1, 0]
    assert batch.episodes.branched_at.tolist() == [0, 7]
    assert batch.episodes.turns.tolist() == [2, 1]
    assert (batch.num_samples, batch.num_episodes, batch.episode_offsets.tolist()) == (2, 1, [0, 7])
    check_batch(batch)


def test_each_sampled_turn_is_trained_once_however_the_episodes_branch() -> None:
    one, two = batch_of_episodes(REWARDS), batch_of_episodes(REWARDS, forked=True)
    check_batch(one)
    check_batch(two)
    assert two.num_samples > one.num_samples == one.num_episodes == two.num_episodes
    for name in ("rollout_logprobs", "response_tokens"):
        assert getattr(one, name)[one.loss_mask].tolist() == getattr(two, name)[two.loss_mask].tolist()
    assert one.answer_lengths.tolist() == two.answer_lengths.tolist()
    samples = [episode([[1, 2], [3]], [[10]], prompt=PROMPT, fork=fork) for fork in (None, 1)]
    assert [sample.answer_tokens for sample in samples] == [3, 3]


def test_a_file_holds_episodes_and_a_rank_reads_its_share_of_the_rows(tmp_path: Path) -> None:
    store, batch = BatchStore(tmp_path), batch_of_episodes(REWARDS, forked=True)
    rewarded = replace(batch, episodes=with_turn_rewards(batch))
    store.commit(rewarded)
    found = store.read(0, CONTRACT)
    for name, array in arrays_of(rewarded).items():
        np.testing.assert_array_equal(arrays_of(found)[name], array, name)

    ranks = np.arange(batch.num_samples) % 2  # the rows of an episode are on different ranks
    shares = [store.read(0, CONTRACT, choose=lambda _, rank=rank: Share(ranks=ranks, rank=rank)) for rank in (0, 1)]
    kinds = [share.token_kind for share in shares]
    assert (np.sum(kinds, axis=0) == batch.token_kind).all()
    assert all(share.episode_offsets.tolist() == batch.episode_offsets.tolist() for share in shares)


def with_turn_rewards(batch: Batch) -> Episodes:
    assert batch.episodes is not None
    turns = int(batch.episodes.turns.sum())
    return replace(batch.episodes, turn_rewards=np.where(np.arange(turns) % 2, np.arange(turns), np.nan).astype("f4"))


def test_a_batch_of_one_turn_a_sample_has_nothing_of_episodes_in_its_file() -> None:
    batch = batch_of_rewards([[1.0, 0.0]])
    assert batch.episodes is None
    assert not {*OPTIONAL} & {*arrays_of(batch)}
    assert attributes_of(batch)["optional_arrays"] == []
    assert batch.episode.tolist() == [0, 1]
    assert batch.episode_offsets.tolist() == batch.response_offsets.tolist()


def test_a_sample_of_one_turn_beside_episodes_is_an_episode_of_one_turn() -> None:
    alone = batch_of_rewards([[1.0, 0.0]], unsampled=0.0)
    single = Sample(completion=replace(episode([[1, 2]], [], prompt=PROMPT).completion, kinds=None), reward=1.0)
    batch = batch_of(single, episode([[3], [4]], [[9]], prompt=PROMPT))
    check_batch(batch)
    assert batch.episodes is not None
    assert batch.episodes.turns.tolist() == [1, 2]
    unlearned = batch_of(replace(single, completion=single.completion.unlearned()), episode([[3]], [], prompt=PROMPT))
    check_batch(unlearned)
    assert alone.episodes is None


def test_nothing_is_learned_from_an_episode_whose_environment_failed() -> None:
    facts = EpisodeFacts(stopped=StopReason.ENVIRONMENT_FAILED, turns=2)
    batch = batch_of(
        episode([[1], [2]], [[9]], prompt=PROMPT, fork=1, facts=facts), episode([[3]], [], prompt=PROMPT, reward=1.0)
    )
    check_batch(batch)
    assert batch.judged.tolist() == [False, False, True]
    assert batch.reward_parts[ENVIRONMENT_FAILED][:2].tolist() == [1.0, 1.0]
    assert batch.loss_mask.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("reason", "truncated"),
    [
        (StopReason.FINISHED, False),
        (StopReason.TURNS, True),
        (StopReason.CONTEXT, True),
        (StopReason.AGENT_FAILED, False),
    ],
)
def test_an_episode_is_truncated_where_a_budget_ended_it(reason: StopReason, truncated: bool) -> None:
    facts = EpisodeFacts(stopped=reason, turns=2)
    batch = batch_of(episode([[1], [2]], [[9]], prompt=PROMPT, fork=1, facts=facts))
    assert batch.truncated.tolist() == [truncated, truncated]


def test_facts_that_count_other_turns_than_the_rows_are_refused() -> None:
    facts = EpisodeFacts(stopped=StopReason.FINISHED, turns=3)
    with pytest.raises(ValueError, match="an episode of 3 turns, with rewards of 0, has 2 turns in its 1 rows"):
        batch_of(episode([[1], [2]], [[9]], prompt=PROMPT, facts=facts))


def test_a_selection_keeps_the_rows_of_an_episode_together() -> None:
    batch = batch_of_episodes(REWARDS, forked=True)
    batch = replace(batch, episodes=with_turn_rewards(batch))
    last = batch.select(batch.group == 2)
    check_batch(last)
    assert last.episodes is not None
    assert last.episodes.number.tolist() == last.episode.tolist()
    assert last.num_episodes == 2
    assert batch.episodes is not None
    assert batch.episodes.turn_rewards is not None
    assert last.episodes.turn_rewards is not None
    turns = int(last.episodes.turns.sum())
    np.testing.assert_array_equal(last.episodes.turn_rewards, batch.episodes.turn_rewards[-turns:])
    # A branch without the row that it branched from is a row of its own.
    alone = forked().select(np.array([False, True]))
    check_batch(alone)


def edited(batch: Batch, **changes: Any) -> Batch:
    """The batch with some values of its episodes' arrays set: NAME=(row or token, value)."""
    kinds, episodes = batch.token_kind, batch.episodes
    assert kinds is not None
    assert episodes is not None
    for name, (place, value) in changes.items():
        holder = batch if hasattr(batch, name) else episodes
        array = getattr(holder, name).copy()
        array[place] = value
        if holder is episodes:
            episodes = replace(episodes, **{name: array})
        else:
            batch = replace(batch, **{name: array})
    return replace(batch, episodes=episodes)


FAULTS: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "episodes that do not ascend": (
        lambda batch: edited(batch, number=(slice(None), [1, 1])),
        "row 0 is not beside the other rows of its episode",
    ),
    "another group": (
        lambda batch: replace(edited(batch, group=(1, 5)), next_group=6),
        "row 1 has another group than the first row",
    ),
    "another reward": (lambda batch: edited(batch, reward=(1, 0.5)), "row 1 has another reward than the first row"),
    "a later branch": (lambda batch: edited(batch, branch_of=(0, 1)), "row 0 branched from a row that is not before"),
    "too long a prefix": (lambda batch: edited(batch, branched_at=(1, 9)), "row 1 repeats more tokens than its prompt"),
    "a prefix of no row": (lambda batch: edited(batch, branch_of=(1, -1)), "row 1 repeats tokens of a row without"),
    "other tokens": (lambda batch: edited(batch, tokens=(9, 50)), "row 1 does not repeat the first 7 tokens of row 0"),
    "a lost turn": (lambda batch: edited(batch, turns=(0, 1)), "row 0 has another number of turns"),
    "a tool's token that is trained": (
        lambda batch: edited(batch, loss_mask=(2, True)),
        "row 0 has a loss_mask that is not that of its sampled tokens",
    ),
    "a row alone unlearned": (
        lambda batch: edited(batch, loss_mask=(slice(5, 7), False), rollout_logprobs=(slice(5, 7), 0.0)),
        "row 1 has a loss_mask that is not that of its sampled tokens, nor empty in its whole episode",
    ),
    "tokens that trail": (
        lambda batch: edited(batch, token_kind=(6, TokenKind.TOOL), loss_mask=(6, False), rollout_logprobs=(6, 0.0)),
        "row 1 begins or ends its response with a token not sampled",
    ),
    "an unknown kind": (lambda batch: edited(batch, token_kind=(2, 9)), "row 0 has a token kind that is not below 6"),
    "an unknown reason": (lambda batch: edited(batch, stopped=(slice(None), 9)), "row 0 stopped for a reason"),
    "kinds without episodes": (lambda batch: replace(batch, episodes=None), "belong together, and only one is there"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_do_not_belong_together_are_refused(fault: str) -> None:
    damage, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        check_batch(damage(forked()))


def test_a_store_refuses_an_episode_that_would_train_a_turn_twice(tmp_path: Path) -> None:
    twice = forked()
    # Row 1 as if it had sampled the shared turn itself: its prompt ends before the turn 3.
    first, second = episode([[1, 2], [3], [4, 5]], [[10, 11], [12]], prompt=PROMPT, fork=2), [3, 12, 4, 5]
    kinds = np.array([0, TokenKind.TOOL, 0, 0], np.uint8)
    branch = first.branches[0]
    completion = replace(
        branch.completion,
        tokens=np.array(second, np.int32),
        kinds=kinds,
        loss_mask=kinds == 0,
        **{name: np.zeros(4, dtype) for name, dtype in (("logprobs", "f4"), ("versions", "i4"))},
    )
    twice = batch_of(
        replace(
            first,
            branches=(replace(branch, prompt=branch.prompt[:6], completion=completion),),
            episode=EpisodeFacts(stopped=StopReason.FINISHED, turns=4),
        )
    )
    with pytest.raises(StoreError, match="row 1 repeats more tokens than its prompt"):
        BatchStore(tmp_path).commit(twice)


def test_the_longest_answer_of_an_engine_bounds_a_turn_not_the_episode() -> None:
    batch = batch_of(episode([[1, 2], [3, 4]], [[9, 9, 9]], prompt=PROMPT))
    check_values(batch, Limits(max_response_tokens=2))
    with pytest.raises(ValueError, match="sample 0: a turn has 2 tokens, at most 1 were asked for"):
        check_values(batch, Limits(max_response_tokens=1))
