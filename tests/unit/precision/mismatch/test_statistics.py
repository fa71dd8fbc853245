from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision.mismatch import statistics as module
from precision.mismatch.statistics import (
    GROUPS,
    OFFSETS,
    SEQUENCE_COLUMNS,
    SPLITS,
    Gap,
    GroupSums,
    Mismatch,
    Ranks,
    StepTokens,
    gap,
    quantiles,
)
from precision.ratios import SUMS
from tests.support import mismatch_reference as reference
from tests.support.threads_as_ranks import on_ranks


def test_gap_by_hand() -> None:
    # l = 0, ln 2, -ln 2 (and NaN behind the mask): rho = 1, 2, .5; S1 = 3.5, S2 = 5.25
    learner = torch.tensor([-1.0, -2.0 + math.log(2), -3.0 - math.log(2), math.nan], dtype=torch.float64)
    engine = torch.tensor([-1.0, -2.0, -3.0, -1.0], dtype=torch.float64)
    result = gap(learner, engine, torch.tensor([True, True, True, False]))
    assert result.num_tokens == 3
    assert result.max_abs == pytest.approx(math.log(2), rel=1e-12)
    assert result.mean_abs == pytest.approx(2 * math.log(2) / 3, rel=1e-12)
    assert result.k3 == pytest.approx(0.5 / 3, rel=1e-12)
    assert result.ess == pytest.approx(12.25 / 15.75, rel=1e-8)


def test_max_abs_sees_both_signs() -> None:
    zeros = torch.zeros(2)
    assert gap(torch.tensor([-3.0, 1.0]), zeros).max_abs == 3.0
    assert gap(torch.tensor([-1.0, 3.0]), zeros).max_abs == 3.0


def test_agreement() -> None:
    row = torch.tensor([-0.1, -7.0])
    assert gap(row, row.clone()) == Gap(num_tokens=2, max_abs=0.0, mean_abs=0.0, k3=0.0, ess=pytest.approx(1.0))


