"""Build one batch: choose which groups to ask and which to keep, filter groups, and leave out solved problems.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), if the recipe enables it: a group with equal rewards does not
show which answers are better. It is dropped and another group asked in its place, up to a bound. Past the bound the
batch is filled up with groups that were to be dropped.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.advantages.compute import taught
from pipeline.background import beside_loop
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
from pipeline.data.checksums import crc32
from pipeline.data.store import BatchStore, Entry, RemovedBatch, entry, groups_between
from pipeline.errors import RecipeError, RewardError
from pipeline.importing import own_function, truth_of
from pipeline.schedule import Schedule
from precision.text import one_line, quoted


class PromptSource(Protocol):
    """The prompt of each group of the run, and the held-out prompts."""

    @property
    def num_problems(self) -> int:
        """Problems of one epoch."""
        ...

    @property
    def sources(self) -> Mapping[str, range]:
        """Source name → its problems; empty where there is only one source."""
        ...

    def problem(self, group: int) -> int:
        """Return the problem that the group asks, 0 ≤ problem < num_problems."""
        ...

    def prompt(self, group: int) -> Prompt: ...

    def held_out(self, count: int) -> Sequence[Prompt]: ...


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The numbers of one sampled group."""

    turn: int
    """Place.turn of the place that it was asked for."""
    repeated: int
    solved: int
    highest: float | None
    """The highest reward; None where no sample was judged."""
    reward: float | None
    """The mean reward, likewise."""
    informative: bool
    tokens: int
    """Response tokens."""
    length: float
    """Mean length of a response, in tokens."""


@dataclass(kw_only=True, eq=False)
class Place:
    """A place of a batch, with the group that is asked for it."""

    builder: BatchBuilder
    number: int
    """Batch · prompts a batch + the place in it."""
    turn: int
    """The number of the place for which its group was asked."""
    prompt: Prompt
    version: int
    """No token of its group is older."""
    group: Group | None = None
    """The group, once it is kept for the batch."""
    is_settled: bool = False
    """Whether nothing more is asked for the place."""


