"""The two programs of a run, put together as launch.roles.collector and launch.run.learn_rank do, over the doubles."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launch.roles.lifecycle import status_of
from pipeline.advantages.compute import AdvantageComputer
from pipeline.advantages.methods import FADE, GRPO
from pipeline.data.batch import SOLVED_REWARD, LogprobContract, Prompt, Sampling
from pipeline.data.epochs import Epoch, claim
from pipeline.data.event_log import EventLog
from pipeline.data.files import remove_leftovers, remove_old_leftovers
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import EvenKeelError, StoppedError
from pipeline.rollout.batch_builder import SolvedPromptRule
from pipeline.rollout.collector import Collector, CollectorSettings
from pipeline.rollout.group_sampler import Interruption
from pipeline.schedule import Schedule
from pipeline.tasks.mixture import PromptOrder
from pipeline.trainer.batches import BatchSource
from pipeline.trainer.checkpoints import Checkpoints, Saved
from pipeline.trainer.loop import Scoring, Trainer
from pipeline.trainer.old_logprobs import OldLogprobs
from pipeline.trainer.retention import Retention
from rollout_sglang.weights.update_lease import Updates
from tests.chaos.simulation.engines import HELD_OUT, VOCABULARY, EngineRoom, SimulatedFleet, SimulatedVerifiers
from tests.chaos.simulation.learner import HashLearner, SimulatedChannel, seed_policy
from tests.chaos.simulation.plan import Plan
from tests.chaos.simulation.world import Process, World, run_loop

WAIT_DEADLINE_S = 120.0
CONTRACT = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="ab" * 32)
NUM_PROBLEMS = 9


@dataclass
class Promises:
    """What a process was told is done for good: no fault may take it back."""

    batches: dict[int, str] = field(default_factory=dict)
    """Batch → digest of its file."""
    removed: dict[int, bytes] = field(default_factory=dict)
    """Batch → its file, from before it was removed."""
    saved: int = 0
    published: int = 0
    """As others may have seen it; a power cut may take it back."""
    announced: int = 0
    """As whoever published it was told; nothing may take it back."""


@dataclass(frozen=True)
class Setting:
    """What all processes of a simulation share."""

    world: World
    path: Path
    room: EngineRoom
    promises: Promises

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.path)


def schedule_of(plan: Plan) -> Schedule:
    return Schedule(kind=plan.kind, steps=plan.steps, lag=plan.lag, updates_per_stage=plan.stage)


def solved_rule_of(plan: Plan) -> SolvedPromptRule | None:
    return SolvedPromptRule(pass_rate=0.75, min_samples=4) if plan.solved else None


def oldest_allowed(plan: Plan, batch: int) -> int:
    """The oldest version of which a token of the batch may be; written down a second time, for the product's own
    function is on trial too."""
    return {"sync": batch, "async": max(0, batch - plan.lag), "staged": batch - batch % plan.stage}[plan.kind]


class SimulatedPrompts:
    """Implements pipeline.rollout.batch_builder.PromptSource. Problem 0 cannot be solved; the others ever more easily.
    Some groups do not fit."""

    num_problems = NUM_PROBLEMS
    sources: Mapping[str, range] = MappingProxyType({})

    def __init__(self) -> None:
        self._order = PromptOrder(NUM_PROBLEMS, 0)

    def problem(self, group: int) -> int:
        return self._order.problem(group)

    def prompt(self, group: int) -> Prompt:
        problem = self.problem(group)
        fill = (9,) * (30 if problem == 3 else 1)
        return Prompt(group=group, text="p", answer="a", tokens=(_ease(problem), *fill), problem=problem)

    def held_out(self, count: int) -> Sequence[Prompt]:
        return [Prompt(group=-1 - i, text="h", answer="a", tokens=HELD_OUT) for i in range(count)]


def _ease(problem: int) -> int:
    return 0 if problem == 0 else min(VOCABULARY, 10 * problem)


class PlainTokenizer:
    """Tokens are their numbers."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return " ".join(map(str, tokens))


class WatchedStore(BatchStore):
    """Notes what it promised."""

    promises: Promises

    def commit(self, batch: Any) -> Path:
        path = super().commit(batch)
        self.promises.batches[batch.index] = digest_of(path)
        return path


@dataclass(frozen=True)
class WatchedCheckpoints(Checkpoints):
    """Notes what it promised, and asks for it."""

    setting: Setting | None = None

    def advance(self, learner: Any, *, to_the_end: bool = False) -> Saved | None:
        """To the end, always: a thread beside the simulation would have another pace in each run of it."""
        saved = super().advance(learner, to_the_end=True)
        if saved is not None and self.setting is not None:
            self.setting.promises.saved = max(self.setting.promises.saved, saved.step)
        return saved

    def restore(self, learner: Any, versions: Any = None) -> tuple[int, dict[str, float]]:
        promised = 0 if self.setting is None else self.setting.promises.saved
        step, state = super().restore(learner, versions)
        if step < promised and self.setting is not None:
            self.setting.world.problem(f"a checkpoint was lost: saved up to step {promised}, resumed at {step}")
        return step, state


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def guarded(body: Any) -> Any:
    """The exit status of a role that meets an error, as launch.roles.lifecycle.run_role decides it."""

    def run(process: Process) -> int:
        try:
            return int(body(process))
        except EvenKeelError as error:
            process.error = error
            return status_of(error)

    return run


def collector_role(setting: Setting, process: Process) -> int:
    """As launch.roles.collector."""
    epoch = claim(setting.path, "collector")
    with epoch.as_superseded():
        return _collect(setting, process, epoch)


