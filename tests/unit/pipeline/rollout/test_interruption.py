"""Where responses are cut, and what becomes of the two parts."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.batch import Completion, KeptSets
from pipeline.data.routed_experts import RoutedExperts
from pipeline.rollout.interruption import Interruption


def interruption(first: int = 10, last: int = 12, seed: int = 0) -> Interruption:
    return Interruption(from_tokens=first, to_tokens=last, phrase=(7, 8), answer_tokens=4, seed=seed)


def test_golden_cut() -> None:
    """The first 8 bytes of sha256("interruption/5/-3/1"), little-endian, modulo 3."""
    digest = hashlib.sha256(b"interruption/5/-3/1").digest()
    assert interruption(seed=5).cut_after(-3, 1) == 10 + int.from_bytes(digest[:8], "little") % 3


@given(st.integers(1, 50), st.integers(0, 9), st.integers(0, 5), st.integers(-9, 9), st.integers(0, 9))
def test_cuts_stay_in_bounds(first: int, spread: int, seed: int, group: int, sample: int) -> None:
    cut = interruption(first, first + spread, seed).cut_after(group, sample)
    assert first <= cut <= first + spread


def test_all_cuts_occur_about_equally_often() -> None:
    cuts = [interruption().cut_after(group, sample) for group in range(100) for sample in range(30)]
    # 1,000 of 3,000 each; the standard deviation is sqrt(3000 × 1/3 × 2/3) = 26.
    assert all(abs(cuts.count(cut) - 1000) < 4 * 26 for cut in (10, 11, 12))


def test_join() -> None:
    thought = replace(
        Completion.given((1, 2, 3), (-0.1, -0.2, -0.3)),
        versions=np.array([4, 4, 5], np.int32),
        finish="length",
        queued_s=0.5,
        generated_s=1.0,
    )
    answer = replace(Completion.given((9,), (-0.4,), version=6), engine=1, queued_s=0.25, generated_s=2.0)
    joined = interruption().join(thought, answer)
    np.testing.assert_array_equal(joined.tokens, np.array([1, 2, 3, 7, 8, 9], np.int32), strict=True)
    logprobs = np.array([-0.1, -0.2, -0.3, 0.0, 0.0, -0.4], np.float32)
    np.testing.assert_array_equal(joined.logprobs, logprobs, strict=True)
    np.testing.assert_array_equal(joined.versions, np.array([4, 4, 5, 5, 5, 6], np.int32), strict=True)
    np.testing.assert_array_equal(joined.loss_mask, [True, True, True, False, False, True], strict=True)
    assert (joined.finish, joined.engine, joined.queued_s, joined.generated_s) == ("stop", 1, 0.75, 3.0)


def test_each_part_keeps_the_routes_that_it_was_sampled_with() -> None:
    """A prompt of one token, two of the thought, the phrase, one of the answer. The routes of the thought say 1, those
    of the answer 2. What was lost of the thought, a later prefill cannot bring back."""

    def routes(value: int, known: list[bool]) -> RoutedExperts:
        ids = np.full((len(known), 1, 1), value, np.uint8)
        return RoutedExperts(ids=np.where(np.array(known)[:, None, None], ids, 0), known=np.array(known))

    thought = replace(Completion.given((1, 2), (-0.1, -0.2)), experts=routes(1, [True, True, False]))
    answer = replace(Completion.given((9,), (-0.4,)), experts=routes(2, [False, True, True, True, True, False]))
    joined = interruption().join(thought, answer).experts
    assert joined is not None
    assert joined.ids[:, 0, 0].tolist() == [1, 1, 2, 2, 2, 0]
    assert joined.known.tolist() == [True] * 5 + [False]
    assert interruption().join(replace(thought, experts=None), answer).experts is None
    retracted = replace(thought, experts=routes(1, [False, True, False]))
    whole = replace(answer, experts=routes(2, [True] * 5 + [False]))
    joined = interruption().join(retracted, whole).experts
    assert joined is not None
    assert joined.ids[:, 0, 0].tolist() == [0, 1, 2, 2, 2, 0]
    assert joined.known.tolist() == [False, *[True] * 4, False]


def test_the_phrase_has_no_kept_sets() -> None:
    thought = replace(Completion.given((1, 2), (-0.1, -0.2)), kept=KeptSets.of([[1, 4], [2]]))
    answer = replace(Completion.given((9,), (-0.4,)), kept=KeptSets.of([[9, 3]]))
    joined = interruption().join(thought, answer).kept
    assert joined is not None
    assert joined.counts.tolist() == [2, 1, 0, 0, 2]
    assert joined.tokens.tolist() == [1, 4, 2, 3, 9]
    assert interruption().join(thought, replace(answer, kept=None)).kept is None
