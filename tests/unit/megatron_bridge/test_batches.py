from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_bridge.batches import Plan, Split, TokenRows, plan_micro_batches
from pipeline.errors import RecipeError

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=40)


def rows_of(lengths: list[tuple[int, int]]) -> TokenRows:
    """(prompt, response) lengths → rows whose tokens are all different, from 1 on."""
    ids = iter(range(1, 10_000))
    rows = [np.array([next(ids) for _ in range(prompt + response)], np.int32) for prompt, response in lengths]
    return TokenRows(tokens=rows, starts=np.array([prompt for prompt, _ in lengths], np.int64))


def plans(rows: TokenRows, budget: int, ranks: int, **split: int) -> list[Plan]:
    """One plan for each data parallel rank and, with `context_ranks`, for each context parallel rank of it."""
    return [
        plan_micro_batches(
            rows,
            micro_batch_tokens=budget,
            split=Split(data_ranks=ranks, data_rank=rank, context_rank=context_rank, **split),
        )
        for rank in range(ranks)
        for context_rank in range(split.get("context_ranks", 1))
    ]


def test_by_hand() -> None:
    rows = rows_of([(2, 2), (1, 1)])  # 1 2 | 3 4   and   5 | 6
    (plan,) = plans(rows, 64, 1)
    (micro,) = plan.micro_batches
    assert micro.tokens.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert micro.labels.tolist() == [[2, 3, 4], [6, 0, 0]]
    assert micro.positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert micro.mask.tolist() == [[False, True, True], [True, False, False]]
    assert micro.index[micro.mask].tolist() == [0, 1, 2]
    assert micro.scatter(torch.tensor([7.0, 8.0, 9.0])).tolist() == [[0, 7, 8], [9, 0, 0]]
    assert plan.padding_share == pytest.approx(1 - 4 / 6)


@given(lengths=LENGTHS, ranks=st.integers(1, 4), budget=st.integers(42, 200), context=st.sampled_from([1, 2, 3]))
def test_every_predicted_token_appears_exactly_once(
    lengths: list[tuple[int, int]], ranks: int, budget: int, context: int
) -> None:
    rows = rows_of(lengths)
    wanted = [token for row, (prompt, _) in zip(rows.tokens, lengths, strict=True) for token in row[prompt:]]
    found = np.zeros(len(wanted), np.int64)
    times = np.zeros(len(wanted), np.int64)
    for plan in plans(rows, budget, ranks, context_ranks=context, width_multiple=2 * context):
        for micro in plan.micro_batches:
            places = micro.index[micro.mask].numpy()
            found[places] = micro.labels[micro.mask].numpy()
            np.add.at(times, places, 1)
            # a label follows its token: ids were given out in order
            assert torch.equal(micro.labels[micro.mask], micro.tokens[micro.mask] + 1)
    assert found.tolist() == wanted
    assert (times == 1).all()


@given(lengths=LENGTHS, ranks=st.integers(1, 4), budget=st.integers(38, 200))
def test_ranks_keep_step_within_the_budget(lengths: list[tuple[int, int]], ranks: int, budget: int) -> None:
    parts = plans(rows_of(lengths), budget, ranks)
    assert len({len(plan.micro_batches) for plan in parts}) == 1
    assert len({plan.padding_share for plan in parts}) == 1
    assert all(micro.tokens.numel() <= budget for plan in parts for micro in plan.micro_batches)
    positions = sum(micro.tokens.numel() for plan in parts for micro in plan.micro_batches)
    real = sum(prompt + response - 1 for prompt, response in lengths)
    assert parts[0].padding_share == pytest.approx(1 - real / positions)


@given(lengths=LENGTHS, ranks=st.integers(1, 4))
def test_scatter_and_gather_are_inverse(lengths: list[tuple[int, int]], ranks: int) -> None:
    rows = rows_of(lengths)
    flat = torch.arange(1.0, rows.offsets[-1] + 1)
    total = torch.zeros_like(flat)
    for plan in plans(rows, 64, ranks):
        for micro in plan.micro_batches:
            micro.gather_into(total, micro.scatter(flat))
    assert torch.equal(total, flat)


@given(lengths=LENGTHS, ranks=st.integers(2, 4))
def test_load_is_balanced_to_one_row(lengths: list[tuple[int, int]], ranks: int) -> None:
    loads = [
        sum(int((micro.tokens > 0).sum()) for micro in plan.micro_batches)
        for plan in plans(rows_of(lengths), 64, ranks)
    ]
    assert max(loads) - min(loads) <= max(prompt + response for prompt, response in lengths)


def test_a_rank_without_rows_gets_a_masked_micro_batch() -> None:
    busy, idle = plans(rows_of([(2, 3)]), 64, 2)
    assert len(busy.micro_batches) == len(idle.micro_batches) == 1
    assert idle.micro_batches[0].tokens.shape == (1, 1)
    assert not idle.micro_batches[0].mask.any()
    assert idle.micro_batches[0].scatter(torch.tensor([float("nan")] * 3)).tolist() == [[0.0]]


def test_context_ranks_hold_the_first_and_the_last_piece_and_so_on_inwards() -> None:
    rows = rows_of([(1, 8)])  # predicts from tokens 1 … 8
    pieces = [plan.micro_batches[0] for plan in plans(rows, 64, 1, context_ranks=2, width_multiple=4)]
    assert [piece.tokens.tolist() for piece in pieces] == [[[1, 2, 7, 8]], [[3, 4, 5, 6]]]
    assert [piece.positions.tolist() for piece in pieces] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]


@given(lengths=LENGTHS, width=st.sampled_from([1, 2, 8]), count=st.sampled_from([1, 2, 3]))
def test_widths_and_counts_are_what_megatron_asks(lengths: list[tuple[int, int]], width: int, count: int) -> None:
    for plan in plans(rows_of(lengths), 64, 2, width_multiple=width, count_multiple=count):
        assert len(plan.micro_batches) % count == 0
        assert all(micro.tokens.shape[1] % width == 0 for micro in plan.micro_batches)
        positions = sum(
            micro.tokens.numel()
            for p in plans(rows_of(lengths), 64, 2, width_multiple=width, count_multiple=count)
            for micro in p.micro_batches
        )
        real = sum(prompt + response - 1 for prompt, response in lengths)
        assert plan.padding_share == pytest.approx(1 - real / positions)


def test_a_row_that_does_not_fit_is_refused() -> None:
    plans(rows_of([(2, 9)]), 10, 1)
    with pytest.raises(
        RecipeError, match=r"sample of 12 tokens, padded to 11, does not fit in learner\.micro_batch_tokens 10"
    ):
        plans(rows_of([(2, 10)]), 10, 1)


def test_the_first_token_cannot_be_predicted() -> None:
    with pytest.raises(ValueError, match="row 0 predicts from token 0"):
        plans(rows_of([(0, 3)]), 64, 1)


def test_whole_rows() -> None:
    rows = TokenRows.whole([[4, 5, 6], [7, 8]])
    assert rows.offsets.tolist() == [0, 2, 3]
