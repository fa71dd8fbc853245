from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_bridge.step.micro_batches import Plan, Split, TokenRows, deal, plan_micro_batches, zigzag_columns
from pipeline.data.batch import KeptSets
from pipeline.data.routed_experts import RoutedExperts
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
    assert micro.row_ends.tolist() == [0, 3, 4]
    assert micro.tokens.tolist() == [[1, 2, 3, 5]]
    assert micro.labels.tolist() == [[2, 3, 4, 6]]
    assert micro.columns.tolist() == [1, 2, 3]
    assert micro.index.tolist() == [0, 1, 2]
    assert micro.scatter(torch.tensor([7.0, 8.0, 9.0])).tolist() == [[0, 7, 8, 9]]
    assert plan.padding_share == 0.0


def test_context_and_sequence_parallelism_pad_what_they_must() -> None:
    rows = rows_of([(1, 5), (1, 2)])  # predict from 5 and 2 tokens: 8 and 4 with pieces of 2 and 1, then 16 for the sum
    first, second = plans(rows, 64, 1, context_ranks=2, sequence_ranks=4)
    assert first.micro_batches[0].row_ends.tolist() == [0, 8, 12, 16]
    assert first.micro_batches[0].tokens.tolist() == [[1, 2, 0, 0, 7, 0, 1, 4]]
    assert second.micro_batches[0].tokens.tolist() == [[3, 4, 5, 0, 8, 0, 2, 3]]
    assert first.padding_share == second.padding_share == pytest.approx(1 - 7 / 16)


def test_fp8_pads_what_each_rank_is_left_with() -> None:
    rows = rows_of([(1, 5), (1, 2)])  # predict from 5 and 2 tokens
    (alone,) = plans(rows, 64, 1, token_multiple=16)
    assert alone.micro_batches[0].row_ends.tolist() == [0, 5, 7, 16]
    # 8 and 4 with pieces of 2 and 1; 16 for each of 2 × 2 ranks is 64 in sum.
    split, _ = plans(rows, 64, 1, context_ranks=2, sequence_ranks=2, token_multiple=16)
    assert split.micro_batches[0].row_ends.tolist() == [0, 8, 12, 64]
    assert split.micro_batches[0].tokens.shape == (1, 32)
    assert split.padding_share == pytest.approx(1 - 7 / 64)
    with pytest.raises(RecipeError, match="a sample of 6 tokens, padded to 8, does not fit"):
        plans(rows, 63, 1, context_ranks=2, sequence_ranks=2, token_multiple=16)


def test_a_preferred_multiple_is_kept_where_the_budget_has_room() -> None:
    rows = rows_of([(1, 5), (1, 2), (1, 9)])  # predict from 5, 2 and 9 tokens
    for budget, ends in ((64, [0, 9, 14, 16, 32]), (20, [0, 9, 14, 16, 20])):
        (plan,) = plans(rows, budget, 1, preferred_multiple=32)
        assert [micro.row_ends.tolist() for micro in plan.micro_batches] == [ends]
    (split, _) = plans(rows, 256, 1, preferred_multiple=32, context_ranks=2, sequence_ranks=2)
    assert split.micro_batches[0].tokens.shape == (1, 64)  # 32 for each of the two that share them


def test_stages_of_a_pipeline_get_micro_batches_of_one_length() -> None:
    rows = rows_of([(1, 9), (1, 6), (1, 5)])  # predict from 9, 6 and 5 tokens
    uneven, even = (plans(rows, 12, 1, one_length=one_length)[0] for one_length in (False, True))
    assert [micro.row_ends.tolist() for micro in uneven.micro_batches] == [[0, 9], [0, 6, 11]]
    assert [micro.row_ends.tolist() for micro in even.micro_batches] == [[0, 9, 11], [0, 6, 11]]
    padded = even.micro_batches[0]
    assert padded.tokens.tolist() == [[*range(1, 10), 1, 2]]
    assert padded.columns.tolist() == [*range(9)]
    assert (padded.places[9:] == -1).all()
    assert even.padding_share == pytest.approx(2 / 22)


