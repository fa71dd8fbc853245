"""Run the collector loop: prompts in, committed batches out.

    task ──prompts──▶ engines ──completions──▶ verifiers ──groups──▶ store.commit(batch)

    produce(batch)   reads: the committed batches only, from which a restarted collector continues
                     waits for: policy/PUBLISHED ≥ required_version(batch), then the batch before it to be committed
                     unblocked by: the learner's publish
    evaluate         runs beside the batches, every few versions, and after the last step
                     waits for: its version to be published, and the evaluation before it
                     answered by: sync: that version; it runs alone, before the commit that leads to the next one
                                  staged: that version; the last commit of the stage waits for the evaluation
                                  async: whichever version serves, and the record says how much each answered;
                                  nothing waits for it

Up to `schedule.batches_in_flight` batches are under way at once; the engines are asked for the oldest batch first. A
completion with a token older than the schedule allows is discarded and sampled again: no stale token is ever committed.
With a window, the oldest batch does not wait for slow groups: each changes places with a finished group of a later
batch (batch_builder.pass_unfinished), and so falls behind its turn, by at most the window.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pipeline.advantages.compute import taught
from pipeline.background import Patience, beside_loop, noted_in
from pipeline.data.batch import (
    SOLVED_REWARD,
    TEACHER_FAILED,
    Batch,
    Completion,
    Group,
    LogprobContract,
    Prompt,
    Sample,
    Sampling,
)
from pipeline.data.event_log import EventLog
from pipeline.data.files import FIRST_POLL_S, drop_listing, slower
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import REMOVED, BatchStore, LostBatch
from pipeline.episodes.episode import Episode, EpisodeRunner
from pipeline.episodes.host import EpisodeFailedError
from pipeline.errors import DeadlineExceededError, FatalError, StoreError
from pipeline.ports.affinity import Affinity, PrefixHits
from pipeline.rewards.pool import Verdict, Verifiers
from pipeline.rollout.batch_builder import (
    Allocator,
    AttemptsLog,
    BatchBuilder,
    GroupAllocator,
    GroupFilter,
    HoleAllocator,
    Place,
    PromptSource,
    SolvedPromptFilter,
    SolvedPromptRule,
    attempts,
    num_repeated,
    pass_unfinished,
    require_scores,
)
from pipeline.rollout.bias import BiasWatch
from pipeline.rollout.evaluation import answered_by, by_source, evaluate, kept_responses, told_of
from pipeline.rollout.group_sampler import (
    GroupSampler,
    Interruption,
    TeacherScores,
    distance_from_teacher,
    gather_or_cancel,
)
from pipeline.rollout.slots import Priority, Slots
from pipeline.schedule import Schedule
from pipeline.tasks.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rollout_sglang.fleet import Fleet

_AT_ONCE = 256
"""Batches whose checksums a thread reads before the event loop takes them: a start in the midst may be stopped."""
_UNSOLVED_BATCHES = 3
"""Batches without a solved sample after which the event log says so."""


@dataclass(frozen=True, kw_only=True)
class CollectorSettings:
    """The recipe's numbers that the collector reads."""

    prompts_per_batch: int
    group_size: int
    sampling: Sampling
    concurrent_prompts: int
    """The most prompts under way at once."""
    max_prompt_tokens: int
    evaluate_every: int
    evaluation_prompts: int
    evaluation_samples: int
    evaluation_sampling: Sampling
    wait_deadline_s: float
    """Longest wait for an answer or a publish; the collector ends after it, and the supervisor restarts it."""
    recipe_sha256: str
    engines: int = 1
    """Engines that share `concurrent_prompts`."""
    interruption: Interruption | None = None
    max_refills: int = 0
    """Dynamic sampling, or a filter: how often `prompts_per_batch` further groups may be asked for a batch."""
    keeps_equal: bool = False
    """With max_refills: whether groups with equal rewards are kept."""
    window: float = 0.0
    """The most places by which an unfinished group may fall behind its turn; 0: each batch waits for its groups."""
    solved_rule: SolvedPromptRule | None = None
    solved_at: float = SOLVED_REWARD
    special_tokens: bool = False
    """Whether rewards, filters and logs see the special tokens of responses."""
    poll_s: float = 0.5
    """Longest pause between two looks at PUBLISHED; the first pauses are shorter."""
    retry_s: float = 0.2


