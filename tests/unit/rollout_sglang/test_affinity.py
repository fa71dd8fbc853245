"""Turns of an episode at the engine that holds its context, and the count of what its cache spared."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from pipeline.data.batch import Completion, Sampling
from pipeline.ports.affinity import Affinity, PrefixHits
from rollout_sglang.fleet import Fleet
from tests.doubles.sglang_double import EngineDouble, RouterDouble
from tests.support.fleets import fleet_of

SAMPLING = Sampling(max_new_tokens=2)
T = TypeVar("T")


@pytest.fixture
def engines() -> Iterator[list[EngineDouble]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EngineDouble()) for _ in range(3)]


def with_fleet(folder: Path, engines: list[EngineDouble], act: Callable[[Fleet], Awaitable[T]], **how: object) -> T:
    async def main() -> T:
        fleet = fleet_of(folder, [engine.url for engine in engines], **how)  # type: ignore[arg-type]
        try:
            return await act(fleet)
        finally:
            await fleet.close()

    return asyncio.run(main())


async def play(fleet: Fleet, affinity: Affinity, turns: int) -> list[int]:
    """Return the engine of each turn."""
    found, context = list[int](), [1]
    for _ in range(turns):
        [answer] = await fleet.generate(context, 1, SAMPLING, affinity)
        found.append(answer.engine)
        context += [*answer.tokens.tolist(), 7]
    return found


def test_turns_of_an_episode_stay_at_one_engine_and_episodes_spread(
    tmp_path: Path, engines: list[EngineDouble]
) -> None:
    for engine in engines:
        engine.token_s = 0.02

    async def act(fleet: Fleet) -> list[list[int]]:
        return await asyncio.gather(*(play(fleet, Affinity(PrefixHits()), 4) for _ in range(6)))

    found = with_fleet(tmp_path, engines, act)
    assert [len(set(one)) for one in found] == [1] * 6
    assert {one[0] for one in found} == {0, 1, 2}


def test_an_episode_whose_engine_fails_goes_on_elsewhere_and_stays_there(
    tmp_path: Path, engines: list[EngineDouble]
) -> None:
    async def act(fleet: Fleet) -> tuple[list[int], list[int]]:
        affinity = Affinity(PrefixHits())
        before = await play(fleet, affinity, 2)
        engines[before[0]].generate_faults = ["garbage"] * 99
        return before, await play(fleet, affinity, 4)

    before, after = with_fleet(tmp_path, engines, act)
    assert len({*before}) == len({*after}) == 1
    assert before[0] != after[0]


def test_an_episode_leaves_a_quarantined_engine(tmp_path: Path, engines: list[EngineDouble]) -> None:
    async def act(fleet: Fleet) -> tuple[list[int], list[int], int]:
        affinity = Affinity(PrefixHits())
        before = await play(fleet, affinity, 1)
        asked = engines[before[0]].calls.count("POST /generate")
        pool = fleet._pool
        await pool.quarantine(pool[before[0]], "it has answered nothing for 30 s")
        after = await play(fleet, affinity, 3)
        return before, after, engines[before[0]].calls.count("POST /generate") - asked

    before, after, more = with_fleet(tmp_path, engines, act)
    assert before[0] not in after
    assert more == 0


def test_turns_go_past_the_router_which_would_choose_the_engine(tmp_path: Path, engines: list[EngineDouble]) -> None:
    with RouterDouble([engine.url for engine in engines]) as router:
        found = with_fleet(tmp_path, engines, lambda fleet: play(fleet, Affinity(PrefixHits()), 4), router=router.url)
        assert len(set(found)) == 1
        assert "POST /generate" not in router.calls


def test_where_caches_outlast_weights_an_episode_shares_its_own_alone(
    tmp_path: Path, engines: list[EngineDouble]
) -> None:
    async def act(fleet: Fleet) -> None:
        for _ in range(2):
            await play(fleet, Affinity(PrefixHits()), 3)

    with_fleet(tmp_path, engines[:1], act, keeps_kv=True)
    keys = engines[0].cache_keys
    assert (len(keys), len({*keys[:3]}), len({*keys[3:]}), len({*keys})) == (6, 1, 1, 2)


def test_the_engines_count_of_cached_tokens_arrives(tmp_path: Path, engines: list[EngineDouble]) -> None:
    def spoil(samples: list[dict[str, dict[str, int]]]) -> object:
        for sample in samples:
            sample["meta_info"]["cached_tokens"] = 2
        return samples

    engines[0].spoil = spoil
    hits = PrefixHits()
    with_fleet(tmp_path, engines[:1], lambda fleet: play(fleet, Affinity(hits), 3))
    # Turn 1 reads 1 token, turn 2 reads 4, of which an engine has computed 2, turn 3 reads 7, of which it has 5.
    assert hits.figures() == dict(prefix_tokens=2 + 5, prefix_hits=4 / 7, prefix_published=0)
    assert hits.figures() == {}, "since the last call"


def answer(*tokens: int, cached: int = 0, version: int = 0) -> Completion:
    return replace(Completion.given(tokens, [-0.5] * len(tokens), version), cached_tokens=cached, engine=1)


def test_a_branch_counts_what_it_shares_with_any_row_of_the_episode() -> None:
    hits = PrefixHits()
    affinity = Affinity(hits)
    affinity.answered([1, 2, 3], answer(4, 5))
    affinity.answered([9, 9, 9], answer(4, 5))  # a sub-agent shares nothing
    assert hits == PrefixHits()
    affinity.answered([1, 2, 3, 4, 5, 6], answer(7, cached=4))  # 5 ended the answer: it was never read
    assert hits == PrefixHits(repeated=4, cached=4)
    affinity.answered([1, 2, 8, 8], answer(7, cached=99))  # rewritten; other episodes' tokens count nothing
    assert hits == PrefixHits(repeated=6, cached=6)


def test_what_a_publish_costs_is_counted_apart_from_other_misses() -> None:
    hits = PrefixHits()
    affinity = Affinity(hits)
    affinity.answered([1, 2], answer(3, 4, version=1))
    affinity.answered([1, 2, 3, 4, 5], answer(6, 7, version=2))
    assert hits == PrefixHits(repeated=3, cached=0, published=3)
    affinity.answered([1, 2, 3, 4, 5, 6, 7, 8], answer(9, cached=1, version=2))
    assert hits == PrefixHits(repeated=3 + 6, cached=1, published=3)


@pytest.mark.parametrize(("keeps_kv", "published"), [(False, (2 + 1 - 1) + (2 + 3 - 1)), (True, 0)])
def test_a_publish_within_a_turn_costs_what_the_turn_has_so_far(keeps_kv: bool, published: int) -> None:
    """Two publishes, after its first token and after its third, which the engine would have read anyway. The next turn
    finds the new version's cache."""
    hits = PrefixHits()
    affinity = Affinity(hits)
    within = replace(answer(3, 4, 5, 6), versions=np.array([1, 2, 2, 3], np.int32))
    affinity.answered([1, 2], within, keeps_kv=keeps_kv)
    affinity.answered([1, 2, 3, 4, 5, 6], answer(7, cached=5, version=3), keeps_kv=keeps_kv)
    assert hits == PrefixHits(repeated=5, cached=5, published=published)


def test_an_aborted_turn_counts_nothing() -> None:
    hits = PrefixHits()
    affinity = Affinity(hits)
    affinity.answered([1, 2], replace(Completion.given((), ()), finish="abort", engine=1))
    affinity.answered([1, 2], answer(3))
    assert (affinity.engine, hits) == (1, PrefixHits())


def test_the_fleet_keeps_nothing_of_an_episode_that_has_ended(tmp_path: Path, engines: list[EngineDouble]) -> None:
    async def act(fleet: Fleet) -> int:
        hits, ended = PrefixHits(), list[weakref.ref[Affinity]]()
        for _ in range(20):
            affinity = Affinity(hits)
            await play(fleet, affinity, 2)
            ended.append(weakref.ref(affinity))
        del affinity
        gc.collect()
        return sum(one() is not None for one in ended)

    assert with_fleet(tmp_path, engines, act) == 0
