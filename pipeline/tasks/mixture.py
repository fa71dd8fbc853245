"""Order the problems of a run: several sources as one task, prompts that are too long left out, a seeded permutation.

A group's problem depends on its number alone, so a resumed run asks the same problems.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import RecipeError
from pipeline.tasks.task import GeneratedTask, Problem, Task, check_index, normalized
from precision.text import quoted

_BLOCK = 1000
"""Groups in which every source has its share. Shares are rounded to one in so many."""
_AT_ONCE = 1000


class PromptOrder:
    """A seeded order in which group `i` asks problem `problem(i)`, and every problem comes once an epoch. Access is
    random, so a restarted collector needs only the number of the next group. Two epochs at most are kept in memory, 8
    bytes a problem each. The order uses the raw stream of the Philox generator, which NumPy promises to keep, not
    `Generator.permutation`, which may change."""

    def __init__(self, num_prompts: int, seed: int | str) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts is {num_prompts}, expected at least 1")
        self._num_prompts = num_prompts
        self._seed = seed
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def problem(self, group: int) -> int:
        """Return the problem that `group` ≥ 0 asks, 0 ≤ index < num_prompts."""
        if group < 0:
            raise ValueError(f"group is {group}, expected 0 or more")
        epoch, place = divmod(group, self._num_prompts)
        return int(self._permutation(epoch)[place])

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        key = hashlib.sha256(f"prompt order/{self._seed}/{epoch}".encode()).digest()
        random = np.random.Philox(key=np.frombuffer(key[:16], "<u8")).random_raw(self._num_prompts)
        return np.argsort(random, kind="stable")


class MixedOrder:
    """An order in which named sources take turns. Problem indices run through all sources. Of any n groups in a row a
    source has its share of n, give or take one or two. Each source has epochs of its own."""

    def __init__(self, sizes: Mapping[str, int], weights: Sequence[float], seed: int) -> None:
        """Take `sizes`, the number of problems of each source, and `weights` in the same order, of any sum."""
        self._orders = [PromptOrder(size, f"{seed}/{name}") for name, size in sizes.items()]
        self._first = [0, *accumulate(sizes.values())]
        self._counts = shares(weights, _BLOCK)
        self._turns = spread(self._counts, self._counts)

    def problem(self, group: int) -> int:
        """Return the problem that `group` ≥ 0 asks, 0 ≤ index < the sum of all sizes."""
        if group < 0:
            raise ValueError(f"group is {group}, expected 0 or more")
        block, turn = divmod(group, _BLOCK)
        source, place = self._turns[turn]
        return self._first[source] + self._orders[source].problem(block * self._counts[source] + place)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Return whole numbers of sum `total` in proportion to `weights`, each at least 1. The rest after rounding down
    goes to the largest remainders. Raises ValueError for more weights than `total`."""
    if len(weights) > total:
        raise ValueError(f"there are {len(weights)} weights, expected at most {total}")
    exact = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    nearest = sorted(range(len(weights)), key=lambda source: counts[source] - exact[source])
    for turn in range(total - sum(counts)):
        counts[nearest[turn % len(nearest)]] += 1
    while sum(counts) > total:  # some counts were raised to 1
        counts[counts.index(max(counts))] -= 1
    return counts


def spread(counts: Sequence[int], weights: Sequence[float]) -> list[tuple[int, int]]:
    """Return (source, place in it) of all of `counts`, the sources taking turns in proportion to their `weights`."""
    places = [(source, place) for source, count in enumerate(counts) for place in range(count)]
    return sorted(places, key=lambda turn: ((turn[1] + 0.5) / weights[turn[0]], turn[0]))


@dataclass(frozen=True)
class Source:
    name: str
    weight: float
    task: Task