@dataclass(kw_only=True)
class BatchBuilder:
    """The groups of batch `index`. `kept` and `dropped` are final after `fill_up`."""

    index: int
    prompts: PromptSource
    allocator: Allocator
    solved: Mapping[int, Attempts]
    """Problems that are no longer asked. At least one problem of `prompts` is not among them."""
    wanted: int
    """Groups that the batch should hold."""
    max_refills: int
    """How often `wanted` further groups may be asked; 0 keeps every group, whatever its rewards."""
    keeps_equal: bool = False
    """Whether groups with equal rewards are kept: then only groups that the user's filter drops are replaced."""
    solved_at: float = SOLVED_REWARD
    asked: int = 0
    places: list[Place] = field(default_factory=list)
    """At most `wanted`, each for a group."""
    num_unsettled: int = 0
    error: Exception | None = None
    """The failure of a place, which ends the run."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a place is settled or has failed, and when the batch becomes the oldest."""
    kept: list[Group] = field(default_factory=list)
    dropped: list[DroppedGroup] = field(default_factory=list)
    judged: dict[int, Judged] = field(default_factory=dict)
    """Every sampled group, dropped ones included."""
    _reserve: list[Group] = field(default_factory=list)

    def open_places(self, version: int) -> None:
        """Make the places, as many as there are prompts for. `version` is the newest that engines surely serve."""
        for place in range(self.index * self.wanted, (self.index + 1) * self.wanted):
            if (prompt := self.next_prompt()) is not None:
                self.places.append(Place(builder=self, number=place, turn=place, prompt=prompt, version=version))
        self.num_unsettled = len(self.places)

    def next_prompt(self) -> Prompt | None:
        """Return another prompt to ask, or None past the bound. Groups of solved problems are passed over."""
        if self.asked == (1 + self.max_refills) * self.wanted:
            return None
        while (group := self.allocator.take(self.index)) is not None:
            if not self._passed_over(group):
                self.asked += 1
                return self.prompts.prompt(group)
        return None

    def _passed_over(self, group: int) -> bool:
        """Drop the group if it asks a solved problem, and return whether it does."""
        problem = self.prompts.problem(group)
        if problem in self.solved:
            self.dropped.append(DroppedGroup.passed_over(group, problem))
        return problem in self.solved

    def keep(self, group: Group, *, turn: int, repeated: int, is_filtered: bool = False) -> bool:
        """Keep the group for the batch or for the reserve; drop a group that the user's filter rejected. Return False
        when another group should be asked in its place. `turn` is its place's; `repeated` counts its samples by
        `num_repeated`."""
        rewards, informative = group.rewards, is_informative(group)
        lengths = [one.answer_tokens for one in group.samples]
        self.judged[group.prompt.group] = Judged(
            turn=turn,
            repeated=repeated,
            solved=int(is_solved(rewards, self.solved_at).sum()),
            highest=float(rewards.max()) if len(rewards) else None,
            reward=float(rewards.mean()) if len(rewards) else None,
            informative=informative,
            tokens=sum(lengths),
            length=sum(lengths) / len(lengths),
        )
        if is_filtered:
            self._drop_sampled(group, "filtered", "prompts.group_filter did not keep it")
            return False
        wanted = self.max_refills == 0 or self.keeps_equal or informative
        (self.kept if wanted else self._reserve).append(group)
        return wanted

    def exchange(self, unfinished: Place, finished: Place) -> None:
        """Give the unfinished group of a place of this batch to a later batch, and take a finished one of it."""
        other, group = finished.builder, finished.group
        assert group is not None
        assert isinstance(self.allocator, GroupAllocator)
        other.kept = [one for one in other.kept if one is not group]
        self.kept.append(group)
        self.judged[group.prompt.group] = other.judged.pop(group.prompt.group)
        self.allocator.exchange(self.index, unfinished.prompt.group, other.index, group.prompt.group)
        self.places[self.places.index(unfinished)] = finished
        other.places[other.places.index(finished)] = unfinished
        unfinished.builder, finished.builder = other, self
        self.num_unsettled -= 1
        other.num_unsettled += 1
        unfinished.number, finished.number = finished.number, unfinished.number

    def require_kept(self) -> None:
        """Raise RewardError after `fill_up` when the user's filter dropped all groups, RecipeError when no prompt could
        be asked: a learner cannot take a step on nothing."""
        if self.kept:
            return
        if filtered := sum(drop.kind == "filtered" for drop in self.dropped):
            raise RewardError(
                f"prompts.group_filter kept none of the {filtered} groups that were sampled for batch {self.index}; "
                "correct it, or raise prompts.max_refills so that more are asked"
            )
        if failed := [drop for drop in self.dropped if drop.kind == "failed"]:
            raise RewardError(
                f"all {len(failed)} groups of batch {self.index} were given up (group {failed[0].group}: "
                f"{failed[0].reason}); correct the environment or agent of the section episode"
            )
        unfit = [drop for drop in self.dropped if drop.kind == "unfit"]
        raise RecipeError(
            f"none of the {len(unfit)} prompts of batch {self.index} can be asked (group {unfit[0].group}: "
            f"{unfit[0].reason}); raise rollout.context_tokens, lower rollout.max_new_tokens, or leave such prompts "
            "out of the data"
        )

    def drop(self, prompt: Prompt, reason: str, kind: DropKind = "unfit") -> bool:
        """Drop a prompt that cannot be asked, or whose episodes failed. Return False when another prompt should be
        asked in its place."""
        self.dropped.append(DroppedGroup(group=prompt.group, reason=reason, kind=kind, problem=prompt.problem))
        return self.max_refills == 0

    def fill_up(self) -> None:
        """Fill free places from the reserve, and drop the rest, as well as leftover groups that no other batch may
        have. Call it when nothing more is asked."""
        for group in self.allocator.leftover():
            if not self._passed_over(group):
                reason, problem = "not needed when the batch was made again", self.prompts.problem(group)
                self.dropped.append(DroppedGroup(group=group, reason=reason, problem=problem))
        self._reserve.sort(key=lambda group: group.prompt.group)
        free = self.wanted - len(self.kept)
        self.kept = sorted([*self.kept, *self._reserve[:free]], key=lambda group: group.prompt.group)
        for other in self._reserve[free:]:
            rewards = other.rewards
            reason = f"zero variance: all rewards {rewards[0]:g}" if len(rewards) else "no sample has a reward"
            self._drop_sampled(other, "zero_variance", reason)
        self.dropped.sort(key=lambda drop: drop.group)

    def _drop_sampled(self, group: Group, kind: DropKind, reason: str) -> None:
        """Drop a sampled group, counting its samples for pass rates."""
        solved = is_solved(group.rewards, self.solved_at)
        counts = dict(samples=len(solved), solved=int(solved.sum()))
        number, problem = group.prompt.group, group.prompt.problem
        self.dropped.append(DroppedGroup(group=number, reason=reason, kind=kind, problem=problem, **counts))

    @property
    def num_repeated(self) -> int:
        """Samples counted by the function `num_repeated`, dropped groups included."""
        return sum(judged.repeated for judged in self.judged.values())

    @property
    def num_solved(self) -> int:
        """Solved samples, those of dropped groups included."""
        return sum(judged.solved for judged in self.judged.values())

    @property
    def highest(self) -> float | None:
        """Highest reward of any sample; None without a judged one."""
        return max((one.highest for one in self.judged.values() if one.highest is not None), default=None)

    def figures(self) -> dict[str, int]:
        """Return counts for the event log, after `fill_up`."""
        kinds = [drop.kind for drop in self.dropped]
        return dict(
            dropped=kinds.count("unfit"),
            failed=kinds.count("failed"),
            informative=sum(map(is_informative, self.kept)),
            refills=max(0, self.asked - self.wanted),
            zero_variance=sum(not judged.informative for judged in self.judged.values()),
            zero_variance_dropped=kinds.count("zero_variance"),
            repeated=self.num_repeated,
            filtered=kinds.count("filtered"),
            solved_groups=kinds.count("solved"),
            solved_problems=len(self.solved),
        )


