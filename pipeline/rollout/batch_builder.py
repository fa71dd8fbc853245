"""One batch under way: which groups it asks, which of them it keeps.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), if the recipe wants it: a group whose rewards are all equal says
nothing about which answers are better. It is dropped and another one asked in its place, up to a bound. Past the bound
the batch is filled up with groups that were to be dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pipeline.advantages.distillation import taught
from pipeline.data.batch import (
    SOLVED_REWARD,
    Batch,
    Completion,
    DropKind,
    DroppedGroup,
    Group,
    LogprobContract,
    Prompt,
    is_solved,
)
from pipeline.errors import RecipeError, RewardError
from pipeline.rollout.group_allocator import Allocator
from pipeline.rollout.solved_prompts import Attempts


class PromptSource(Protocol):
    """What each group of the run asks, and the held-out prompts."""

    @property
    def num_problems(self) -> int:
        """Problems of one epoch."""
        ...

    @property
    def sources(self) -> Mapping[str, range]:
        """Name → the problems of each source; empty where there is one."""
        ...

    def problem(self, group: int) -> int:
        """Which problem the group asks, 0 ≤ problem < num_problems."""
        ...

    def prompt(self, group: int) -> Prompt: ...

    def held_out(self, count: int) -> Sequence[Prompt]: ...


@dataclass(kw_only=True)
class BatchBuilder:
    """The groups of batch `index`. `kept` and `dropped` are final after `fill_up`."""

    index: int
    prompts: PromptSource
    allocator: Allocator
    solved: Mapping[int, Attempts]
    """Problems that are not asked any more. At least one problem of `prompts` is not among them."""
    wanted: int
    """Groups that the batch should hold."""
    max_refills: int
    """How often `wanted` further groups may be asked; 0 keeps every group, whatever its rewards."""
    keeps_equal: bool = False
    """Groups of equal rewards are kept all the same: only those that are filtered out make room."""
    solved_at: float = SOLVED_REWARD
    asked: int = 0
    kept: list[Group] = field(default_factory=list)
    dropped: list[DroppedGroup] = field(default_factory=list)
    num_solved: int = 0
    """Samples, those of dropped groups too."""
    highest: float | None = None
    """Reward of any sample; None until one was judged."""
    num_repeated: int = 0
    """Samples that `num_repeated` counts, likewise."""
    _num_equal: int = 0
    """Groups of equal rewards, kept or not."""
    _reserve: list[Group] = field(default_factory=list)

    def next_prompt(self) -> Prompt | None:
        """Another prompt to ask, or None past the bound. Groups of solved problems are passed over."""
        if self.asked == (1 + self.max_refills) * self.wanted:
            return None
        while (group := self.allocator.take(self.index)) is not None:
            if not self._passed_over(group):
                self.asked += 1
                return self.prompts.prompt(group)
        return None

    def _passed_over(self, group: int) -> bool:
        """Whether the group asks a solved problem; it is dropped then."""
        problem = self.prompts.problem(group)
        if problem in self.solved:
            self.dropped.append(DroppedGroup.passed_over(group, problem))
        return problem in self.solved

    def keep(self, group: Group) -> bool:
        """Keep the group for the batch or for the reserve; False when another one should be asked in its place."""
        self._note(group)
        wanted = self.max_refills == 0 or self.keeps_equal or is_informative(group)
        (self.kept if wanted else self._reserve).append(group)
        return wanted

    def _note(self, group: Group) -> None:
        """Count what was sampled, whatever becomes of it."""
        rewards = group.rewards
        self._num_equal += not is_informative(group)
        self.num_solved += int(is_solved(rewards, self.solved_at).sum())
        if len(rewards):
            self.highest = max(float(rewards.max()), self.highest if self.highest is not None else -math.inf)

    def filter_out(self, group: Group) -> bool:
        """Drop a group that the user's filter does not keep; another one should be asked in its place."""
        self.dropped.append(self._sampled(group, "filtered", "prompts.group_filter did not keep it"))
        self._note(group)
        return False

    def require_kept(self) -> None:
        """After `fill_up`. Raises RewardError when nothing is left since the user's filter dropped it, RecipeError when
        no prompt could be asked: a learner can take no step on nothing."""
        if self.kept:
            return
        if filtered := sum(drop.kind == "filtered" for drop in self.dropped):
            raise RewardError(
                f"prompts.group_filter kept none of the {filtered} groups that were sampled for batch {self.index}; "
                "correct it, or raise prompts.max_refills so that more are asked"
            )
        unfit = [drop for drop in self.dropped if drop.kind == "unfit"]
        raise RecipeError(
            f"none of the {len(unfit)} prompts of batch {self.index} can be asked (group {unfit[0].group}: "
            f"{unfit[0].reason}); raise rollout.context_tokens, lower rollout.max_new_tokens, or leave such prompts "
            "out of the data"
        )

    def drop(self, prompt: Prompt, reason: str) -> bool:
        """Drop a prompt that cannot be asked; False when another one should be asked in its place."""
        self.dropped.append(DroppedGroup(group=prompt.group, reason=reason, problem=prompt.problem))
        return self.max_refills == 0

    def fill_up(self) -> None:
        """Call it when nothing more is asked: groups of the reserve take the free places, the others are dropped. So
        are those that only this batch may have."""
        for group in self.allocator.leftover():
            if not self._passed_over(group):
                reason, problem = "not needed when the batch was made again", self.prompts.problem(group)
                self.dropped.append(DroppedGroup(group=group, reason=reason, problem=problem))
        self._reserve.sort(key=_number)
        free = self.wanted - len(self.kept)
        self.kept = sorted([*self.kept, *self._reserve[:free]], key=_number)
        for other in self._reserve[free:]:
            rewards = other.rewards
            reason = f"zero variance: all rewards {rewards[0]:g}" if len(rewards) else "no sample has a reward"
            self.dropped.append(self._sampled(other, "zero_variance", reason))
        self.dropped.sort(key=_number)

    def _sampled(self, group: Group, kind: DropKind, reason: str) -> DroppedGroup:
        """A group that is dropped though it was sampled: its samples count for pass rates."""
        solved = is_solved(group.rewards, self.solved_at)
        return DroppedGroup(
            group=group.prompt.group,
            reason=reason,
            kind=kind,
            problem=group.prompt.problem,
            samples=len(solved),
            solved=int(solved.sum()),
        )

    def figures(self) -> dict[str, int]:
        """Counts for the event log, after `fill_up`."""
        kinds = [drop.kind for drop in self.dropped]
        return dict(
            dropped=kinds.count("unfit"),
            informative=sum(map(is_informative, self.kept)),
            refills=max(0, self.asked - self.wanted),
            zero_variance=self._num_equal,
            zero_variance_dropped=kinds.count("zero_variance"),
            repeated=self.num_repeated,
            filtered=kinds.count("filtered"),
            solved_groups=kinds.count("solved"),
            solved_problems=len(self.solved),
        )