@dataclass
class Collector:
    run: RunDirectory
    store: BatchStore
    schedule: Schedule
    engines: Fleet
    prompts: PromptSource
    tokenizer: Tokenizer
    verifiers: Mapping[str, Verifiers]
    """By Prompt.reward."""
    contract: LogprobContract
    event_log: EventLog
    settings: CollectorSettings
    teacher: TeacherScores | None = None
    """The teacher that scores each token, beside the verifiers; None: no teacher."""
    episodes: EpisodeRunner | None = None
    """The runner of attempts of several turns; None: a prompt gets one answer."""
    group_filter: GroupFilter | None = None
    """The filter of groups to train on; None: all."""
    decided_lags: Callable[[int], tuple[tuple[int, int], ...]] | None = None
    """Schedule.decided_lags as of a version's publish; None where no controller decides lags."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it to end in order: no more prompts are asked, and those in flight are asked again at the next start."""
    slots: Slots = field(init=False)
    _episode_groups: Slots = field(init=False)
    """Groups whose episodes are under way: each has processes and folders, whether it asks an engine or not."""
    _sampler: GroupSampler = field(init=False)
    _solved: SolvedPromptFilter = field(init=False)
    _allocator: Allocator = field(init=False)
    _attempts: AttemptsLog = field(init=False)
    _bias: BiasWatch = field(init=False)
    _evaluated: set[int] = field(init=False)
    _for_publish: Patience = field(init=False)
    _published: int = field(init=False, default=-1)
    """The newest version that was seen published."""
    _looking: bool = field(init=False, default=False)
    """Whether a task looks at PUBLISHED."""
    _news: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    """Set, and replaced, when `_published` rises or nobody looks any more."""
    _under_way: deque[_UnderWay] = field(init=False, default_factory=deque)
    """The batches in progress, ascending."""
    _asking: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    """A task for each place whose group is unfinished. It may outlast its first batch."""
    _evaluation: asyncio.Task[None] | None = field(init=False, default=None)
    """The evaluation that runs beside the batches."""
    _prefix_hits: PrefixHits = field(init=False, default_factory=PrefixHits)
    _unsolved: list[float] | None = field(init=False, default_factory=list)
    """The highest reward of each batch so far; None once a sample was solved, or the log says that none was."""

    def __post_init__(self) -> None:
        say, settings = noted_in(self.event_log.event), self.settings
        # A prompt's answers are one request, but each turn of an episode is one.
        requests = settings.concurrent_prompts * (1 if self.episodes is None else settings.group_size)
        self.slots = Slots(requests, engines=settings.engines)
        self._episode_groups = Slots(settings.concurrent_prompts)
        self._sampler = GroupSampler(
            engines=self.engines,
            slots=self.slots,
            resync=self._resync,
            event_log=self.event_log,
            interruption=self.settings.interruption,
            deadline_s=self.settings.wait_deadline_s,
            retry_s=self.settings.retry_s,
            patience=Patience(say, "the collector", "engines that answer as the schedule allows (logs in RUN/logs)"),
        )
        self._for_publish = Patience(say, "the collector", "the learner's publish (its log is in RUN/logs)")
        self._bias = BiasWatch(self.schedule.batches_in_flight)
        self._evaluated = self.run.evaluated_versions()
        rule = self.settings.solved_rule
        self._attempts = AttemptsLog(self.run.attempts_file, SOLVED_REWARD if rule is None else rule.solved_at)

    async def collect(self) -> bool:
        """Commit every batch that the run lacks, then evaluate the final policy. Return True when done, False once
        `stop` was set. Raises SupersededError once another collector has taken over."""
        work, stopped = asyncio.create_task(self._collect()), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
            return work.done()
        finally:
            work.cancel()
            stopped.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)

    async def _collect(self) -> None:
        """Make the missing batches that precede existing ones; then the batches to come, several at once."""
        under_way = self._under_way
        await self._resync()
        for folder in (self.store.directory, self.store.directory / REMOVED):
            # A host's older listing may lack batches that the published versions have learned from.
            await asyncio.to_thread(drop_listing, folder)
        try:
            for hole in await asyncio.to_thread(self.store.holes, self.schedule.steps):
                self._refuse_learned(hole)
                allocator = await asyncio.to_thread(HoleAllocator.of, self.store, hole, self.settings.prompts_per_batch)
                await self._take_up(hole, allocator)
                await self._produce(hole, _UnderWay())
            index = await asyncio.to_thread(lambda: self.store.next_index)
            self._refuse_learned(index)
            await self._take_up(index, GroupAllocator(*await asyncio.to_thread(self.store.groups_to_ask)))
            while index < self.schedule.steps or under_way:
                while index < self.schedule.steps and len(under_way) < self.schedule.batches_in_flight:
                    batch = _UnderWay(previous=under_way[-1] if under_way else None)
                    under_way.append(batch)
                    batch.task = asyncio.create_task(self._produce(index, batch))
                    index += 1
                if self.schedule.overlaps:
                    self._evaluate_beside(index - len(under_way), index)
                oldest = next(batch.task for batch in under_way if batch.task is not None)
                await asyncio.wait([oldest, *filter(None, [self._evaluation])], return_when=asyncio.FIRST_COMPLETED)
                if not oldest.done():
                    continue
                await oldest
                under_way.popleft()
                if under_way:
                    under_way[0].previous = None
                    if (builder := under_way[0].builder) is not None:
                        builder.moved.set()
            if self._evaluation is not None:
                await self._evaluation
        finally:
            own = [batch.task for batch in under_way]
            tasks = [*self._asking, *filter(None, [*own, self._evaluation])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        while due := self._due(self.schedule.steps):
            await self._evaluate(due, self.schedule.steps)

    def _refuse_learned(self, index: int) -> None:
        """Raise StoreError when the learner has already consumed batch `index`: it must not be sampled again."""
        if (reason := self.run.why_not_sampled(index)) is not None:
            self.run.fence()  # to a superseded collector, a later one's batches may look missing
            raise StoreError(
                f"{self.store.path(index)} is missing, and {reason}, so it is not sampled again; put back a copy, or "
                f"`evenkeel repair {self.run.path}` records it as lost"
            )

    async def _take_up(self, index: int, allocator: Allocator) -> None:
        """Set the allocator, and restore the solved problems from the batches below `index`."""
        self._allocator = allocator
        self._solved = SolvedPromptFilter(self.settings.solved_rule)
        if self.settings.solved_rule:
            known = await asyncio.to_thread(self._attempts.read)
            lost = {one.index for one in await asyncio.to_thread(self.store.all_lost)}
            there = [one for one in range(index) if one not in lost]
            for first in range(0, len(there), _AT_ONCE):
                some = there[first : first + _AT_ONCE]
                for key in zip(some, await asyncio.to_thread(list, map(self.store.checksum, some)), strict=True):
                    if key not in known:
                        batch = await asyncio.to_thread(self.store.found, key[0], self.store.read_samples)
                        assert not isinstance(batch, LostBatch), batch  # only a repair finds a loss, of a stopped run
                        known[key] = attempts(batch, self._attempts.solved_at)
                        self.run.fence()
                        self._attempts.append(*key, known[key])
                    self._solved.record(key[0], known[key])

    async def _produce(self, index: int, this: _UnderWay) -> None:
        """Make one batch: wait for its version, ask and score prompts, wait for its turn, evaluate, commit, log. Work
        over all tokens runs in threads: a blocked event loop would look dead to waiting processes."""
        version = await self._wait_for_turn(index)
        required = self.schedule.required_version(index)
        if (previous := this.previous) is not None:
            await previous.entered.wait()  # the oldest batch takes its groups first
        solved = self._solved.solved(required)
        if len(solved) >= self.prompts.num_problems:
            raise FatalError(
                f"all {len(solved)} problems are solved before batch {index} of {self.schedule.steps}: the policy "
                "solves them; raise prompts.solved_pass_rate or give the task more prompts"
            )
        builder = this.builder = BatchBuilder(
            index=index,
            prompts=self.prompts,
            allocator=self._allocator,
            solved=solved,
            wanted=self.settings.prompts_per_batch,
            max_refills=self.settings.max_refills,
            keeps_equal=self.settings.keeps_equal,
            solved_at=self.settings.solved_at,
        )
        builder.open_places(version)
        this.entered.set()
        if not builder.places:
            raise StoreError(
                f"no group is left for {self.store.path(index)}: put back a copy of it, or begin a new run"
            )
        started = time.time()
        self.run.fence()
        first, count = builder.places[0].prompt.group, len(builder.places)
        self.event_log.event("issued", batch=index, first_group=first, groups=count, version=version)
        generated = await self._fill(this, builder)
        builder.fill_up()
        builder.require_kept()
        held = time.time()
        if not self.schedule.overlaps and index % self.settings.evaluate_every == 0 and index not in self._evaluated:
            await self._evaluate([index], index)
        elif self._evaluation is not None and self.schedule.kind == "staged" and self.schedule.publishes_after(index):
            await self._evaluation
        ready = time.time()

        later = [other.builder for other in self._under_way if other is not this and other.builder is not None]
        bias = await asyncio.to_thread(self._bias.add, builder, later)
        next_group, open_groups = self._allocator.close_batch(index)
        batch = await asyncio.to_thread(
            Batch.from_groups,
            index,
            builder.kept,
            contract=self.contract,
            dropped=builder.dropped,
            next_group=next_group,
            open_groups=open_groups,
            recipe_sha256=self.settings.recipe_sha256,
            sources=self.prompts.sources,
            repeated=builder.num_repeated,
            bias=bias,
        )
        require_scores(batch)
        tried = attempts(batch, self._attempts.solved_at) if self.settings.solved_rule else {}
        self._solved.record(index, tried)  # before the commit: after it, the learner may soon unblock a later batch
        await asyncio.to_thread(self.store.commit, batch)
        if self.settings.solved_rule:
            self.run.fence()
            await asyncio.to_thread(self._attempts.append, index, self.store.checksum(index), tried)

        interrupted = await asyncio.to_thread(lambda: int((batch.interrupted & batch.judged & taught(batch)).sum()))
        await self._tell_people(builder)
        spent = dict(generate=generated - started, hold=held - generated, evaluate=ready - held)
        self.event_log.event(
            "committed",
            batch=index,
            samples=batch.num_episodes,
            **builder.figures(),
            **self.slots.figures(),
            **self._prefix_hits.figures(),
            interrupted=interrupted,
            started=started,
            seconds=spent | dict(commit=time.time() - ready),
        )

    async def _fill(self, this: _UnderWay, builder: BatchBuilder) -> float:
        """Ask prompts until each place of the batch is settled, by its groups or by finished ones of later batches, and
        the batch before it is committed. Return the time (time.time) at which the places were settled."""
        for place in [*builder.places]:
            task = asyncio.create_task(self._settle(place))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            await asyncio.sleep(0)  # a request begins with a millisecond of work: other tasks run in between
        settled: float | None = None
        while builder.num_unsettled or this.previous is not None:  # no gaps; and an earlier batch may take its groups
            if builder.error is not None:
                raise builder.error
            if builder.num_unsettled and self.settings.window and this.previous is None:
                later = [other.builder for other in self._under_way if other is not this]
                if pass_unfinished(builder, [*filter(None, later)], self.settings.window, self.schedule):
                    continue
            settled = None if builder.num_unsettled else settled or time.time()
            builder.moved.clear()
            await builder.moved.wait()
        return settled or time.time()

    async def _settle(self, place: Place) -> None:
        """Ask prompts in succession until the place's batch keeps one, or may ask no more."""
        try:
            while not await self._ask(place):
                if (prompt := place.builder.next_prompt()) is None:
                    break
                place.prompt, place.turn = prompt, place.number
        except Exception as error:  # noqa: BLE001 - raised by the batch of the place
            place.builder.error = error
        else:
            place.is_settled = True
            place.builder.num_unsettled -= 1
        place.builder.moved.set()
        if self.settings.window and self._under_way and (oldest := self._under_way[0].builder) is not None:
            oldest.moved.set()  # it may take the finished group

    async def _ask(self, place: Place) -> bool:
        """Sample and score the place's prompt. Return whether the place is settled. Its batch may change meanwhile."""
        settings, prompt = self.settings, place.prompt
        if len(prompt.tokens) > settings.max_prompt_tokens:
            reason = f"prompt has {len(prompt.tokens)} tokens, at most {settings.max_prompt_tokens} fit"
            self.event_log.event("dropped", batch=place.builder.index, group=prompt.group, reason=reason)
            return place.builder.drop(prompt, reason)
        try:
            samples, repeated = await self._attempts_at(
                prompt,
                settings.group_size,
                settings.sampling,
                priority=(place.builder.index, prompt.group),
                allowed=lambda version: self._allows(place, version),
                begins=lambda: setattr(place, "version", self._published),
            )
        except EpisodeFailedError as error:
            self.event_log.event("dropped", batch=place.builder.index, group=prompt.group, reason=str(error))
            return place.builder.drop(prompt, f"an episode failed twice: {error}", "failed")
        group = Group(prompt=prompt, samples=samples)
        is_filtered = self.group_filter is not None and not await self.group_filter.keeps(group, self._text)
        if place.builder.keep(group, turn=place.turn, repeated=repeated, is_filtered=is_filtered):
            place.group = group
        return place.group is not None

    async def _attempts_at(
        self,
        prompt: Prompt,
        wanted: int,
        sampling: Sampling,
        *,
        priority: Priority,
        allowed: Callable[[int], bool],
        begins: Callable[[], None] = lambda: None,
    ) -> tuple[tuple[Sample, ...], int]:
        """Sample and score `wanted` attempts at a prompt. Return them, and how many repeat another (`num_repeated`).
        Raises EpisodeFailedError when an episode's environment or agent failed twice."""
        if (runner := self.episodes) is None:
            completions = await self._sampler.sample(
                prompt, wanted, sampling, priority=priority, allowed=allowed, begins=begins
            )
            repeated = await beside_loop(num_repeated, [[one] for one in completions], self.contract)
            return await self._score(prompt, completions), repeated

        has_begun = False

        async def ask(affinity: Affinity, tokens: tuple[int, ...], most: int) -> Completion:
            nonlocal has_begun
            [completion] = await self._sampler.sample(
                replace(prompt, tokens=tokens),
                1,
                replace(sampling, max_new_tokens=most, stop_tokens=runner.chat.stop_tokens),
                priority=priority,
                allowed=allowed,
                begins=(lambda: None) if has_begun else begins,
                affinity=affinity,
            )
            has_begun = True
            return completion

        asks = [partial(ask, Affinity(self._prefix_hits)) for _ in range(wanted)]
        async with self._episode_groups.acquire(priority):
            episodes = await gather_or_cancel([runner.run(prompt, one) for one in asks])
        rows = [[row.completion for row in one.rows] for one in episodes]
        repeated = await beside_loop(num_repeated, rows, self.contract)
        return await self._score_episodes(prompt, episodes), repeated

    async def _score_episodes(self, prompt: Prompt, episodes: Sequence[Episode]) -> tuple[Sample, ...]:
        """Have the verifier score the last messages of episodes that got no reward from environment or agent."""
        unscored = [one for one in episodes if one.reward is None]
        info = [
            dict(
                prompt_tokens=len(one.rows[0].prompt),
                response_tokens=sum(len(row.completion.tokens) for row in one.rows),
                finish=one.rows[-1].completion.finish,
                turns=one.facts.turns,
                tool_calls=one.facts.tool_calls,
                stopped=one.facts.stopped.name.lower(),
            )
            for one in unscored
        ]
        verdicts = iter(
            await self.verifiers[prompt.reward].score_group(
                prompt.text, prompt.answer, prompt.metadata, [one.text for one in unscored], info
            )
            if unscored
            else ()
        )
        samples = []
        for one in episodes:
            verdict = next(verdicts) if one.reward is None else Verdict(reward=float(np.float32(one.reward)))
            samples.append(Sample.of_episode(one.rows, one.facts, verdict.reward, verdict.parts))
        return tuple(samples)

    def _allows(self, place: Place, version: int) -> bool:
        """Return whether the place's group may hold a token of `version`. Raises StoreError when a published version
        has already learned from the batch: its file existed when the learner read it, and is gone. No engine serves the
        older version any more, so asking again would never end."""
        index = place.builder.index
        if self.settings.window and version < place.version:
            return False  # by this version it was decided how long the group may wait
        if self.schedule.allows(index, version):
            return True
        if version > index:
            self._refuse_learned(index)
        return False

    async def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> tuple[Sample, ...]:
        """Verify every completion, and have the teacher score it. Mask a sample from the loss where either fails."""
        if self.teacher is not None:
            completions = await self.teacher.of(prompt, completions)
        texts = [await beside_loop(self._text, completion) for completion in completions]
        prompt_tokens = len(prompt.tokens)
        info = [dict(prompt_tokens=prompt_tokens, response_tokens=len(c.tokens), finish=c.finish) for c in completions]
        verdicts = await self.verifiers[prompt.reward].score_group(
            prompt.text, prompt.answer, prompt.metadata, texts, info
        )
        samples = []
        for one, verdict in zip(completions, verdicts, strict=True):
            # An engine sampled some token; an empty mask means that the teacher did not score it.
            untaught = {} if one.loss_mask.any() else {TEACHER_FAILED: 1.0}
            learned = one if verdict.failed is None else one.unlearned()
            samples.append(
                Sample(completion=learned, reward=verdict.reward, reward_parts={**verdict.parts, **untaught})
            )
        return tuple(samples)

    async def _tell_people(self, builder: BatchBuilder) -> None:
        """Log one sample of the batch, at another place in each batch; and warn when no sample of the first batches
        solved its problem: the reward may never be that high."""
        if builder.kept:
            group = builder.kept[builder.index % len(builder.kept)]
            sample = group.samples[builder.index % len(group.samples)]
            text = await beside_loop(self._text, sample.completion)
            self.event_log.event("sampled", batch=builder.index, **told_of(group.prompt, sample, text))
        if self._unsolved is None:
            return
        if builder.highest is not None:
            self._unsolved.append(builder.highest)
        if builder.num_solved:
            self._unsolved = None
        elif len(self._unsolved) == _UNSOLVED_BATCHES:
            highest, solved_at = max(self._unsolved), self.settings.solved_at
            self.event_log.event("unsolved", batches=_UNSOLVED_BATCHES, highest=highest, solved_at=solved_at)
            self._unsolved = None

    def _text(self, completion: Completion) -> str:
        tokens = completion.tokens.tolist()
        if self.settings.special_tokens and completion.finish == "stop" and tokens[-1] in self.tokenizer.reserved:
            tokens.pop()  # the end token is no part of the answer
        return self.tokenizer.decode(tokens, special=self.settings.special_tokens)

    def _evaluate_beside(self, oldest: int, after: int) -> None:
        """Begin the evaluation that is due, unless one is running. Raises the error of the one that has ended."""
        if self._evaluation is not None and self._evaluation.done():
            self._evaluation.result()
            self._evaluation = None
        if self._evaluation is None and (due := self._due(oldest)):
            self._evaluation = asyncio.create_task(self._evaluate(due, after))

    def _due(self, oldest: int) -> list[int]:
        """Return the versions to evaluate while `oldest` is the first batch that is not committed, ascending: the last
        of them is evaluated. The others are skipped, since a later one is published already: an evaluation took longer
        than the interval, or the collector died. Empty where none is due."""
        self._note_published()
        every, steps, done = self.settings.evaluate_every, self.schedule.steps, max(self._evaluated, default=-1)
        batches = [
            *range(max(done, 0) // every * every, min(oldest + 1, steps), every),
            *((steps,) if oldest == steps else ()),
        ]
        due = sorted({version for version in map(self.schedule.published_before, batches) if version > done})
        return due[: max(1, sum(version <= self._published for version in due))]

    async def _evaluate(self, due: Sequence[int], after: int) -> None:
        """Log pass@k and rewards on held-out prompts of the last version of `due`, once per version across restarts,
        and which versions were skipped. The prompts are asked when all groups of the batches before `after` have been.
        Where later versions answered too, `answered` counts the tokens of each, and `version` is that of the median
        token."""
        *skipped, version = due
        self._evaluated.add(version)
        await self._wait_published(version)
        started = time.time()
        held_out = self.prompts.held_out(self.settings.evaluation_prompts)
        samples = self.settings.evaluation_samples
        answers = await gather_or_cancel([self._answers(prompt, samples, version, after) for prompt in held_out])
        found = answered_by(answers, version) | (dict(skipped=skipped) if skipped else {})
        found |= evaluate(answers, self.settings.solved_at)
        found |= {} if self.teacher is None else distance_from_teacher(answers)
        if self.prompts.sources:
            found["sources"] = by_source([prompt.source for prompt in held_out], answers, self.settings.solved_at)
        self.run.fence()
        # Reports read the log: a collector that dies between the two writes evaluates again, and loses nothing.
        self.event_log.event("evaluated", seconds=time.time() - started, started=started, **found)
        responses = await beside_loop(kept_responses, held_out, answers, self._text)
        self.run.write_evaluation(version, found | dict(responses=responses))

    async def _answers(self, prompt: Prompt, samples: int, version: int, after: int) -> tuple[Sample, ...]:
        """Return `samples` attempts at a held-out prompt without a token older than `version`; none if an episode of
        it failed."""
        try:
            found, _ = await self._attempts_at(
                prompt,
                samples,
                self.settings.evaluation_sampling,
                priority=(after, prompt.group),  # negative: before the groups of batch `after`
                allowed=lambda answered: answered >= version,
            )
        except EpisodeFailedError:
            return ()
        return found

    async def _wait_for_turn(self, index: int) -> int:
        """Wait for the version with which the batch may start, and return it. Decisions about the batch's lag were made
        before the publish of the version that it needs by the previous lag (pipeline.control.step_controller)."""
        while True:
            version = await self._wait_published(self.schedule.required_version(index))
            lags = () if self.decided_lags is None else await asyncio.to_thread(self.decided_lags, version)
            # Batches that begin together ask in threads: an earlier version's answer may come after a later version's.
            self.schedule = replace(self.schedule, decided_lags=max(self.schedule.decided_lags, lags, key=len))
            if version >= self.schedule.required_version(index):  # also by lags that another batch has read meanwhile
                return version

    async def _wait_published(self, version: int) -> int:
        """Wait until the engines serve at least `version`, and return the published version. The deadline is extended
        while the learner trains: a long stage has many steps between two publishes."""
        self._note_published()
        while self._published < version:
            if self._looking:  # another task looks at PUBLISHED, for all that wait
                await self._news.wait()
                continue
            self._looking = True
            try:
                await self._look_for(version)
            finally:
                self._looking = False
                self._wake_waiting()
        self._for_publish.progress()
        return self._published

    def _note_published(self) -> None:
        published = self.run.published_version()
        if published > self._published:
            self._published = published
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Have all tasks that wait for a version look whether it is there, and else wait for the next news."""
        self._news.set()
        self._news = asyncio.Event()

    async def _look_for(self, version: int) -> None:
        trained, deadline = self.run.trained_at_ns(), time.monotonic() + self.settings.wait_deadline_s
        pause_s = FIRST_POLL_S
        while self._published < version:
            self._for_publish.still(f"version {version} (published: {self._published})")
            if time.monotonic() > deadline:
                before, trained = trained, self.run.trained_at_ns()
                if trained == before:
                    raise DeadlineExceededError(
                        f"version {version} was not published within {self.settings.wait_deadline_s:.0f} s "
                        f"(published: {self._published}), nor was a step trained; see logs/learner.log"
                    )
                deadline = time.monotonic() + self.settings.wait_deadline_s
            self.run.fence()
            await asyncio.sleep(pause_s)
            pause_s = min(slower(pause_s), self.settings.poll_s)
            self._note_published()

    async def _resync(self) -> None:
        version = self.run.published_version()
        await self.engines.resync(version, self.run.policy_directory(version))


@dataclass(eq=False)
class _UnderWay:
    """A batch in progress."""

    previous: _UnderWay | None = None
    """The batch before it; None once that is committed."""
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the batch has taken its first groups."""
    builder: BatchBuilder | None = None
    task: asyncio.Task[None] | None = None