def pass_unfinished(builder: BatchBuilder, later: Sequence[BatchBuilder], window: float, schedule: Schedule) -> bool:
    """Fill the places of `builder` whose groups are unfinished with finished groups of later batches, if all of them
    can be filled, and return whether that was so. The groups change places: each is trained exactly once.

    An unfinished group falls at most `window` places behind its turn, and never into a batch that is too new for its
    oldest token, or that leaves its problem out as solved; then the batch waits for it. Among groups that may wait, the
    one with the nearest end takes the nearest place. `later` ascends.
    """
    unfinished = [place for place in builder.places if not place.is_settled]
    spare = [place for other in later for place in other.places if place.is_settled and place.group is not None]
    if len(spare) < len(unfinished):
        return False

    def last(place: Place) -> float:
        """Return the number of the last place that may hold the group of `place`."""
        batches = [one.index for one in later if schedule.required_version(one.index) <= place.version]
        fresh = (max(batches, default=-1) + 1) * builder.wanted - 1
        return min(place.turn + window, fresh)

    pairs = [*zip(sorted(unfinished, key=last), sorted(spare, key=lambda place: place.number), strict=False)]
    if any(new.number > last(old) or old.prompt.problem in new.builder.solved for old, new in pairs):
        return False
    for old, new in pairs:
        old.builder.exchange(old, new)
    return True


def require_scores(batch: Batch) -> None:
    """Raise RewardError for a batch that teaches nothing, since no sample was scored."""
    if batch.num_samples and not taught(batch).any():
        raise RewardError(
            f"the teacher scored none of the {batch.num_episodes} samples of batch {batch.index}; "
            "logs/collector.log says why; look at the teacher's servers"
        )
    if batch.num_samples and not batch.judged.any():
        raise RewardError(
            f"no sample of batch {batch.index} has a reward: the verifier failed on all {batch.num_episodes}; "
            "logs/collector.log says why; correct the reward function"
        )


def is_informative(group: Group) -> bool:
    """Return whether the rewards of a group differ: otherwise every advantage that compares them is 0."""
    return len(np.unique(group.rewards)) > 1


NO_CHANCE_NATS = 30.0
"""A chance of one in 10^13."""