def require_scores(batch: Batch) -> None:
    """Raises RewardError for a batch of which nothing can be learned, since no sample was scored."""
    if batch.num_samples and not taught(batch).any():
        raise RewardError(
            f"the teacher scored none of the {batch.num_samples} samples of batch {batch.index}; "
            "logs/collector.log says why; look at the teacher's servers"
        )
    if batch.num_samples and not batch.judged.any():
        raise RewardError(
            f"no sample of batch {batch.index} has a reward: the verifier failed on all {batch.num_samples}; "
            "logs/collector.log says why; correct the reward function"
        )


def is_informative(group: Group) -> bool:
    """Whether those of its rewards differ that there are: otherwise every advantage that compares them is 0."""
    return len(np.unique(group.rewards)) > 1


NO_CHANCE_NATS = 30.0
"""One in 10^13."""


def num_repeated(completions: Sequence[Completion], contract: LogprobContract) -> int:
    """How many of a group's completions repeat another, though by the engine's own log-probabilities there was no
    chance of it: an engine that draws each with one seed, or copies its answer. Short answers of a policy that is sure
    of them are alike, and are not counted."""
    if contract.top_k != -1 and not contract.kept_set:
        return 0  # nobody knows what was left to draw from: at top_k 1 all are alike
    # Cut at top_p, a token is at most 1 / top_p as likely as it is in the whole vocabulary.
    more = 0.0 if contract.kept_set else -math.log(contract.top_p)
    alike: dict[bytes, list[float]] = {}
    for one in completions:
        surprise = -float(one.logprobs.sum(dtype=np.float64)) - more * int(one.loss_mask.sum())
        alike.setdefault(one.tokens.tobytes(), []).append(surprise)
    return sum(len(same) - 1 for same in alike.values() if sum(same[1:]) >= NO_CHANCE_NATS)


def _number(entry: Group | DroppedGroup) -> int:
    return entry.group if isinstance(entry, DroppedGroup) else entry.prompt.group