def _collect(setting: Setting, process: Process, epoch: Epoch) -> int:
    world, run = setting.world, setting.run.under(epoch)
    if run.is_finished():
        return 0
    while not run.is_published():
        _sleep(world, process)
    store = WatchedStore(run.batches, run.fence)
    store.promises = setting.promises
    remove_leftovers(store.directory, store._fence)
    remove_leftovers(run.evaluations, run.fence)
    fleet = SimulatedFleet(setting.room, run, Updates(run.updates, epoch))

    async def work() -> bool:
        collector = _collector(setting, run, store, fleet, epoch)
        nonlocal stop
        stop = collector.stop
        return await collector.collect()

    stop: asyncio.Event | None = None

    def every_turn() -> None:
        if process.stop_requested and stop is not None:
            stop.set()

    if not run_loop(world, work(), every_turn):
        raise StoppedError("asked to end")
    run.set_finished("collector")
    return 0


def _sleep(world: World, process: Process) -> None:
    world.point("sleep")
    world.sleep(0.5)
    if process.stop_requested:
        raise StoppedError("asked to end")


def _collector(
    setting: Setting, run: RunDirectory, store: BatchStore, fleet: SimulatedFleet, epoch: Epoch
) -> Collector:
    plan = setting.world.plan
    interruption = Interruption(from_tokens=1, to_tokens=3, phrase=(11, 12), answer_tokens=2, seed=0)
    return Collector(
        run=run,
        store=store,
        schedule=schedule_of(plan),
        engines=fleet,
        prompts=SimulatedPrompts(),
        tokenizer=PlainTokenizer(),  # type: ignore[arg-type]
        verifiers={"": SimulatedVerifiers(setting.world)},  # type: ignore[dict-item]
        contract=CONTRACT,
        event_log=EventLog(run.path, epoch.name),
        settings=CollectorSettings(
            prompts_per_batch=plan.prompts,
            group_size=plan.group,
            sampling=Sampling(max_new_tokens=8),
            concurrent_prompts=3,
            max_prompt_tokens=20,
            evaluate_every=plan.evaluate_every,
            evaluation_prompts=1,
            evaluation_samples=2,
            evaluation_sampling=Sampling(max_new_tokens=8),
            wait_deadline_s=WAIT_DEADLINE_S,
            recipe_sha256="cd" * 32,
            interruption=interruption if plan.interruption else None,
            max_refills=plan.refills,
            window=plan.window,
            solved_rule=solved_rule_of(plan),
        ),
    )


def learner_role(setting: Setting, process: Process) -> int:
    """As launch.roles.learner and launch.run.learn_rank."""
    setting.run.make_folders()
    epoch = claim(setting.path, "learner")
    with epoch.as_superseded():
        return _learn(setting, process, epoch)


def _learn(setting: Setting, process: Process, epoch: Epoch) -> int:
    run = setting.run.under(epoch)
    if run.is_finished():
        return 0
    remove_old_leftovers(run.shared_folders)
    seed_policy(run)
    learner = HashLearner(setting.world)
    promises = setting.promises

    def asked(version: int) -> None:
        if version < promises.announced:
            run.fence()  # one that was overtaken ends here
            setting.world.problem(f"engines are given version {version} after {promises.announced}")

    def announced(version: int) -> None:
        promises.announced = max(promises.announced, version)

    channel = SimulatedChannel(setting.room, run, learner, Updates(run.updates, epoch), asked, announced)
    trainer(setting, run, run, learner, channel, epoch.name, lambda: process.stop_requested).train()
    channel.close()
    run.set_finished("learner")
    return 0


def trainer(
    setting: Setting,
    run: RunDirectory,
    source: RunDirectory,
    learner: HashLearner,
    channel: SimulatedChannel | None,
    name: str,
    stop_requested: Any,
) -> Trainer:
    """The loop of `run`, on the batches of `source`; without a channel it replays them."""
    plan = setting.world.plan
    advantage = (FADE if plan.moving_advantage else GRPO)()
    shared: dict[str, Any] = dict(
        run=run,
        batches=BatchSource(
            run=run,
            store=BatchStore(source.batches),
            learner=learner,
            contract=CONTRACT,
            wait_deadline_s=WAIT_DEADLINE_S,
            stop_requested=stop_requested,
        ),
        learner=learner,
        schedule=schedule_of(plan),
        updates_per_batch=plan.updates_per_batch,
    )
    return Trainer(
        **shared,
        old_logprobs=OldLogprobs(**shared) if plan.old_logprobs else None,
        advantage_computer=AdvantageComputer(section=advantage, estimator=advantage.estimator(), max_new_tokens=8),
        scoring=Scoring(prepares=True, reads_step=True, reads_old=plan.old_logprobs),
        channel=channel,
        checkpoints=WatchedCheckpoints(
            run.checkpoints,
            plan.keep_checkpoints,
            run.fence,
            retain=_retention(setting, run).apply,
            setting=None if channel is None else setting,
        ),
        checkpoint_every=plan.checkpoint_every,
        event_log=EventLog(run.path, name),
    )


@dataclass(frozen=True, kw_only=True)
class WatchedRetention(Retention):
    """Keeps what is removed, for the replay."""

    promises: Promises

    def _record(self, store: BatchStore, index: int) -> None:
        self.promises.removed[index] = store.path(index).read_bytes()
        super()._record(store, index)


def _retention(setting: Setting, run: RunDirectory) -> Retention:
    plan, rule = setting.world.plan, solved_rule_of(setting.world.plan)
    return WatchedRetention(
        run=run,
        keep_batches=plan.keep_batches,
        keep_logprobs=plan.keep_logprobs,
        solved_at=SOLVED_REWARD if rule is None else rule.solved_at,
        promises=setting.promises,
    )


def final_weights(run: RunDirectory) -> str:
    """Of the exported model."""
    return (run.model / "model.safetensors").read_text()