def num_repeated(attempts: Sequence[Sequence[Completion]], contract: LogprobContract) -> int:
    """Count the attempts of a group, each the completions of its rows, that repeat another, against all odds by the
    engine's log-probabilities: the engine draws each with the same seed, or copies its answer. Likely repeats, such as
    short answers, do not count."""
    if contract.top_k != -1 and not contract.kept_set:
        return 0  # unknown which tokens top_k left: with top_k 1 all are alike
    # Restricted by top_p, a token is at most 1 / top_p as likely as in the whole vocabulary.
    more = 0.0 if contract.kept_set else -math.log(contract.top_p)
    alike: dict[bytes, list[float]] = {}
    for rows in attempts:
        surprise = 0.0
        for one in rows:
            surprise += -float(one.logprobs.sum(dtype=np.float64)) - more * int(one.loss_mask.sum())
        alike.setdefault(b"".join(one.tokens.tobytes() for one in rows), []).append(surprise)
    return sum(len(same) - 1 for same in alike.values() if sum(same[1:]) >= NO_CHANCE_NATS)


class GroupAllocator:
    """An allocator of group numbers, each once and in order, for all batches under way. How many groups a batch uses is
    known only when it is done (some are dropped, others asked instead). So a committed batch also stores which groups
    below the highest number given out belong to no committed batch (`open_groups`, and `next_group`): after a crash
    those are given out first, then the numbers above. No group is lost or asked twice."""

    def __init__(self, next_group: int, open_groups: Iterable[int]) -> None:
        self._next_group = next_group
        self._reclaimed = deque(sorted(open_groups))
        self._held: dict[int, list[int]] = {}
        """Batch under way → its groups."""

    def take(self, batch: int) -> int:
        if self._reclaimed:
            group = self._reclaimed.popleft()
        else:
            group = self._next_group
            self._next_group += 1
        self._held.setdefault(batch, []).append(group)
        return group

    def exchange(self, batch: int, group: int, other: int, theirs: int) -> None:
        """Give `group` of a batch to another batch under way, which gives one of its groups."""
        for index, given, taken in ((batch, group, theirs), (other, theirs, group)):
            self._held[index][self._held[index].index(given)] = taken

    def leftover(self) -> Sequence[int]:
        """Return no groups: a later batch takes those that a batch leaves."""
        return ()

    def close_batch(self, batch: int) -> tuple[int, tuple[int, ...]]:
        """Return `next_group` and `open_groups` for `batch` to store at its commit."""
        del self._held[batch]
        under_way = (group for groups in self._held.values() for group in groups)
        return self._next_group, tuple(sorted([*self._reclaimed, *under_way]))


class HoleAllocator:
    """An allocator for one damaged batch that is made again though later batches exist (a hole). It takes only groups
    that the batches around the hole leave, because later batches have fixed theirs."""

    def __init__(self, before: Entry, after: Entry, wanted: int) -> None:
        """`before` is the batch just before the hole, `after` the next existing batch. `wanted` groups are kept back
        for each further batch between the two."""
        self._index = before.index + 1
        self._after = after
        self._left = deque(groups_between(before, after))
        self._further = after.index - before.index - 2
        self._kept_back = self._further * wanted

    @staticmethod
    def of(store: BatchStore, index: int, wanted: int) -> HoleAllocator:
        """Return the allocator for batch `index`: all earlier batches exist or are lost, and a later batch exists."""
        after = min(there for there in store.settled() if there > index)
        return HoleAllocator(entry(store, index - 1), entry(store, after), wanted)

    def take(self, batch: int) -> int | None:
        """Return the lowest remaining group, as long as enough remain for the further batches."""
        assert batch == self._index
        return self._left.popleft() if len(self._left) > self._kept_back else None

    def leftover(self) -> Sequence[int]:
        """Return the groups that the last batch of the hole does not take."""
        if self._further:
            return ()
        left = [*self._left]
        self._left.clear()
        return left

    def close_batch(self, batch: int) -> tuple[int, tuple[int, ...]]:
        """Return the values for the batch to store, with which those of later batches stay true."""
        assert batch == self._index
        return self._after.next_group, tuple(sorted({*self._after.open_groups, *self._after.groups, *self._left}))


Allocator = GroupAllocator | HoleAllocator


