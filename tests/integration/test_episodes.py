"""Episodes end to end over tokens: a real engine samples turn by turn, a real learner scores and trains the rows.

The given tokens between turns are random, as what a tool prints may be. Each turn is asked for behind all that came
before it, so the engine prefills, or finds in its cache, what the learner reads in one pass.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.data.batch import (
    Batch,
    Completion,
    EpisodeFacts,
    Group,
    LogprobContract,
    Prompt,
    Row,
    Sample,
    Sampling,
    StopReason,
    TokenKind,
)
from pipeline.data.batch_format import check_batch
from precision.objectives.clipped import GSPO
from rollout_sglang.client import EngineClient
from tests.integration.workers.episodes_worker import Step, steps
from tests.integration.workers.scoring import score_batches
from tests.support.engines import TinyEngine, TinyEngines
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

TEMPERATURE, GROUPS, GROUP_SIZE = 1.1, 3, 4
PARITY = 1e-4
"""Nats, that of `evenkeel verify parity`."""


@dataclass
class Talk:
    """A conversation as tokens: answers of the engine, and what was given between them."""

    prompt: tuple[int, ...]
    answers: list[Completion]
    given: list[tuple[int, ...]]

    def row(self, first: int = 0) -> Row:
        """The row that trains the answers from `first` on, and repeats those before."""
        before = list(self.prompt)
        for answer, said in zip(self.answers[:first], self.given, strict=False):
            before += [*answer.tokens.tolist(), *said]
        completion = Completion.joined(self.answers[first:], self.given[first : len(self.answers) - 1])
        kinds = np.where(completion.loss_mask, TokenKind.SAMPLED, TokenKind.TOOL).astype(np.uint8)
        return Row(prompt=tuple(before), completion=replace(completion, kinds=kinds))

    def until(self, answers: int) -> Talk:
        return Talk(self.prompt, self.answers[:answers], self.given[: max(0, answers - 1)])


async def talk(client: EngineClient, number: int, member: int) -> tuple[Talk, Talk]:
    """Three or four turns, and a rewrite of what followed the second: two more turns behind other given tokens."""
    chance = random.Random(f"{number}/{member}")
    prompt = tuple(random.Random(number).randrange(256) for _ in range(8))

    async def go_on(said: Talk, turns: int) -> Talk:
        for _ in range(turns):
            tokens = [*said.prompt]
            if said.answers:
                said.given.append(tuple(chance.randrange(256) for _ in range(chance.randint(1, 9))))
            for answer, given in zip(said.answers, said.given, strict=True):
                tokens += [*answer.tokens.tolist(), *given]
            sampling = Sampling(max_new_tokens=chance.randint(3, 24), temperature=TEMPERATURE)
            [answer] = await client.generate(tokens, 1, sampling)
            said.answers.append(answer)
        return said

    whole = await go_on(Talk(prompt, [], []), chance.randint(3, 4))
    return whole, await go_on(whole.until(2), 2)


def batch_of(samples: Sequence[Sequence[Row]]) -> Batch:
    groups = []
    for number in range(GROUPS):
        members = []
        for member in range(GROUP_SIZE):
            rows = samples[number * GROUP_SIZE + member]
            turns = sum(int(np.diff(row.completion.loss_mask.astype(int), prepend=0).clip(0).sum()) for row in rows)
            facts = EpisodeFacts(stopped=StopReason.FINISHED, turns=turns)
            members.append(Sample.of_episode(rows, facts, float(member % 2), {}))
        prompt = Prompt(group=number, text="", answer="", tokens=samples[number * GROUP_SIZE][0].prompt)
        groups.append(Group(prompt=prompt, samples=tuple(members)))
    contract = LogprobContract(temperature=TEMPERATURE, top_p=1.0, top_k=-1, tokenizer_sha256="")
    batch = Batch.from_groups(0, groups, contract=contract, dropped=(), next_group=GROUPS, recipe_sha256="")
    check_batch(batch)
    return batch


@dataclass(frozen=True)
class Found:
    branched: Batch
    """Each episode with its rewritten branch."""
    one: Batch
    """The first conversations alone, one row each."""
    two: Batch
    """The same, the last turn of each in a row of its own that repeats the rest."""
    scores: NDArray[np.float32]
    """[responses of `branched`] by the learner at the engine's weights."""
    steps: tuple[Step, Step]
    """A step on `one` and on `two`, by two ranks, from other weights than the engine's."""


@pytest.fixture(scope="module")
def found(tiny_engines: TinyEngines) -> Found:
    engine: TinyEngine = tiny_engines.lease(["fp32"])["fp32"]

    async def ask(client: EngineClient) -> list[tuple[Talk, Talk]]:
        members = [(number, member) for number in range(GROUPS) for member in range(GROUP_SIZE)]
        return await asyncio.gather(*(talk(client, *each) for each in members))

    talks = engine.ask(ask)

    def shared(rows: tuple[Row, Row], count: int) -> tuple[Row, Row]:
        return rows[0], replace(rows[1], branch_of=0, branched_at=count)

    branched, two = [], []
    for whole, rewritten in talks:
        start = whole.until(2).row()
        branched.append(shared((whole.row(), rewritten.row(2)), len(start.prompt) + len(start.completion.tokens)))
        last = len(whole.answers) - 1
        first = whole.until(last).row()
        two.append(shared((first, whole.row(last)), len(first.prompt) + len(first.completion.tokens)))
    batches = batch_of(branched), batch_of([(whole.row(),) for whole, _ in talks]), batch_of(two)
    [[[scores]]] = run_ranks(1, score_batches, [engine.full_precision[0]], batches[:1], TEMPERATURE)
    objective = GSPO(anchor="rollout", clip_low=0.01, clip_high=0.01)
    [of_one, of_two], _ = run_ranks(2, steps, engine.full_precision[1], objective, batches[1:], TEMPERATURE)
    return Found(*batches, scores, (of_one, of_two))


def test_the_learner_agrees_with_the_engine_at_every_sampled_token_of_every_turn(found: Found) -> None:
    batch = found.branched
    assert batch.episodes is not None
    assert int(batch.episodes.turns.sum()) >= 5 * GROUPS * GROUP_SIZE
    gaps = np.abs(found.scores - batch.rollout_logprobs)[batch.loss_mask]
    assert len(gaps) == batch.num_sampled_tokens > 300
    assert gaps.max() <= PARITY
    assert np.abs(found.scores).mean() > 1.0


def test_a_step_on_two_ranks_is_the_same_however_episodes_are_cut_into_rows(found: Found) -> None:
    (ours, of_one, after_one), (theirs, of_two, after_two) = found.steps
    assert found.two.num_samples == 2 * found.one.num_samples
    np.testing.assert_allclose(of_one[found.one.loss_mask], of_two[found.two.loss_mask], atol=1e-5)
    same = ours.keys() - {"padding_share"}
    assert {name: ours[name] for name in same} == pytest.approx(
        {name: theirs[name] for name in same}, rel=1e-3, abs=1e-5
    )
    assert ours["sequence_ess"] < 0.5, "the weights are others than the engine's"
    assert ours["clip_hits"] > 0.0
    # Adam's first step has the size of the learning rate, whichever way: most weights must have gone the same way.
    assert np.mean(np.abs(after_one - after_two) < 1e-7) > 0.95
