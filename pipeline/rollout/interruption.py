"""Forced-length interruptions: a response that is still going on at a random length is told to come to its answer.

ScaleRL (arXiv 2510.13786, section 2) cuts thoughts between 10,000 and 12,000 tokens with "Okay, time is up. Let me stop
thinking and formulate an answer now. </think>". The model reads the tokens of the phrase, but no engine
sampled them, so nothing is learned from them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from pipeline.data.batch import Completion, KeptSets
from pipeline.data.routed_experts import RoutedExperts


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """When responses are cut, what they are told, and how long their answers may be."""

    from_tokens: int
    to_tokens: int
    """The cut is drawn from from_tokens … to_tokens, both included."""
    phrase: tuple[int, ...]
    """Token ids."""
    answer_tokens: int
    seed: int

    def cut_after(self, group: int, sample: int) -> int:
        """After how many tokens sample `sample` of a group is cut; the same each time it is sampled."""
        digest = hashlib.sha256(f"interruption/{self.seed}/{group}/{sample}".encode()).digest()
        return self.from_tokens + int.from_bytes(digest[:8], "little") % (self.to_tokens - self.from_tokens + 1)

    def join(self, thought: Completion, answer: Completion) -> Completion:
        """One completion of thought, phrase and answer. `finish` is that of the answer."""
        said = len(self.phrase)
        phrase = np.array(self.phrase, np.int32)
        return Completion(
            tokens=np.concatenate([thought.tokens, phrase, answer.tokens]),
            logprobs=np.concatenate([thought.logprobs, np.zeros(said, np.float32), answer.logprobs]),
            versions=np.concatenate([thought.versions, thought.versions[-1:].repeat(said), answer.versions]),
            loss_mask=np.concatenate([thought.loss_mask, np.zeros(said, np.bool_), answer.loss_mask]),
            finish=answer.finish,
            engine=answer.engine,
            queued_s=thought.queued_s + answer.queued_s,
            generated_s=thought.generated_s + answer.generated_s,
            experts=_routes(thought, answer),
            kept=self._kept(thought, answer),
        )

    def _kept(self, thought: Completion, answer: Completion) -> KeptSets | None:
        """The phrase was not chosen from anything."""
        if thought.kept is None or answer.kept is None:
            return None
        return KeptSets.joined([thought.kept, KeptSets.empty(len(self.phrase)), answer.kept])


def _routes(thought: Completion, answer: Completion) -> RoutedExperts | None:
    """Those with which each part was sampled. The second request prefilled the thought again, or found it in the cache:
    what it says of the thought does not count."""
    if thought.experts is None or answer.experts is None:
        return None
    return thought.experts.continued_by(answer.experts)