def test_context_ranks_hold_pieces_from_both_ends() -> None:
    assert [zigzag_columns([8, 4], 2, rank).tolist() for rank in (0, 1)] == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert zigzag_columns([3, 2], 1, 0).tolist() == [0, 1, 2, 3, 4]


@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 4),
    budget=st.integers(48, 200),
    context=st.sampled_from([1, 2, 3]),
    sequence=st.sampled_from([1, 2]),
    multiple=st.sampled_from([1, 3, 8]),
    one_length=st.booleans(),
)
def test_every_predicted_token_appears_exactly_once(
    lengths: list[tuple[int, int]],
    ranks: int,
    budget: int,
    context: int,
    sequence: int,
    multiple: int,
    one_length: bool,
) -> None:
    rows = rows_of(lengths)
    wanted = [token for row, (prompt, _) in zip(rows.tokens, lengths, strict=True) for token in row[prompt:]]
    found = np.zeros(len(wanted), np.int64)
    times = np.zeros(len(wanted), np.int64)
    split = dict(context_ranks=context, sequence_ranks=sequence, token_multiple=multiple, one_length=one_length)
    for plan in plans(rows, budget, ranks, **split):
        assert not one_length or len({micro.tokens.numel() for micro in plan.micro_batches}) == 1
        for micro in plan.micro_batches:
            assert micro.tokens.numel() % (sequence * multiple) == 0
            assert (micro.row_ends.diff() % (2 * context if context > 1 else 1) == 0).all()
            places, predicted = micro.index.numpy(), (0, micro.columns)
            found[places] = micro.labels[predicted].numpy()
            np.add.at(times, places, 1)
            # a label follows its token: ids were given out in order
            assert torch.equal(micro.labels[predicted], micro.tokens[predicted] + 1)
    assert found.tolist() == wanted
    assert (times == 1).all()


@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 4),
    budget=st.integers(48, 200),
    sequence=st.sampled_from([1, 4]),
    count=st.sampled_from([1, 2, 3]),
    one_length=st.booleans(),
)
def test_ranks_keep_step_within_the_budget(
    lengths: list[tuple[int, int]], ranks: int, budget: int, sequence: int, count: int, one_length: bool
) -> None:
    split = dict(sequence_ranks=sequence, count_multiple=count, one_length=one_length)
    parts = plans(rows_of(lengths), budget, ranks, **split)
    assert len({len(plan.micro_batches) for plan in parts}) == 1
    assert len(parts[0].micro_batches) % count == 0
    assert len({plan.padding_share for plan in parts}) == 1
    micros = [micro for plan in parts for micro in plan.micro_batches]
    assert all(micro.tokens.numel() <= budget and micro.tokens.numel() % sequence == 0 for micro in micros)
    assert all(micro.row_ends[-1] == micro.tokens.numel() for micro in micros)
    real = sum(prompt + response - 1 for prompt, response in lengths)
    assert parts[0].padding_share == pytest.approx(1 - real / sum(micro.tokens.numel() for micro in micros))


@given(lengths=LENGTHS, ranks=st.integers(1, 4))
def test_scatter_and_gather_are_inverse(lengths: list[tuple[int, int]], ranks: int) -> None:
    rows = rows_of(lengths)
    flat = torch.arange(1.0, rows.offsets[-1] + 1)
    total = torch.zeros_like(flat)
    for plan in plans(rows, 64, ranks):
        for micro in plan.micro_batches:
            total[micro.index] = micro.scatter(flat)[0, micro.columns]
    assert torch.equal(total, flat)


@given(lengths=LENGTHS, ranks=st.integers(2, 4))
def test_load_is_balanced_to_one_row(lengths: list[tuple[int, int]], ranks: int) -> None:
    loads = [
        sum(int((micro.tokens > 0).sum()) for micro in plan.micro_batches)
        for plan in plans(rows_of(lengths), 64, ranks)
    ]
    assert max(loads) - min(loads) <= max(prompt + response for prompt, response in lengths)