def test_nothing_or_nan_compared_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        gap(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(FloatingPointError):
        gap(torch.tensor([math.nan]), torch.zeros(1))


LENGTHS = [1, 70, 3, 300, 17, 2, 1100, 40]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_rows_are_those_of_the_splits() -> None:
    for split, offset in zip(SPLITS, OFFSETS, strict=True):
        rows = GROUPS[offset : offset + len(split.buckets)]
        assert rows == tuple(f"{split.name}/{bucket}" for bucket in split.buckets)
        assert len(split.edges) == len(split.buckets) - 1


@pytest.mark.parametrize("chunk_tokens", [module.CHUNK_TOKENS, 100])
def test_every_group_equals_brute_force(chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", chunk_tokens)
    tokens = reference.random_tokens(0, LENGTHS)
    found = Mismatch.of_step(tokens)
    names, table = found.table()
    learner, rollout = tokens.learner_logprobs.numpy(), tokens.rollout_logprobs.numpy()
    expected = reference.masks(tokens)
    assert tuple(expected) == GROUPS
    assert sum(mask.any() for mask in expected.values()) > 20
    for row, mask in enumerate(expected.values()):
        if not mask.any():
            assert np.isnan(table[0, row]).all()
            assert np.isnan(found.quantiles[0, row]).all()
            continue
        by_hand = reference.statistics(learner[mask], rollout[mask])
        assert set(names) == set(by_hand)
        close(table[0, row], [by_hand[name] for name in names])
        close(found.quantiles[0, row], reference.quantiles(learner[mask], rollout[mask]))
        assert found.histogram[0, row].sum() == mask.sum()


@pytest.mark.parametrize("size", [2, 3, 40])
def test_ranks_that_share_the_chunks_find_what_one_finds(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", 100)
    tokens = reference.random_tokens(8, LENGTHS)
    assert len(tokens.chunks()) == 5  # 1 70 3 | 300 | 17 2 | 1100 | 40
    alone = Mismatch.of_step(tokens)
    for found in on_ranks(size, lambda ranks: Mismatch.of_step(tokens, ranks)):
        for name, mine in vars(found).items():
            np.testing.assert_array_equal(mine, getattr(alone, name), err_msg=name)


def test_a_rank_measures_its_chunks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", 100)
    tokens, measured = reference.random_tokens(8, LENGTHS), []

    def from_tokens(learner: Any, rollout: Any, buckets: Any) -> GroupSums:
        measured.append(len(learner))
        return GroupSums.zero()

    monkeypatch.setattr(GroupSums, "from_tokens", from_tokens)
    on_ranks(5, lambda ranks: Mismatch.of_step(tokens, ranks))
    assert sorted(measured) == sorted(int(tokens.part(*each).seen.sum()) for each in tokens.chunks())


def test_every_rank_refuses_what_one_of_them_would_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", 100)
    tokens = reference.random_tokens(8, LENGTHS)
    broken = replace(tokens, seen=torch.ones_like(tokens.seen))  # the others are NaN

    def refused(ranks: Ranks) -> str:
        with pytest.raises(FloatingPointError, match=r"of 1533 tokens have an unusable log-ratio") as found:
            Mismatch.of_step(broken, ranks)
        return str(found.value)

    assert len(set(on_ranks(2, refused))) == 1


def test_sequences_equal_brute_force() -> None:
    tokens = reference.random_tokens(1, LENGTHS)
    found = Mismatch.of_step(tokens)
    gaps = reference.sequence_totals(tokens)
    for row, each in zip(found.sequences, gaps, strict=True):
        if len(each):
            ratios = np.exp(each)
            ess = ratios.sum() ** 2 / (len(each) * (ratios**2).sum())
            expected = [len(each), each.sum(), np.abs(each).sum(), each.max(), each.min(), ess]
            close(np.delete(row, [5, 6]), expected)
    totals = np.array([each.sum() for each in gaps if len(each)])
    means = np.array([each.mean() for each in gaps if len(each)])
    told = found.statistics()

    def ess_of(logs: Any) -> float:
        return float(np.exp(logs).sum() ** 2 / (len(logs) * (np.exp(logs) ** 2).sum()))

    close(told["sequence_ess"], ess_of(totals))
    close(told["sequence_mean_ratio_ess"], ess_of(means))
    close(told["sequence_chi2"], (np.exp(totals) ** 2).mean() - 1)
    close(told["sequence_k1_kl"], -totals.mean())
    close(told["sequence_k2_kl"], (totals**2).mean() / 2)
    close(told["sequence_k3_kl"], (np.exp(totals) - 1 - totals).mean())
    close(told["sequence_log_ratio_max"], totals.max())
    everything = np.concatenate(gaps)
    close(told["log_ratio_p99_9"], np.quantile(everything, 0.999))
    close(told["log_ratio_p5"], np.quantile(everything, 0.05))


def test_a_sequence_without_any_seen_token_has_no_numbers() -> None:
    tokens = reference.random_tokens(2, [5, 5, 0])
    seen = tokens.seen.clone()
    seen[:5], seen[5] = False, True
    tokens = replace(
        tokens,
        seen=seen,
        learner_logprobs=torch.where(seen, tokens.learner_logprobs.nan_to_num(-1.0), math.nan),
        rollout_logprobs=torch.where(seen, tokens.rollout_logprobs.nan_to_num(-1.0, neginf=-1.0), -math.inf),
    )
    found = Mismatch.of_step(tokens)
    assert found.update.tolist() == [-1, 0, -1]
    assert found.sequences[[0, 2], 0].tolist() == [0.0, 0.0]
    assert np.isnan(found.sequences[[0, 2], 1:]).all()
    assert np.isfinite(found.sequences[1]).all()
    assert all(math.isfinite(value) for value in found.statistics().values())


def sums_of(tokens: StepTokens, chosen: Any) -> GroupSums:
    """Of the seen tokens at the places `chosen` [seen tokens] alone."""
    seen = tokens.seen
    learner, rollout = tokens.learner_logprobs.double()[seen], tokens.rollout_logprobs.double()[seen]
    return GroupSums.from_tokens(learner[chosen], rollout[chosen], tokens.buckets()[chosen])


@given(st.integers(0, 1000), st.integers(1, 5))
def test_sums_of_parts_add_up(seed: int, parts: int) -> None:
    tokens = reference.random_tokens(seed, [9, 30, 4])
    owner = torch.from_numpy(np.random.default_rng(seed).integers(0, parts, int(tokens.seen.sum())))
    whole = sums_of(tokens, owner >= 0)
    added = GroupSums.zero()
    for part in range(parts):
        added += sums_of(tokens, owner == part)
    torch.testing.assert_close(added.sums, whole.sums, rtol=1e-12, atol=1e-12)
    assert torch.equal(added.histogram, whole.histogram)


def test_updates_of_a_batch_stay_apart_and_add_up() -> None:
    tokens = [reference.random_tokens(seed, lengths) for seed, lengths in ((4, [8, 5]), (5, [30]))]
    parts = [Mismatch.of_step(each) for each in tokens]
    chosen = [np.array([True, False, False, True]), np.array([False, True, False, False])]
    found = Mismatch.stack(parts, chosen)
    assert found.update.tolist() == [0, 1, -1, 0]
    close(found.sequences[[0, 3]], parts[0].sequences)
    close(found.sequences[1], parts[1].sequences[0])
    assert found.sequences[2, 0] == 0
    seen = [reference.masks(each)["all"] for each in tokens]
    learner = np.concatenate([t.learner_logprobs.numpy()[s] for t, s in zip(tokens, seen, strict=True)])
    rollout = np.concatenate([t.rollout_logprobs.numpy()[s] for t, s in zip(tokens, seen, strict=True)])
    whole = reference.statistics(learner, rollout)
    told = found.group().statistics()
    close([told[name] for name in whole], list(whole.values()))
    assert found.table()[1].shape[:2] == (2, len(GROUPS))


def test_splits_name_the_buckets_that_hold_tokens() -> None:
    found = Mismatch.of_step(reference.random_tokens(6, [4, 2])).by_split()
    assert list(found) == ["advantage", "position", "entropy", "age"]
    assert list(found["position"]) == ["0", "1-3"]
    for buckets in found.values():
        assert sum(bucket["share"] for bucket in buckets.values()) == pytest.approx(1.0)


def test_gaps_that_no_number_holds_are_cut_or_refused() -> None:
    tokens = replace(reference.random_tokens(7, [3, 3]), seen=torch.ones(6, dtype=torch.bool))
    far = replace(tokens, learner_logprobs=torch.full((6,), -3000.0), rollout_logprobs=torch.zeros(6))
    found = Mismatch.of_step(far)
    assert np.isfinite(found.sums).all()
    assert found.sums[0, 0, SUMS.index("ratio_above_one")] == pytest.approx(6 * math.exp(40.0))
    assert found.sequences[0, SEQUENCE_COLUMNS.index("log_ratio")] == -9000.0
    with pytest.raises(FloatingPointError, match="6 of 6 tokens"):
        Mismatch.of_step(replace(far, learner_logprobs=torch.full((6,), 41.0)))
    with pytest.raises(ValueError, match="0 tokens"):
        Mismatch.of_step(replace(far, seen=torch.zeros(6, dtype=torch.bool)))
    long = replace(tokens, learner_logprobs=torch.full((6,), -1.0), rollout_logprobs=torch.full((6,), -31.0))
    assert math.isfinite(Mismatch.of_step(long).statistics()["sequence_chi2"])  # sequences of +90 nats


ORDERS = (0.0, 0.001, 0.5, 0.99, 1.0)
NUMBERS = st.one_of(
    st.floats(-40.0, 40.0),
    st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1.7976931348623157e308, -1.7976931348623157e308]),
)


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 2)), max_size=30))
def test_ranks_find_the_quantiles_of_all(values: list[tuple[float, int]]) -> None:
    def held(rank: int | None) -> torch.Tensor:
        return torch.tensor([x for x, owner in values if rank in (None, owner)], dtype=torch.float64).sort().values

    groups = [held(None), held(None).abs().sort().values]
    expected = quantiles(groups, ORDERS)

    def of_mine(ranks: Ranks) -> torch.Tensor:
        mine = held(ranks.rank)
        return quantiles([mine, mine.abs().sort().values], ORDERS, ranks)

    for found in on_ranks(3, of_mine):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_one_rank_interpolates_as_numpy_does() -> None:
    values = np.sort(np.random.default_rng(0).normal(size=1001))
    found = quantiles([torch.from_numpy(values)], ORDERS)[0]
    np.testing.assert_allclose(found.numpy(), np.quantile(values, ORDERS), rtol=1e-12)
    assert quantiles([torch.zeros(0, dtype=torch.float64)], ORDERS).isnan().all()
