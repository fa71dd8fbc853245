"""Several sources as one task: each with its weight, its reward and its curve."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from pipeline.errors import RecipeError
from pipeline.tasks.base import Problem, Task, check_index, normalized
from pipeline.tasks.order import MixedOrder, PromptOrder, spread
from precision.text import quoted


@dataclass(frozen=True)
class Source:
    """A task that is a part of a mixture."""

    name: str
    weight: float
    task: Task


class Mixture:
    """The problems of all sources, one source after the other. Held-out problems take turns by weight.

    Raises RecipeError for a training prompt that another source holds out.
    """

    characters = None
    reward = ""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self.chat_template = self.sources[0].task.chat_template
        self.notes = tuple(f"{source.name}: {note}" for source in sources for note in source.task.notes)
        self._first = [0, *accumulate(source.task.num_prompts for source in sources)]
        weights = [source.weight for source in sources]
        self._held_out = spread([source.task.num_held_out for source in sources], weights)
        _refuse_overlap(self.sources)

    @property
    def num_prompts(self) -> int:
        return self._first[-1]

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def problem(self, index: int) -> Problem:
        check_index(index, self.num_prompts, "problem")
        source = bisect_right(self._first, index) - 1
        return _of(self.sources[source], self.sources[source].task.problem(index - self._first[source]))

    def held_out(self, index: int) -> Problem:
        check_index(index, self.num_held_out, "held-out problem")
        source, place = self._held_out[index]
        return _of(self.sources[source], self.sources[source].task.held_out(place))

    def measured(self, count: int) -> list[int]:
        """Which held-out problems an evaluation asks, up to `count`: the first ones. A source that has none among them
        gives its first one, in place of the last of a source with several."""
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

    @property
    def problems(self) -> Mapping[str, range]:
        """Source → its training problems."""
        return {one.name: range(*ends) for one, ends in zip(self.sources, pairwise(self._first), strict=True)}


def parts_of(task: Task) -> Sequence[Task]:
    """The tasks of a mixture, or the task itself; each has one reward."""
    return [source.task for source in task.sources] if isinstance(task, Mixture) else [task]


def order_of(task: Task, seed: int) -> PromptOrder | MixedOrder:
    """Which problem of the task a group of the run asks."""
    if not isinstance(task, Mixture):
        return PromptOrder(task.num_prompts, seed)
    sizes = {source.name: source.task.num_prompts for source in task.sources}
    return MixedOrder(sizes, [source.weight for source in task.sources], seed)


def _of(source: Source, problem: Problem) -> Problem:
    return replace(problem, source=source.name, reward=source.task.reward)


def _refuse_overlap(sources: Sequence[Source]) -> None:
    """Within a source nothing is shared; by the hash of the prompt alone, nothing would be between two."""
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