def test_ranks_are_balanced_by_arithmetic_and_micro_batches_by_tokens() -> None:
    # Where attention is as dear as all else at 12 tokens, a row of 12 takes 12 × 24 = 288, and one of 2 takes 28.
    rows = rows_of([(1, 2)] * 4 + [(1, 12)] + [(1, 2)] * 4)
    assert [plan.micro_batches[0].row_ends.diff().tolist() for plan in plans(rows, 16, 2)] == [[12, 2], [2] * 7]
    weighed = plans(rows, 16, 2, attention_parity=12)
    assert [plan.micro_batches[0].row_ends.diff().tolist() for plan in weighed] == [[12], [2] * 8]
    (alone,) = plans(rows, 16, 1, attention_parity=12)
    assert [micro.row_ends.diff().tolist() for micro in alone.micro_batches] == [[12, 2], [2] * 7]


def test_a_rank_without_rows_gets_a_masked_micro_batch() -> None:
    busy, idle = plans(rows_of([(2, 3)]), 64, 2)
    assert len(busy.micro_batches) == len(idle.micro_batches) == 1
    assert idle.micro_batches[0].tokens.shape == (1, 1)
    assert len(idle.micro_batches[0].columns) == 0
    assert idle.micro_batches[0].scatter(torch.tensor([float("nan")] * 3)).tolist() == [[0.0]]


def test_a_row_that_does_not_fit_is_refused() -> None:
    plans(rows_of([(2, 9)]), 10, 1)
    with pytest.raises(RecipeError, match=r"12 tokens, padded to 11, does not fit in learner\.micro_batch_tokens 10"):
        plans(rows_of([(2, 10)]), 10, 1)
    with pytest.raises(RecipeError, match=r"11 tokens, padded to 12, does not fit in learner\.micro_batch_tokens 11"):
        plans(rows_of([(2, 9)]), 11, 1, context_ranks=2)


def test_the_first_token_cannot_be_predicted() -> None:
    with pytest.raises(ValueError, match="row 0 predicts from token 0"):
        plans(rows_of([(0, 3)]), 64, 1)


@given(lengths=LENGTHS, ranks=st.integers(1, 4), context=st.sampled_from([1, 2]), data=st.data())
def test_rows_left_out_leave_the_places_of_the_others(
    lengths: list[tuple[int, int]], ranks: int, context: int, data: st.DataObject
) -> None:
    """Each predicted token of a chosen row comes once, at its place among all rows; the others never come; every rank
    has as many micro-batches as the others, down to none of its own rows."""
    rows = rows_of(lengths)
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    split = [(rank, piece) for rank in range(ranks) for piece in range(context)]
    found = [
        plan_micro_batches(
            rows,
            micro_batch_tokens=96,
            split=Split(data_ranks=ranks, data_rank=rank, context_ranks=context, context_rank=piece),
            chosen=chosen,
        )
        for rank, piece in split
    ]
    assert len({len(plan.micro_batches) for plan in found}) == 1
    places = [place for plan in found for m in plan.micro_batches for place in m.index.tolist()]
    labels = [label for plan in found for m in plan.micro_batches for label in m.labels[0, m.columns].tolist()]
    flat = np.concatenate([row[start:] for row, start in zip(rows.tokens, rows.starts, strict=True)])
    expected = np.flatnonzero(np.repeat(chosen, np.diff(rows.offsets))).tolist()
    assert sorted(places) == expected
    assert [flat[place] for place in places] == labels


@given(lengths=LENGTHS, ranks=st.integers(1, 3), context=st.sampled_from([1, 2]), seed=st.integers(0, 2**16))
def test_each_label_has_its_own_kept_set(lengths: list[tuple[int, int]], ranks: int, context: int, seed: int) -> None:
    """Over all ranks, every set is where its token is predicted, and nowhere else."""
    rows = rows_of(lengths)
    random = np.random.default_rng(seed)
    sets = [random.integers(0, 50, random.integers(0, 4)).tolist() for _ in range(rows.offsets[-1])]
    sets = [sorted(set(one)) for one in sets]
    found: list[list[int] | None] = [None] * len(sets)
    for plan in plans(replace(rows, kept=KeptSets.of(sets)), 64, ranks, context_ranks=context):
        for micro in plan.micro_batches:
            assert micro.kept is not None
            assert micro.to("cpu").kept is not None
            held = [part.tolist() for part in micro.kept.tokens.split(micro.kept.counts.tolist())]
            assert len(held) == micro.labels.numel()
            assert micro.kept.owner.tolist() == [row for row, one in enumerate(held) for _ in one]
            for column, place in zip(micro.columns.tolist(), micro.index.tolist(), strict=True):
                found[place], held[column] = held[column], []
            assert not any(held)
    assert found == sets


