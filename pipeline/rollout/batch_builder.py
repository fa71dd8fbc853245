"""One batch under way: which groups it asks, which of them it keeps.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), if the recipe wants it: a group whose rewards are all equal says
nothing about which answers are better. It is dropped and another one asked in its place, up to a bound. Past the bound
the batch is filled up with groups that were to be dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.advantages.distillation import taught
from pipeline.data.ledger.dropped import DroppedGroup
from pipeline.data.records import SOLVED_REWARD, Batch, Group, Prompt
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
    asked: int = 0
    kept: list[Group] = field(default_factory=list)
    dropped: list[DroppedGroup] = field(default_factory=list)
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
        wanted = self.max_refills == 0 or self.keeps_equal or is_informative(group)
        (self.kept if wanted else self._reserve).append(group)
        return wanted

    def filter_out(self, group: Group) -> bool:
        """Drop a group that the user's filter does not keep; another one should be asked in its place."""
        rewards = [sample.reward for sample in group.samples if sample.judged]
        self.dropped.append(
            DroppedGroup(
                group=group.prompt.group,
                reason="prompts.group_filter did not keep it",
                kind="filtered",
                problem=group.prompt.problem,
                samples=len(rewards),
                solved=sum(reward >= SOLVED_REWARD for reward in rewards),
            )
        )
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
        self.dropped = sorted([*self.dropped, *self._uninformative(free)], key=_number)

    def _uninformative(self, first: int) -> Iterator[DroppedGroup]:
        for group in self._reserve[first:]:
            rewards = [sample.reward for sample in group.samples if sample.judged]
            samples, reward = len(rewards), max(rewards, default=0.0)
            yield DroppedGroup(
                group=group.prompt.group,
                reason=f"zero variance: all rewards {reward}" if rewards else "no sample has a reward",
                kind="zero_variance",
                problem=group.prompt.problem,
                samples=samples,
                solved=samples * (reward >= SOLVED_REWARD),
            )

    def figures(self) -> dict[str, int]:
        """Counts for the event log, after `fill_up`."""
        kinds = [drop.kind for drop in self.dropped]
        return dict(
            dropped=kinds.count("unfit"),
            informative=sum(map(is_informative, self.kept)),
            refills=max(0, self.asked - self.wanted),
            zero_variance=kinds.count("zero_variance"),
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
    return len({sample.reward for sample in group.samples if sample.judged}) > 1


def _number(entry: Group | DroppedGroup) -> int:
    return entry.group if isinstance(entry, DroppedGroup) else entry.prompt.group
