"""Nothing that cannot be is committed, read for training, or called sound; and nothing that can be is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.analysis.audit import verify_history
from pipeline.data.batch import Batch
from pipeline.data.batch_values import (
    HIGHEST_LOGPROB,
    LOWEST_LOGPROB,
    MOST_PARTS,
    Limits,
    batch_faults,
    is_finite_float32,
    verdict_fault,
)
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.store import BatchStore
from pipeline.errors import CorruptBatchError, StoreError
from pipeline.schedule import Schedule

MakeBatch = Callable[..., Batch]
LIMITS = Limits(vocab_size=20, max_response_tokens=3, num_experts=4)
"""Of `make_batch`: tokens 1 to 11, responses of 3 and of 1 token."""


def changed(array: NDArray[Any], place: int, value: float) -> NDArray[Any]:
    found = array.copy()
    with np.errstate(over="ignore"):
        found[place] = np.float64(value) if array.dtype.kind == "f" else value
    return found


FAULTS: list[tuple[str, int, float, str]] = [
    ("rollout_logprobs", 4, np.nan, r"sample 2: response token 0: log-probability nan, expected -128 to 0"),
    ("rollout_logprobs", 1, -np.inf, "sample 0: response token 1: log-probability -inf"),
    ("rollout_logprobs", 1, -3.4e38, "sample 0: response token 1: log-probability -3.4"),
    ("rollout_logprobs", 1, 5.0, "sample 0: response token 1: log-probability 5,"),
    ("tokens", 2, 20, "sample 0: response token 0: id 20, expected 0 to 19"),
    ("tokens", 0, 20, "sample 0: token id 20, expected 0 to 19"),
    ("policy_version", 3, -1, "sample 1: response token 0: policy version -1"),
    ("reward", 5, 1e39, "sample 5: its reward is no finite number"),
    ("reward", 5, np.nan, "sample 5: its reward is no finite number"),
    ("queued_s", 1, np.nan, "sample 1: queued_s is nan"),
    ("generated_s", 2, -1.0, "sample 2: generated_s is -1,"),
    ("generated_s", 2, np.inf, "sample 2: generated_s is inf"),
    ("finish", 1, 2, "sample 1: it was aborted"),
]


@pytest.mark.parametrize(("name", "place", "value", "message"), FAULTS)
def test_no_such_batch_is_committed_read_or_sound(
    tmp_path: Path,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    place: int,
    value: float,
    message: str,
) -> None:
    good = make_batch(0)
    change: dict[str, Any] = {name: changed(getattr(good, name), place, value)}
    bad = replace(good, **change)
    store = BatchStore(tmp_path / "batches", limits=LIMITS)
    with pytest.raises(StoreError, match=message):
        store.commit(bad)
    assert store.committed() == []
    with monkeypatch.context() as patch:  # as an older version would have
        patch.setattr("pipeline.data.store.check_values", lambda batch, limits: None)
        store.commit(bad)
    with pytest.raises(CorruptBatchError, match=message):
        store.read(0, None)
    audit = verify_history(tmp_path, Schedule(kind="async", steps=1, lag=9), 1, limits=LIMITS)
    assert not audit.sound
    assert any(fault.startswith(f"batch 0, {message[:8]}") for fault in audit.value_faults)


def test_a_response_that_is_empty_or_too_long(make_batch: MakeBatch) -> None:
    batch = make_batch(0)
    assert list(batch_faults(batch, LIMITS)) == []
    [fault] = batch_faults(batch, replace(LIMITS, max_response_tokens=2))
    assert str(fault) == "sample 0: the response has 3 tokens, at most 2 were asked for"
    [empty, aborted] = batch_faults(make_batch(0, aborted=True), LIMITS)
    assert (empty.sample, empty.what[:21]) == (1, "the response is empty")
    assert aborted.sample == 1


def test_a_log_probability_where_no_engine_sampled(make_batch: MakeBatch) -> None:
    batch = make_batch(0)
    [fault] = batch_faults(replace(batch, loss_mask=changed(batch.loss_mask, 2, False)), LIMITS)
    assert fault.what == "response token 2: log-probability -1.5 of a token that no engine sampled, expected 0"


def test_an_expert_that_there_is_not(make_batch: MakeBatch) -> None:
    batch = make_batch(0)
    ids = np.zeros((len(batch.tokens), 2, 1), np.uint8)
    ids[7, 1, 0] = 4
    experts = RoutedExperts(ids=ids, known=np.ones(len(ids), np.bool_))
    [fault] = batch_faults(replace(batch, experts=experts), LIMITS)
    assert str(fault) == "sample 1: a token went to expert 4, expected 0 to 3"


def test_what_rounding_makes_is_accepted(make_batch: MakeBatch) -> None:
    batch = make_batch(0)
    for value in (-0.0, 0.0, HIGHEST_LOGPROB * 0.9, -103.28, LOWEST_LOGPROB):
        logprobs = changed(batch.rollout_logprobs, 0, value)
        assert list(batch_faults(replace(batch, rollout_logprobs=logprobs), LIMITS)) == []


@pytest.mark.parametrize(
    ("reward", "parts", "message"),
    [
        (1e39, {}, "the reward is 1e\\+39, expected a number that float32 can hold"),
        (float("nan"), {}, "the reward is nan"),
        (10**400, {}, "the reward is 1000"),
        ("1", {}, "the reward is '1'"),
        (1.0, {"a": -4e38}, "part a is -4e\\+38"),
        (1.0, {"a": float("inf")}, "part a is inf"),
        (1.0, {"\x1b[2J": 0.0}, r"a reward part is named '\\x1b\[2J'"),
        (1.0, {"": 0.0}, "a reward part is named ''"),
        (1.0, {"a" * 65: 0.0}, "a reward part is named 'aaaa"),
        (1.0, {"a\n": 0.0}, r"a reward part is named 'a\\n'"),
        (
            1.0,
            {"verifier_failed": 0.0},
            "a reward part is named 'verifier_failed', a name kept for samples that failed",
        ),
        (1.0, {"teacher_failed": 1.0}, "a reward part is named 'teacher_failed'"),
        (1.0, {"<script>": 0.0}, "a reward part is named '<script>'"),
        (1.0, {f"p{i}": 0.0 for i in range(MOST_PARTS + 1)}, "there are 65 reward parts, expected at most 64"),
    ],
)
def test_verdicts_that_cannot_be(reward: float, parts: dict[str, float], message: str) -> None:
    fault = verdict_fault(reward, parts)
    assert fault is not None
    assert re.search(message, fault), fault
    assert fault.isprintable()


@pytest.mark.parametrize("reward", [0, 1, True, -0.0, 1e-46, 3.4e38, -5.5])
def test_verdicts_that_can(reward: float) -> None:
    assert verdict_fault(reward, {"odd/name ü": 1.0, "a.b:c-d_e+f=g@h": -1}) is None
    assert is_finite_float32(reward)
