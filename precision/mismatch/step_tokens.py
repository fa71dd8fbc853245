"""The response tokens of an optimizer step, with what the mismatch statistics ask of each, and how they are divided."""

from __future__ import annotations

from dataclasses import dataclass

from precision.mismatch.splits import OFFSETS, SPLITS
from precision.ragged import positions
from precision.torch_on_use import Tensor, torch

CHUNK_TOKENS = 1 << 16
"""Tokens that are in work at once, more only in a response that is longer: about 40 MB of float64 terms and
memberships."""


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """Per response token of a step, flat, sequence after sequence, on one device."""

    learner_logprobs: Tensor
    """[responses] nats."""
    rollout_logprobs: Tensor
    """[responses] nats."""
    seen: Tensor
    """bool [responses]; False on tokens that are not compared. Whatever else is there means nothing."""
    advantages: Tensor
    """[responses] of which the sign is used."""
    entropy: Tensor
    """[responses] nats, of the learner's distribution."""
    age: Tensor
    """[responses] versions between the policy that sampled the token and the one that trains on it, rounded up."""
    offsets: Tensor
    """int64 [sequences + 1] where each response begins."""

    @property
    def position(self) -> Tensor:
        """int64 [responses] place in the response, from 0."""
        return positions(self.offsets)

    def buckets(self) -> Tensor:
        """int64 [seen tokens, splits]: the row in GROUPS of each token, for each of SPLITS."""
        numbers = (self.advantages.sign(), self.position, self.entropy, self.age)
        columns = []
        for split, offset, number in zip(SPLITS, OFFSETS, numbers, strict=True):
            edges = torch.tensor(split.edges, dtype=torch.float64, device=number.device)
            columns.append(offset + torch.bucketize(number[self.seen].double(), edges, right=True))
        return torch.stack(columns, dim=1)

    def chunks(self) -> list[tuple[int, int]]:
        """First sequence and the one after the last of each run of whole sequences of CHUNK_TOKENS at most. They depend
        on the lengths alone."""
        offsets, found, first = self.offsets.cpu(), [], 0
        while first < len(offsets) - 1:
            fits = int(torch.searchsorted(offsets, offsets[first] + CHUNK_TOKENS, right=True)) - 1
            after = max(fits, first + 1)
            found.append((first, after))
            first = after
        return found

    def part(self, first: int, after: int) -> StepTokens:
        """The sequences from `first` to the one before `after`."""
        offsets = self.offsets[first : after + 1]
        tokens = slice(int(offsets[0]), int(offsets[-1]))
        return StepTokens(
            learner_logprobs=self.learner_logprobs[tokens],
            rollout_logprobs=self.rollout_logprobs[tokens],
            seen=self.seen[tokens],
            advantages=self.advantages[tokens],
            entropy=self.entropy[tokens],
            age=self.age[tokens],
            offsets=offsets - offsets[0],
        )

    def log_ratios(self) -> Tensor:
        """float64 [responses] log pi_learner - log pi_engine; 0 where not seen. Not checked."""
        learner, rollout = self.learner_logprobs.double(), self.rollout_logprobs.double()
        return torch.where(self.seen, learner - rollout, 0.0)
