"""Kept sets: flattened, picked, joined and checked as plain lists would be, stored bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.batch import Batch, Completion, Group, KeptSets, LogprobContract, Prompt, Sample
from pipeline.data.store import BatchStore
from pipeline.errors import CorruptBatchError, StoreError
from tests.support.examples import examples

SETS = st.lists(st.lists(st.integers(0, 30), unique=True, max_size=5), max_size=8)


def lists(kept: KeptSets) -> list[list[int]]:
    return [kept.tokens[start:end].tolist() for start, end in zip(kept.offsets[:-1], kept.offsets[1:], strict=True)]


@given(left=SETS, right=SETS, data=st.data())
@settings(max_examples=examples(40))
def test_ragged_operations_are_those_of_lists(
    left: list[list[int]], right: list[list[int]], data: st.DataObject
) -> None:
    sets = [sorted(one) for one in (*left, *right)]
    kept = KeptSets.joined([KeptSets.of(left), KeptSets.of(right)])
    assert (lists(kept), len(kept)) == (sets, len(sets))
    places = data.draw(st.lists(st.integers(-1, len(sets) - 1), max_size=9))
    picked = kept.take(np.array(places, np.int64))
    assert lists(picked) == [[] if place < 0 else sets[place] for place in places]


CONTRACT = LogprobContract(temperature=0.7, top_p=0.8, top_k=-1, tokenizer_sha256="", kept_set=True)


def batch_with_kept_sets() -> Batch:
    """Two samples of 3 and 2 response tokens; the second token of the first was not sampled."""

    def sample(tokens: tuple[int, ...], kept: list[list[int]], mask: tuple[bool, ...] = ()) -> Sample:
        given = Completion.given(tokens, [-0.5 if not mask or mask[i] else 0.0 for i in range(len(tokens))])
        given = replace(given, kept=KeptSets.of(kept), loss_mask=np.array(mask or (True,) * len(tokens)))
        return Sample(completion=given, reward=1.0)

    samples = (
        sample((5, 6, 7), [[9, 5], [], [7]], (True, False, True)),
        sample((8, 5), [[8, 3, 11], [5]]),
    )
    group = Group(prompt=Prompt(group=0, text="", answer="", tokens=(1, 2)), samples=samples)
    return Batch.from_groups(0, [group], contract=CONTRACT, dropped=(), next_group=1, recipe_sha256="")


def test_a_batch_keeps_its_sets(tmp_path: Path) -> None:
    store, batch = BatchStore(tmp_path), batch_with_kept_sets()
    store.commit(batch)
    found = store.read(0, CONTRACT)
    assert found.kept is not None
    assert lists(found.kept) == [[5, 9], [], [7], [3, 8, 11], [5]]
    assert found.response_tokens.tolist() == [5, 6, 7, 8, 5]
    chosen = found.select(np.array([False, True]))
    assert chosen.kept is not None
    assert lists(chosen.kept) == [[3, 8, 11], [5]]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[9], [], [7], [3, 8], [5]], "1 sampled tokens are not in their own kept set, the first is response token 0"),
        ([[5], [6], [7], [8], [5]], "a token outside loss_mask has a kept set"),
        ([[5], [], [7], [8]], "kept_offsets has 5 entries, expected 6"),
        ([[5], [], [7, 7], [8], [5]], "a set is not ascending"),
        ([[-1, 5], [], [7], [8], [5]], "a negative id"),
    ],
)
def test_sets_that_do_not_fit_their_tokens_are_not_committed(
    tmp_path: Path, sets: list[list[int]], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        BatchStore(tmp_path).commit(replace(batch_with_kept_sets(), kept=KeptSets.of(sets)))


def test_damaged_offsets_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, batch = BatchStore(tmp_path), batch_with_kept_sets()
    assert batch.kept is not None
    falling = KeptSets(offsets=np.array([0, 2, 1, 3, 6, 7], np.int64), tokens=batch.kept.tokens)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.data.store.check_batch", lambda batch: None)
        patch.setattr("pipeline.data.store.check_values", lambda batch, limits: None)
        store.commit(replace(batch, kept=falling))
    with pytest.raises(CorruptBatchError, match="kept_offsets does not rise"):
        store.read(0, None)


def test_the_contract_and_the_arrays_agree(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="the contract says kept_set True, but the batch has none"):
        BatchStore(tmp_path).commit(replace(batch_with_kept_sets(), kept=None))


def test_an_engine_that_said_nothing_is_found_before_the_batch_is_stored(tmp_path: Path) -> None:
    given = Completion.given((5, 6), (-0.5, -0.5))
    group = Group(
        prompt=Prompt(group=0, text="", answer="", tokens=(1,)), samples=(Sample(completion=given, reward=0.0),)
    )
    batch = Batch.from_groups(0, [group], contract=CONTRACT, dropped=(), next_group=1, recipe_sha256="")
    with pytest.raises(StoreError, match="2 sampled tokens are not in their own kept set"):
        BatchStore(tmp_path).commit(batch)
