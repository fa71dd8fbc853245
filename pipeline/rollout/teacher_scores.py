"""What a teacher says of the tokens that the student sampled, whatever its servers do meanwhile.

A group that no server scores, after some attempts, is left out of the loss; its rewards are kept. Too many of them end
the run (reward.max_failed_share).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import TEACHER_FAILED, Completion, Prompt, Sample
from pipeline.data.batch_values import LOWEST_LOGPROB
from pipeline.errors import RetryableError
from pipeline.patience import retry_pause_s
from pipeline.ports.teacher import Teacher
from pipeline.rewards.pool import FailureWatch, Verdict


@dataclass(frozen=True, kw_only=True)
class TeacherScores:
    """Asks a teacher, again where it fails."""

    teacher: Teacher
    retries: int
    watch: FailureWatch
    require_alive: Callable[[], None] = lambda: None
    """Called after a failure; raises where no server will ever answer again."""
    first_pause_s: float = 0.5

    async def of(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Completion]:
        """The completions with the teacher's log-probabilities; without anything to learn from, where it gave none.

        What the teacher finds all but impossible is stored as exp(-128), the least that any engine samples. Raises
        RewardError when too many of the last samples were not scored, and what `require_alive` raises.
        """
        responses = [completion.tokens.tolist() for completion in completions]
        for failures in range(1, self.retries + 2):
            try:
                found = await self.teacher.logprobs(prompt.tokens, responses)
            except RetryableError as error:
                reason = str(error)
                self.require_alive()
                if failures <= self.retries:
                    await asyncio.sleep(retry_pause_s(self.first_pause_s, failures))
            else:
                for _ in completions:
                    self.watch.judged()
                return [_taught(*each) for each in zip(completions, found, strict=True)]
        for _ in completions:
            self.watch.failed("no answer", reason)
        return [_taught(one.unlearned(), np.zeros(len(one.tokens), np.float32)) for one in completions]


def _taught(completion: Completion, logprobs: NDArray[np.float32]) -> Completion:
    """With what the teacher says of every token; of those that no engine sampled, 0.0 is kept."""
    possible = np.maximum(logprobs, np.float32(LOWEST_LOGPROB))
    return replace(completion, teacher_logprobs=np.where(completion.loss_mask, possible, np.float32(0.0)))


def scored_sample(completion: Completion, verdict: Verdict) -> Sample:
    """The sample that a batch holds. An engine sampled some token of it; where none may be learned from, the teacher
    did not score it."""
    untaught = {} if completion.loss_mask.any() else {TEACHER_FAILED: 1.0}
    learned = completion if verdict.failed is None else completion.unlearned()
    return Sample(completion=learned, reward=verdict.reward, reward_parts={**verdict.parts, **untaught})


def distance_from_teacher(answers: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """`reverse_kl` of held-out answers, nats a token: of the student as evaluations sample it, from its own tokens; it
    is missing where the teacher scored none. `teacher_failures`: samples that it did not score."""
    scored = [
        (sample.completion.logprobs, sample.completion.teacher_logprobs, sample.completion.loss_mask)
        for each in answers
        for sample in each
    ]
    gaps = [(own.astype(np.float64) - said)[mask] for own, said, mask in scored if said is not None]
    tokens = sum(map(len, gaps))
    distance = {"reverse_kl": float(sum(gap.sum() for gap in gaps)) / tokens} if tokens else {}
    return distance | dict(
        teacher_failures=sum(TEACHER_FAILED in sample.reward_parts for each in answers for sample in each)
    )
