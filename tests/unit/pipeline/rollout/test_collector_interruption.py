"""Responses that go on for too long are interrupted: which tokens are forced, and what is kept of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.analysis.audit import verify_history
from pipeline.data.batch import FINISH_REASONS, Batch, Completion, Sampling
from pipeline.data.event_log import read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError
from pipeline.ports.affinity import Affinity
from pipeline.rewards.pool import Verifiers
from pipeline.rollout.group_sampler import Interruption
from pipeline.schedule import Schedule
from pipeline.tasks.tokenizer import Tokenizer
from tests.support.collecting import GROUP, PretendEngines, batches, build, collect

SYNC = Schedule(kind="sync", steps=2)
LONG = 10
"""Prompts of so many digits are thought about for ever."""


@dataclass
class Thinkers(PretendEngines):
    """A long prompt makes them write 3s until they are told `==`; then they answer 0 … 5 and end."""

    told: list[tuple[int, ...]] = field(default_factory=list)
    """Prompts that were continued."""
    second_parts: list[Exception | str] = field(default_factory=list)
    """Faults of the first answers to continued prompts."""

    async def generate(
        self, prompt: Sequence[int], num_samples: int, sampling: Sampling, affinity: Affinity | None = None
    ) -> list[Completion]:
        text = self.tokenizer.decode(prompt)
        if text.endswith("=="):
            return [self._second_part(tuple(prompt), sampling)]
        completions = await super().generate(prompt, num_samples, sampling)
        if len(text) <= LONG:
            return completions
        tokens = tuple(self.tokenizer.encode("3" * sampling.max_new_tokens))
        version = self.run.published_version()
        thought = Completion.given(tokens, (-0.25,) * len(tokens), version)
        return [replace(thought, finish="length", generated_s=1.0)] * num_samples

    def _second_part(self, prompt: tuple[int, ...], sampling: Sampling) -> Completion:
        self.told.append(prompt)
        fault = self.second_parts.pop(0) if self.second_parts else "stop"
        if isinstance(fault, Exception):
            raise fault
        whole = (*self.tokenizer.encode("012345"), self.tokenizer.eos_token_id)
        tokens = whole[: sampling.max_new_tokens]
        answer = Completion.given(tokens, (-0.75,) * len(tokens), self.run.published_version())
        finish = fault if tokens == whole else "length"
        return replace(answer, finish=finish, generated_s=2.0, engine=1)  # type: ignore[arg-type]


def interrupted(
    run: RunDirectory, verifiers: Verifiers, *, evaluates: bool = True, **changes: int
) -> tuple[list[Batch], Thinkers, Interruption]:
    """Two batches of a run that interrupts between 5 and 8 tokens."""
    tokenizer = Tokenizer.load(run.path.parent / "model")
    phrase = tuple(tokenizer.encode("=="))
    numbers = {**dict(from_tokens=5, to_tokens=8, answer_tokens=9, seed=3), **changes}
    interruption = Interruption(phrase=phrase, **numbers)
    collector = build(run, verifiers, SYNC, interruption=interruption, sampling=Sampling(max_new_tokens=19))
    engines = Thinkers(run, tokenizer)
    engines.second_parts = [EngineUnavailableError("down"), "abort"]
    collector.engines = engines
    collector.__post_init__()
    collector._evaluated |= set() if evaluates else {0, 2}
    return batches(collect(collector)), engines, interruption


def test_long_thoughts_are_cut_told_and_answered(run: RunDirectory, verifiers: Verifiers) -> None:
    found, engines, interruption = interrupted(run, verifiers, evaluates=False)
    tokenizer = engines.tokenizer
    cuts = []
    for batch in found:
        offsets = batch.response_offsets
        for sample in range(batch.num_samples):
            span = slice(offsets[sample], offsets[sample + 1])
            prompt_length = batch.prompt_lengths[sample]
            response = tokenizer.decode(batch.sample_tokens(sample)[prompt_length:].tolist())
            forced = ~batch.loss_mask[span]
            if prompt_length <= LONG:
                assert not forced.any()
                assert not batch.interrupted[sample]
                continue
            cut = interruption.cut_after(int(batch.group[sample]), sample % GROUP)
            cuts.append(cut)
            assert response == "3" * cut + "==" + "012345"
            assert np.flatnonzero(forced).tolist() == [cut, cut + 1]
            assert batch.rollout_logprobs[span].tolist() == [-0.25] * cut + [0.0] * 2 + [-0.75] * 7
            assert batch.policy_version[span].tolist() == [batch.index] * (cut + 9)
            assert (FINISH_REASONS[batch.finish[sample]], batch.engine[sample]) == ("stop", 1)
            assert batch.generated_s[sample] == 3.0
        assert batch.num_sampled_tokens == batch.num_response_tokens - 2 * batch.interrupted.sum()
    assert len(set(cuts)) > 1
    retried = [event["group"] for event in read_events(run.path, "retried")]
    assert len(retried) == 1, "both samples of one group failed in their second part, and were asked again together"
    assert engines.told[:2] == engines.told[2:4]
    assert retried[0] in found[0].group[found[0].interrupted]
    counted = [event["interrupted"] for event in read_events(run.path, "committed")]
    assert counted == [int(batch.interrupted.sum()) for batch in found]
    assert sum(counted) == len(cuts) > 0
    assert verify_history(run.path, SYNC, 2).sound


def test_evaluation_is_interrupted_alike(run: RunDirectory, verifiers: Verifiers) -> None:
    found, engines, _ = interrupted(run, verifiers)
    trained = {
        tuple(batch.sample_tokens(s)[: batch.prompt_lengths[s]]) for batch in found for s in range(batch.num_samples)
    }
    told = {engines.tokenizer.decode(prompt).partition("=")[0] for prompt in engines.told}
    assert told - {engines.tokenizer.decode(prompt).removesuffix("=") for prompt in trained}