class Mixture(Task):
    """The problems of all sources, source after source. Held-out problems take turns by weight. Raises RecipeError for
    a training prompt that another source holds out."""

    characters = None
    reward = ""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self.chat_template = self.sources[0].task.chat_template
        self.notes = tuple(f"{source.name}: {note}" for source in sources for note in source.task.notes)
        self._first = [0, *accumulate(source.task.num_prompts for source in sources)]
        weights = [source.weight for source in sources]
        self._held_out = spread([source.task.num_held_out for source in sources], weights)
        self.num_prompts, self.num_held_out = self._first[-1], len(self._held_out)
        self.problems = {one.name: range(*ends) for one, ends in zip(sources, pairwise(self._first), strict=True)}
        """Source → its training problems."""
        # A source shares no prompt with itself; two sources may, where a held-out file and not the hash decides.
        held_out = {normalized(s.task.held_out(index).text): s for s in sources for index in range(s.task.num_held_out)}
        for source in sources:
            for index in range(source.task.num_prompts):
                text = source.task.problem(index).text
                other = held_out.get(normalized(text), source)
                if other is not source:
                    raise RecipeError(
                        f"source {source.name} trains on {quoted(text)}, which {other.name} holds out; evaluation "
                        "would measure memory: remove it from one of the two"
                    )

    def problem(self, index: int) -> Problem:
        check_index(index, self.num_prompts, "problem")
        number = bisect_right(self._first, index) - 1
        source = self.sources[number]
        problem = source.task.problem(index - self._first[number])
        return replace(problem, source=source.name, reward=source.task.reward)

    def held_out(self, index: int) -> Problem:
        check_index(index, self.num_held_out, "held-out problem")
        number, place = self._held_out[index]
        source = self.sources[number]
        return replace(source.task.held_out(place), source=source.name, reward=source.task.reward)

    def measured(self, count: int) -> list[int]:
        """Return the held-out problems that an evaluation asks, up to `count`: the first ones. A source with none among
        them gives its first problem, in place of the last of a source with several."""
        chosen = list(range(min(count, self.num_held_out)))
        if count >= self.num_held_out:
            return chosen
        first = {source: index for index, (source, place) in enumerate(self._held_out) if place == 0}
        for index in sorted(first.values()):
            asked = Counter(self._held_out[one][0] for one in chosen)
            spare = [one for one in chosen if asked[self._held_out[one][0]] > 1]
            if index not in chosen and spare:
                chosen.remove(spare[-1])
                chosen.append(index)
        return chosen

    def demonstration(self, index: int) -> tuple[str, str] | None:
        return self.sources[index % len(self.sources)].task.demonstration(index // len(self.sources))


def parts_of(task: Task) -> Sequence[Task]:
    """Return the tasks of a mixture, or the task itself; each has one reward."""
    return [source.task for source in task.sources] if isinstance(task, Mixture) else [task]


def order_of(task: Task, seed: int) -> PromptOrder | MixedOrder:
    """Return the order in which the groups of a run ask the problems of the task."""
    if not isinstance(task, Mixture):
        return PromptOrder(task.num_prompts, seed)
    sizes = {source.name: source.task.num_prompts for source in task.sources}
    return MixedOrder(sizes, [source.weight for source in task.sources], seed)


class FittingTask(Task):
    """The problems of `task` with prompts of at most `most` tokens, in the same order; a note counts the others. All
    prompts are tokenized here, once, so that a character without a token is refused before a run begins. Raises
    ModelError for such a character, and RecipeError when too few problems are left."""

    def __init__(self, task: Task, count: Callable[[Sequence[Problem]], Sequence[int]], most: int) -> None:
        """Take `count`, which returns the number of tokens of each problem's prompt."""
        self._task = task
        self.reward, self.characters, self.chat_template = task.reward, task.characters, task.chat_template
        too_long, longest, text = 0, 0, ""

        def fit(number: int, problem: Callable[[int], Problem]) -> Sequence[int]:
            nonlocal too_long, longest, text
            kept: list[int] = []
            for first in range(0, number, _AT_ONCE):
                indices = range(first, min(number, first + _AT_ONCE))
                problems = [problem(index) for index in indices]
                for index, one, tokens in zip(indices, problems, count(problems), strict=True):
                    if tokens <= most:
                        kept.append(index)
                        continue
                    too_long += 1
                    if tokens > longest:
                        longest, text = tokens, one.text
            return range(number) if len(kept) == number else kept

        self._training = fit(task.num_prompts, task.problem)
        self._held_out = fit(task.num_held_out, task.held_out)
        self.num_prompts, self.num_held_out = len(self._training), len(self._held_out)
        left_out = (
            f"{too_long} of {task.num_prompts + task.num_held_out} prompts have more than {most} tokens "
            f"(rollout.context_tokens - rollout.max_new_tokens) and are left out; the longest, {quoted(text)}, has "
            f"{longest}"
        )
        self.notes = (*task.notes, left_out) if too_long else tuple(task.notes)
        if not self._training or not self._held_out:
            side = "to train on" if not self._training else "held out"
            raise RecipeError(
                f"{left_out}, and none is left {side}; raise rollout.context_tokens, or lower rollout.max_new_tokens"
            )

    def problem(self, index: int) -> Problem:
        check_index(index, self.num_prompts, "problem")
        return self._task.problem(self._training[index])

    def held_out(self, index: int) -> Problem:
        check_index(index, self.num_held_out, "held-out problem")
        return self._task.held_out(self._held_out[index])

    def demonstration(self, index: int) -> tuple[str, str] | None:
        return self._task.demonstration(index)


def fitting(task: Task, count: Callable[[Sequence[Problem]], Sequence[int]], most: int) -> Task:
    """Return the task without prompts of more than `most` tokens, of a mixture without those of any source. A generated
    task is returned as it is: it may have too many prompts to check, and they are all of a kind."""
    if isinstance(task, Mixture):
        return Mixture([replace(one, task=fitting(one.task, count, most)) for one in task.sources])
    return task if isinstance(task, GeneratedTask) else FittingTask(task, count, most)
