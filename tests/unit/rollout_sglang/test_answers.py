"""From the bytes of an answer to completions: what a real server sends is taken, whatever is changed in it is not."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.batch import Completion, Sampling
from pipeline.errors import BadAnswerError, EngineVersionError
from rollout_sglang import answers
from rollout_sglang.answers import Asked, ElementCutter, completion_reader, read_answer
from rollout_sglang.protocol import GENERATED
from tests.chaos.malformed.answers import VOCABULARY, _impossible
from tests.chaos.malformed.mutations import mutated_bytes, mutated_data
from tests.support.examples import examples
from tests.support.recorded_answers import CALLS, PROMPT, recorded

PLAIN = Sampling(max_new_tokens=6, vocab_size=VOCABULARY)
KEPT = Sampling(max_new_tokens=4, vocab_size=VOCABULARY, top_p=0.8, top_k=20, kept_set=True)
ASKED = {"generate": (3, PLAIN), "kept": (2, KEPT)}


def read(name: str, body: bytes) -> Any:
    num_samples, sampling = ASKED[name]
    asked = Asked(num_prompt=len(PROMPT), num_samples=num_samples, sampling=sampling)
    return read_completions(body, asked)


def read_completions(body: bytes, asked: Asked, part_bytes: int = 1 << 16) -> list[Completion]:
    reader = completion_reader(asked, engine=0, waited_s=lambda: 1.0)
    for start in range(0, len(body), part_bytes):
        reader.add(body[start : start + part_bytes])
    return reader.end()


@pytest.mark.parametrize("name", ASKED)
def test_what_a_real_server_answers_is_taken_as_it_is(name: str) -> None:
    found = read(name, json.dumps(recorded()[name]).encode())
    for sample, real in zip(found, recorded()[name], strict=True):
        meta = real["meta_info"]
        logprobs = meta.get("output_token_sampling_logprobs") or [row[0] for row in meta["output_token_logprobs"]]
        np.testing.assert_array_equal(sample.tokens, np.array(real["output_ids"], np.int32), strict=True)
        np.testing.assert_array_equal(sample.logprobs, np.array(logprobs, np.float32), strict=True)
        np.testing.assert_array_equal(sample.versions, np.zeros(len(sample.tokens), np.int32), strict=True)
        np.testing.assert_array_equal(sample.loss_mask, np.ones(len(sample.tokens), np.bool_), strict=True)
    assert CALLS[name][2]["sampling_params"]["max_new_tokens"] == ASKED[name][1].max_new_tokens


@given(name=st.sampled_from(list(ASKED)), seed=st.integers(0, 2**32), as_bytes=st.booleans())
@settings(max_examples=examples(150))
def test_whatever_is_changed_in_it_is_refused_or_harmless(name: str, seed: int, as_bytes: bool) -> None:
    rng, real = random.Random(seed), recorded()[name]
    if as_bytes:
        body = mutated_bytes(rng, json.dumps(real).encode())
    else:
        body = json.dumps(mutated_data(rng, real)).encode("utf-8", "surrogatepass")
    try:
        found, refusal = read(name, body), ""
    except (BadAnswerError, EngineVersionError) as error:
        found, refusal = [], str(error)
    assert refusal.isprintable()
    assert len(refusal) < 600
    assert _impossible(found, ASKED[name][1]) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not a whole one"),
        (b"[{}", "not a whole one"),
        (b"[{},{", "not a whole one"),
        (b"[{} {}]", "no JSON list of objects"),
        (b"[{},]", "no JSON list of objects"),
        (b"[,{}]", "no JSON list of objects"),
        (b"{}", "no JSON list of objects"),
        (b"[{}]]", "no JSON list of objects"),
        (b"[{}][{}]", "no JSON list of objects"),
        (b"}{[{}]", "no JSON list of objects"),
        (b"[1, 2, 3]", "no JSON list of objects"),
        (b"[{}, {}, {}]", "more than 2 elements"),
        (b'[{"a": "0123456789"}]', "element 0 has more than 12 bytes"),
        (b'[{}, {"a": "0123456789', "element 1 has more than 12 bytes"),
    ],
)
@pytest.mark.parametrize("part", [1, 100])
def test_what_is_no_such_list_is_refused(body: bytes, message: str, part: int) -> None:
    def cut() -> None:
        cutter = ElementCutter(most=2, element_bytes=12)
        for start in range(0, len(body), part):
            list(cutter.add(body[start : start + part]))
        cutter.end()

    with pytest.raises(ValueError, match=message):
        cut()


def big_answer(num_samples: int, num_tokens: int) -> tuple[bytes, Asked]:
    rng = random.Random(0)

    def sample() -> dict[str, Any]:
        tokens = [rng.randrange(150_000) for _ in range(num_tokens)]
        meta = recorded()["generate"][0]["meta_info"] | {
            "completion_tokens": num_tokens,
            "weight_versions": [{"version": "3", "start": 0, "end": num_tokens}],
            "output_token_logprobs": [[-3 * rng.random(), token, None] for token in tokens],
        }
        return {"text": "abcd" * num_tokens, "output_ids": tokens, "meta_info": meta}

    sampling = Sampling(max_new_tokens=num_tokens, vocab_size=150_000)
    body = json.dumps([sample() for _ in range(num_samples)], separators=(",", ":")).encode()
    return body, Asked(num_prompt=len(PROMPT), num_samples=num_samples, sampling=sampling)


def test_of_an_answer_that_comes_there_is_one_sample_at_a_time() -> None:
    """Beside the arrays, which stay. The bytes of this answer are five times as large, what JSON makes of it fifty."""
    body, asked = big_answer(32, 2048)
    kept_bytes = 32 * 2048 * 8
    tracemalloc.start()
    try:
        found = read_completions(body, asked)
        stays, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 32
    assert stays < 1.5 * kept_bytes, "versions and marks that are all alike take no memory"
    assert peak - stays < 0.25 * len(body)


def test_large_answers_are_read_beside_the_loop_small_ones_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    class Recorder:
        def validate_json(self, piece: bytes) -> Any:
            threads.append(threading.current_thread().name)
            return GENERATED.validate_json(piece)

    async def parts_of(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    monkeypatch.setattr(answers, "GENERATED", Recorder())
    for size, thread in ((16, threading.current_thread().name), (2048, "beside-loop_0")):
        body, asked = big_answer(4, size)
        threads.clear()
        reader = completion_reader(asked, engine=0, waited_s=lambda: 1.0)
        assert len(asyncio.run(read_answer(parts_of(body), reader))) == 4
        assert threads == [thread] * 4


def test_an_answer_that_the_engine_cut_short_is_none_of_full_length() -> None:
    """SGLang lowers what is asked for to what its keys and values hold, and ends with `length`."""
    answer = recorded()["generate"]
    assert {sample["meta_info"]["finish_reason"]["type"] for sample in answer} == {"length"}
    longer = Sampling(max_new_tokens=7, vocab_size=VOCABULARY)
    asked = Asked(num_prompt=len(PROMPT), num_samples=3, sampling=longer)
    with pytest.raises(
        BadAnswerError, match=r"sample 0: it was cut off at 6 of 7 tokens: .*max_total_num_tokens.*lower"
    ):
        read_completions(json.dumps(answer).encode(), asked)
    ended = json.loads(json.dumps(answer))
    for sample in ended:
        sample["meta_info"]["finish_reason"] = {"type": "stop", "matched": sample["output_ids"][-1]}
    assert [one.finish for one in read_completions(json.dumps(ended).encode(), asked)] == ["stop"] * 3


def without_kept_sets(finish: str) -> bytes:
    """The first sample has ended so and comes without its kept sets."""
    answer = json.loads(json.dumps(recorded()["kept"]))
    meta = answer[0]["meta_info"]
    meta["finish_reason"] = {"type": finish, "message": "Abort in waiting queue"}
    del meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    return json.dumps(answer).encode()


def test_an_abort_without_kept_sets_is_an_abort() -> None:
    """SGLang answers so for a request that it retracted and then aborted while it waited: it is to be asked again."""
    aborted, whole = read("kept", without_kept_sets("abort"))
    assert (aborted.finish, len(aborted.tokens), len(whole.tokens)) == ("abort", 0, 4)
    with pytest.raises(BadAnswerError, match="did not say which tokens top_p and top_k left"):
        read("kept", without_kept_sets("length"))


def test_a_size_that_is_told_takes_no_memory() -> None:
    """10^8 versions of three tokens were expanded before they were counted."""
    answer = json.loads(json.dumps(recorded()["generate"]))
    answer[0]["meta_info"]["weight_versions"] = [{"version": "0", "start": 0, "end": 10**8}]
    body = json.dumps(answer).encode()
    tracemalloc.start()
    try:
        with pytest.raises(BadAnswerError, match="do not follow one another over 6 tokens"):
            read("generate", body)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