@dataclass(frozen=True, kw_only=True)
class SolvedPromptRule:
    """The rule for a solved problem: it has `min_samples` samples, and a share of at least `pass_rate` solved it."""

    pass_rate: float
    min_samples: int
    solved_at: float = SOLVED_REWARD
    """The reward of a sample that solved it."""


@dataclass(frozen=True)
class Attempts:
    """The number of samples of one problem, and of those that solved it."""

    samples: int = 0
    solved: int = 0

    def __add__(self, other: Attempts) -> Attempts:
        return Attempts(self.samples + other.samples, self.solved + other.solved)


class SolvedPromptFilter:
    """A filter against asking solved problems again: no positive resampling (ScaleRL, arXiv 2510.13786). Without a
    `solved_rule` no problem counts as solved. The pass rate of a problem is over all its samples so far, those of
    groups dropped for zero variance included. For batch b it counts exactly the batches below required_version(b),
    which are always committed when b starts. So a resumed run, and an audit, leave out the same problems."""

    def __init__(self, solved_rule: SolvedPromptRule | None) -> None:
        self._solved_rule = solved_rule
        self._attempts: dict[int, Attempts] = {}
        self._solved: Mapping[int, Attempts] = {}
        self._later: deque[tuple[int, Mapping[int, Attempts]]] = deque()
        """(batch, attempts by problem), recorded and not yet counted."""

    def record(self, batch: int, tried: Mapping[int, Attempts]) -> None:
        """Take the attempts by problem of a batch. Batches come in ascending order."""
        if self._solved_rule is not None:
            self._later.append((batch, tried))

    def solved(self, version: int) -> Mapping[int, Attempts]:
        """Return solved problem → the attempts that made it count as solved, by the batches below `version`. `version`
        must not be lower than in the call before. A returned mapping never changes."""
        if (rule := self._solved_rule) is None:
            return self._solved
        while self._later and self._later[0][0] < version:
            _, tried = self._later.popleft()
            newly_solved = {}
            for problem, more in tried.items():
                total = self._attempts.pop(problem, Attempts()) + more
                if problem in self._solved:
                    continue  # it stays solved, however later samples went
                self._attempts[problem] = total
                enough = total.samples >= rule.min_samples
                if enough and total.solved / total.samples >= rule.pass_rate:
                    newly_solved[problem] = total
            if newly_solved:
                self._solved = {**self._solved, **newly_solved}
        return self._solved


def attempts(batch: Batch | RemovedBatch, solved_at: float) -> dict[int, Attempts]:
    """Count by problem its samples in a batch, those of dropped groups included. Ignore groups of unknown problems. A
    removed batch has the counts of its record, by the `solved_at` of then."""
    if isinstance(batch, RemovedBatch):
        return {problem: Attempts(*counts) for problem, *counts in batch.attempts}
    first = batch.first_rows
    problems, members = np.unique(batch.problem[first], return_inverse=True)
    judged, is_right = batch.judged[first], is_solved(batch.reward[first], solved_at)
    samples = np.bincount(members, judged, minlength=len(problems)).astype(int).tolist()
    solved = np.bincount(members, judged & is_right, minlength=len(problems)).astype(int).tolist()
    found = {p: Attempts(*counts) for p, *counts in zip(problems.tolist(), samples, solved, strict=True)}
    for drop in batch.dropped:
        if drop.samples:
            found[drop.problem] = found.get(drop.problem, Attempts()) + Attempts(drop.samples, drop.solved)
    found.pop(-1, None)
    return found


class AttemptsLog:
    """A file of the attempts of each batch, from which a restarted collector counts, without reading all batches.

    A line holds the checksum of its batch and that of itself. A batch without a fitting line is read instead.
    """

    def __init__(self, path: Path, solved_at: float) -> None:
        self._path = path
        self.solved_at = solved_at

    def append(self, batch: int, checksum: str, tried: Mapping[int, Attempts]) -> None:
        counts = [[problem, one.samples, one.solved] for problem, one in tried.items()]
        line = json.dumps([batch, checksum, self.solved_at, counts], separators=(",", ":"))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"\n{crc32(line.encode())} {line}")  # on a line of its own also behind one that was cut off

    def read(self) -> dict[tuple[int, str], dict[int, Attempts]]:
        """Return (batch, its checksum) → attempts by problem. Lines that are damaged, cut off, or of another
        `solved_at` are passed over."""
        found = dict[tuple[int, str], dict[int, Attempts]]()
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            for line in file:
                seal, _, text = line.rstrip(b"\n").partition(b" ")
                if seal == str(crc32(text)).encode():
                    batch, checksum, solved_at, counts = json.loads(text)
                    if solved_at == self.solved_at:
                        found[batch, checksum] = {problem: Attempts(*numbers) for problem, *numbers in counts}
        return found