@given(LENGTHS, st.integers(1, 4), st.sampled_from([1, 2]), st.integers(0, 9))
def test_a_plan_of_a_share_is_that_of_all_rows(
    lengths: list[tuple[int, int]], ranks: int, context: int, seed: int
) -> None:
    """Who holds its own rows alone makes the same micro-batches as who holds all; kept sets and places are its own."""
    rows, random = rows_of(lengths), np.random.default_rng(seed)
    sets = [[place, place + 1] for place in range(int(rows.offsets[-1]))]
    halves = [random.random(len(lengths)) < 0.5]
    dealt = deal(rows.lengths, Split(data_ranks=ranks, context_ranks=context), [halves[0], ~halves[0]])
    chosen = random.random(len(lengths)) < 0.7
    for rank in range(ranks):
        held = dealt == rank
        own = [place for place, one in enumerate(sets) if np.repeat(held, np.diff(rows.offsets))[place]]
        share = TokenRows(
            tokens=[row if here else row[:0] for row, here in zip(rows.tokens, held, strict=True)],
            starts=rows.starts,
            kept=KeptSets.of([sets[place] for place in own]),
            ranks=dealt,
            all_lengths=rows.lengths,
        )
        whole = replace(rows, kept=KeptSets.of(sets), ranks=dealt)
        split = Split(data_ranks=ranks, data_rank=rank, context_ranks=context)
        mine, theirs = (
            plan_micro_batches(each, micro_batch_tokens=64, split=split, chosen=chosen) for each in (share, whole)
        )
        assert mine.padding_share == theirs.padding_share
        assert mine.rows.tolist() == theirs.rows.tolist() == (held & chosen).tolist()
        flat = np.concatenate([np.zeros(0, np.int32), *share.tokens])
        for micro, expected in zip(mine.micro_batches, theirs.micro_batches, strict=True):
            for name in ("tokens", "labels", "columns", "index", "row_ends"):
                assert torch.equal(getattr(micro, name), getattr(expected, name)), name
            assert micro.kept is not None
            assert expected.kept is not None
            assert torch.equal(micro.kept.tokens, expected.kept.tokens)
            real = micro.places >= 0
            assert flat[micro.places[real]].tolist() == micro.tokens[0, real].tolist()


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_beginnings_of_rows_keep_their_sets_and_experts(rank: int | None) -> None:
    rows = rows_of([(2, 3), (1, 4), (3, 1)])
    held = np.ones(3, np.bool_) if rank is None else np.array([0, 1, 0]) == rank
    tokens = [row if here else row[:0] for row, here in zip(rows.tokens, held, strict=True)]
    numbers = np.arange(int(rows.offsets[-1]))[np.repeat(held, np.diff(rows.offsets))]
    places = np.arange(int(rows.token_offsets[-1]), dtype=np.uint16)[np.repeat(held, rows.lengths)]
    whole = replace(
        rows,
        tokens=tokens,
        kept=KeptSets.of([[number] for number in numbers.tolist()]),
        experts=RoutedExperts(ids=places.reshape(-1, 1, 1), known=np.ones(len(places), np.bool_)),
        all_lengths=rows.lengths,
    )
    cut = whole.beginnings(np.array([3, 4, 4]))
    assert cut.lengths.tolist() == [3, 4, 4]
    assert [row.tolist() for row in cut.tokens] == [
        row[:length].tolist() for row, length in zip(tokens, (3, 4, 4), strict=True)
    ]
    assert cut.kept is not None
    assert cut.experts is not None
    assert cut.kept.tokens.tolist() == [n for n, row in ((0, 0), (3, 1), (4, 1), (5, 1), (7, 2)) if held[row]]
    expected = [(p, 0) for p in range(3)] + [(5 + p, 1) for p in range(4)] + [(10 + p, 2) for p in range(4)]
    assert cut.experts.ids.ravel().tolist() == [place for place, row in expected if held[row]]
