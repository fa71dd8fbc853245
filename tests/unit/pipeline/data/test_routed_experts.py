"""Routed experts: what an engine answers, and which of it still describes what it did."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.data.routed_experts import (
    ROWS_AT_ONCE,
    ExpertShape,
    RoutedExperts,
    decode_engine_rows,
    rows_still_true,
)

SHAPE = ExpertShape(num_layers=3, moe_layers=(1, 2), num_experts=8, per_token=2)


def rows_of(num_tokens: int, seed: int = 0) -> NDArray[np.int32]:
    """[num_tokens - 1, all layers, per_token], the dense layer 0 zero."""
    random = np.random.default_rng(seed)
    rows = np.argsort(random.random((num_tokens - 1, 3, 8)), axis=-1)[..., :2].astype(np.int32)
    rows[:, 0] = 0
    return rows


def encoded(rows: NDArray[np.int32]) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def test_an_answer_becomes_rows_of_the_layers_with_experts() -> None:
    rows = rows_of(6)
    found = decode_engine_rows(encoded(rows), 6, SHAPE)
    assert found.ids.dtype == np.uint8
    np.testing.assert_array_equal(found.ids[:5], rows[:, 1:])
    np.testing.assert_array_equal(found.known, [True] * 5 + [False])
    np.testing.assert_array_equal(found.ids[5], 0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (encoded(rows_of(5)), "characters of routed experts for 6 tokens, expected 160"),
        ("!" * 160, "not base64"),
        (encoded(rows_of(6))[:-2] + "==", "119 bytes of routed experts|not base64|bytes"),
        (encoded(np.where(rows_of(6) == 7, 8, rows_of(6))), "expected 0 to 7"),
        (encoded(np.where(rows_of(6) == 7, -1, rows_of(6))), "expected 0 to 7"),
        (encoded(np.repeat(rows_of(6)[..., :1], 2, axis=-1)), "names one expert twice"),
    ],
    ids=["size", "no base64", "padding", "above", "below", "twice"],
)
def test_a_damaged_answer_is_refused(answer: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_engine_rows(answer, 6, SHAPE)


@pytest.mark.parametrize(
    ("versions", "retractions", "first_known"),
    [
        ((4, 4, 4, 4), 0, 0),
        ((4, 4, 5, 5), 1, 4),  # the pass over token 4 (the second of the response) predicted the first token of 5
        ((4, 5, 5, 7), 2, 5),
        ((4, 4, 4, 4), 1, 7),  # retracted by the engine, or given the same weights again
        ((4, 4, 5, 5), 2, 7),  # and once more than the update explains
        ((), 0, 0),
    ],
)
def test_rows_that_a_later_prefill_replaced_are_unknown(
    versions: tuple[int, ...], retractions: int, first_known: int
) -> None:
    num_prompt = 3
    length = num_prompt + len(versions)
    whole = decode_engine_rows(encoded(rows_of(length)), length, SHAPE)
    kept = rows_still_true(whole, num_prompt, versions, retractions)
    np.testing.assert_array_equal(kept.known, (np.arange(length) >= first_known) & whole.known)
    np.testing.assert_array_equal(kept.ids, np.where(kept.known[:, None, None], whole.ids, 0))


def test_parts_are_cut_and_joined() -> None:
    whole = decode_engine_rows(encoded(rows_of(6)), 6, SHAPE)
    again = RoutedExperts.joined([whole[:2], whole[2:]])
    np.testing.assert_array_equal(again.ids, whole.ids)
    np.testing.assert_array_equal(again.known, whole.known)
    assert not RoutedExperts.unknown(4, SHAPE).known.any()
    with pytest.raises(ValueError, match="one mark for each token"):
        RoutedExperts(ids=whole.ids, known=whole.known[1:])


def test_a_repeated_expert_is_found_in_any_part_of_a_long_record() -> None:
    ids = np.tile(np.arange(2, dtype=np.uint8), (2 * ROWS_AT_ONCE + 9, 1, 1))
    record = RoutedExperts(ids=ids, known=np.ones(len(ids), np.bool_))
    record.check(len(ids), distinct=True)
    ids[-1] = 1
    with pytest.raises(ValueError, match="names one expert twice"):
        record.check(len(ids), distinct=True)
    record.check(len(ids), distinct=False)