GIVEN = ("prompt", "answer", "metadata", "responses", "rewards", "reward_parts", "info")
"""Arguments that a filter may name: text and columns of the prompt, then lists with an entry per sample. A reward is
None where the verifier failed; `info` has prompt_tokens, response_tokens and finish."""


@dataclass
class GroupFilter:
    """A user's function that chooses which sampled groups are trained on (`prompts.group_filter`).

        def mixed(rewards, info):           # it gets the arguments that it names, of GIVEN
            known = [reward for reward in rewards if reward is not None]
            return all(one["finish"] == "stop" for one in info) and len(set(known)) > 1

    It gets one finished group at a time, in a thread of the collector. Held-out prompts are not filtered.
    """

    name: str
    function: Callable[..., Any]
    names: frozenset[str]
    deadline_s: float
    """For one group; the run ends after it."""
    _one_at_a_time: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    @staticmethod
    def load(name: str, deadline_s: float) -> GroupFilter:
        """Load the function. Raises RecipeError when it cannot be imported, or names an argument not in GIVEN."""
        function, names = own_function("prompts.group_filter", name, GIVEN)
        if inspect.iscoroutinefunction(function):
            raise RecipeError(f"prompts.group_filter {name} is async; write it as a plain function")
        return GroupFilter(name, function, names, deadline_s)

    async def keeps(self, group: Group, text: Callable[[Completion], str]) -> bool:
        """Return whether the group may be trained on; `text` decodes a response. Raises RewardError when the function
        fails, takes too long, or returns neither true nor false."""
        samples, prompt = group.samples, group.prompt
        given: dict[str, Any] = dict(
            prompt=prompt.text,
            answer=prompt.answer,
            metadata=prompt.metadata,
            rewards=[sample.reward if sample.judged else None for sample in samples],
            reward_parts=[dict(sample.reward_parts) for sample in samples],
            info=[
                dict(
                    prompt_tokens=len(prompt.tokens),
                    response_tokens=sample.answer_tokens,
                    finish=sample.completion.finish,
                )
                for sample in samples
            ],
        )
        if "responses" in self.names:
            given["responses"] = [await beside_loop(text, sample.completion) for sample in samples]
        chosen = {key: value for key, value in given.items() if key in self.names}
        try:
            async with self._one_at_a_time:
                async with asyncio.timeout(self.deadline_s) as limit:
                    said = await _in_a_thread(lambda: self.function(**chosen))
        except Exception as error:
            if not limit.expired():  # a TimeoutError may be the function's own
                raise RewardError(
                    f"prompts.group_filter {self.name} failed on group {prompt.group} ({type(error).__name__}: "
                    f"{one_line(error, 200)}); correct it"
                ) from error
            raise RewardError(
                f"prompts.group_filter {self.name} took more than {self.deadline_s:g} s for group {prompt.group}; "
                "make it faster, or raise reward.deadline_s"
            ) from error
        if (truth := truth_of(said)) is None:
            raise RewardError(
                f"prompts.group_filter {self.name} returned {quoted(said)} for group {prompt.group}, expected True or "
                "False; correct it"
            )
        return truth


async def _in_a_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call in a daemon thread: a hung call does not delay the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except StopIteration as stopped:  # a future does not accept it
            error = RuntimeError(f"StopIteration: {stopped}")
        except Exception as failed:  # noqa: BLE001 - raised in the awaiting task
            error = failed
        settle = future.set_result if error is None else future.set_exception
        with suppress(RuntimeError):  # the loop is closed: no task waits any more
            loop.call_soon_threadsafe(lambda: future.done() or settle(result if error is None else error))

    threading.Thread(target=work, name="group-filter", daemon=True).start()
    return await future
