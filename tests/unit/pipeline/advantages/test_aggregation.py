"""From advantages of samples to those of tokens: hand-computed, and what each mean must count alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.advantages.compute import batch_normalized, token_advantages
from pipeline.data.batch import Batch, Completion, Group, LogprobContract, Prompt, Sample

CONTRACT = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="ab" * 32)

Layout = list[list[list[bool]]]
"""Groups of samples of tokens, each one that was not sampled (T) or one that was (F)."""

T, F = True, False
HAND: Layout = [[[F, F], [F, T, F, F]], [[F, F, F, F, F], [], [T]]]
"""Two prompts. Sampled tokens: 2, 3; 5, 0, 0; N = 10. The fourth response is empty, the fifth was not sampled."""

PER_SAMPLE = np.array([1.0, -2.0, 3.0, 4.0, 5.0], np.float32)


def batch_of(layout: Layout) -> Batch:
    def completion(unsampled: list[bool]) -> Completion:
        given = Completion.given([7] * len(unsampled), [-1.0] * len(unsampled))
        return replace(given, loss_mask=~np.array(unsampled, np.bool_))

    groups = [
        Group(
            prompt=Prompt(group=10 * (len(layout) - number), text="1=", answer="1", tokens=(1, 2)),
            samples=tuple(Sample(completion=completion(unsampled), reward=0.0) for unsampled in samples),
        )
        for number, samples in enumerate(layout)
    ]
    return Batch.from_groups(0, groups, contract=CONTRACT, dropped=[], next_group=99, recipe_sha256="cd" * 32)


def tokens_of(
    layout: Layout, per_sample: NDArray[Any], aggregation: Any = "token", *, normalized: bool = False
) -> list[float]:
    values = per_sample.astype(np.float64)
    values = batch_normalized(values, np.ones(len(values), np.bool_)) if normalized else values
    found = token_advantages(aggregation, batch_of(layout), values, max_new_tokens=8)
    assert found.dtype == np.float64
    return found.tolist()


# Responses of 2, 4 (one not sampled), 5, 0 and 1 (not sampled) tokens; advantages 1, -2, 3, 4, 5.
HANDS: dict[str, tuple[float, float, float]] = {
    "token": (1, -2, 3),
    # Three responses with tokens: 10 / (3 · 2), 10 / (3 · 3), 10 / (3 · 5).
    "sequence": (10 / 6, -20 / 9, 30 / 15),
    # Two prompts of 5 tokens each: 10 / (2 · 5) = 1 in both.
    "prompt": (1, -2, 3),
    # 10 tokens / (3 responses with tokens × 8).
    "constant": (10 / 24, -20 / 24, 30 / 24),
}


@pytest.mark.parametrize("aggregation", HANDS)
def test_goldens(aggregation: str) -> None:
    first, second, third = HANDS[aggregation]
    expected = [first] * 2 + [second, 0.0, second, second] + [third] * 5 + [0.0]
    np.testing.assert_allclose(tokens_of(HAND, PER_SAMPLE, aggregation=aggregation), expected, rtol=1e-6)


def test_a_longer_prompt_group_counts_no_more() -> None:
    """Groups of 1 + 1 and 6 tokens, N = 8: 8 / (2 · 2) = 2 and 8 / (2 · 6) = 2/3."""
    layout: Layout = [[[F], [F]], [[F] * 6]]
    found = tokens_of(layout, np.ones(3, np.float32), aggregation="prompt")
    np.testing.assert_allclose(found, [2, 2] + [2 / 3] * 6, rtol=1e-6)


layouts = st.lists(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=4), min_size=1, max_size=4)


@given(layout=layouts, aggregation=st.sampled_from(["token", "sequence", "prompt"]))
def test_each_mean_counts_its_parts_alike_and_the_sum_is_that_of_the_tokens(layout: Layout, aggregation: str) -> None:
    """With advantage 1 everywhere the tokens sum to N, and every part that has a token holds the same share of it."""
    batch = batch_of(layout)
    means: Any = aggregation
    found = token_advantages(means, batch, np.ones(batch.num_samples), max_new_tokens=8)
    assert found.sum() == pytest.approx(batch.num_sampled_tokens, rel=1e-5)
    assert not found[~batch.loss_mask].any()
    sample = np.repeat(np.arange(batch.num_samples), batch.response_lengths)
    part = {"token": np.arange(len(sample)), "sequence": sample, "prompt": batch.group[sample]}[aggregation]
    sampled = batch.loss_mask
    shares = [found[(part == each) & sampled].sum() for each in np.unique(part[sampled])]
    np.testing.assert_allclose(shares, batch.num_sampled_tokens / max(1, len(shares)), rtol=1e-5)
    for each in np.unique(part[sampled]):
        assert np.ptp(found[(part == each) & sampled]) == 0.0, "tokens of a part count alike"


@given(layout=layouts, aggregation=st.sampled_from(list(HANDS)), normalized=st.booleans())
def test_groups_may_come_in_any_order(layout: Layout, aggregation: str, normalized: bool) -> None:
    def by_group(each: Layout, values: list[float]) -> list[list[float]]:
        per_sample = np.array(values, np.float32)
        tokens = iter(tokens_of(each, per_sample, aggregation, normalized=normalized))
        return [[next(tokens) for response in group for _ in response] for group in each]

    sizes = [len(group) for group in layout]
    values = np.split(np.arange(sum(sizes)) % 5 - 2.0, np.cumsum(sizes)[:-1])
    straight = by_group(layout, np.concatenate(values).tolist())
    reverse = by_group(layout[::-1], np.concatenate(values[::-1]).tolist())
    for left, right in zip(straight, reverse[::-1], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5)


def test_normalisation_divides_by_the_std_of_all_samples() -> None:
    """Advantages 1, -2, 3, 4, 5: mean 2.2, squares 1.44 + 17.64 + .64 + 3.24 + 7.84 = 30.8, sample std sqrt(7.7)."""
    found = tokens_of(HAND, PER_SAMPLE, normalized=True)
    assert found[0] == pytest.approx(1 / 7.7**0.5)
    assert found[2] == pytest.approx(-2 / 7.7**0.5)


@given(values=st.lists(st.integers(-8, 8), min_size=5, max_size=5), scale=st.sampled_from([1e-6, 0.5, 1e6]))
def test_normalised_advantages_feel_no_scale(values: list[int], scale: float) -> None:
    advantages = np.array(values, np.float32)
    straight = tokens_of(HAND, advantages, normalized=True)
    scaled = tokens_of(HAND, (advantages * scale).astype(np.float32), normalized=True)
    if len(set(values)) > 1:  # equal ones have no std, and stay as they are
        np.testing.assert_allclose(scaled, straight, rtol=1e-5)


def test_normalisation_counts_only_what_it_is_told_to() -> None:
    """Of 1, -2, 3, 4, 5 the first and the third: mean 2, sample std sqrt(2)."""
    found = batch_normalized(PER_SAMPLE.astype(np.float64), np.array([True, False, True, False, False]))
    np.testing.assert_allclose(found, PER_SAMPLE / 2**0.5)


def test_batches_without_contrast_or_tokens_are_no_error() -> None:
    zeros = np.zeros(5, np.float32)
    assert not any(tokens_of(HAND, zeros, normalized=True, aggregation="sequence"))
    assert tokens_of([[[], []]], zeros[:2], aggregation="prompt") == []
    assert tokens_of([[[T]]], zeros[:1] + 1, aggregation="constant", normalized=True) == [0.0]
