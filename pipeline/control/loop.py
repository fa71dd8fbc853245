"""The ESS controller in the learner's loop.

    restore          the record of the step before the first one that is trained
    lr_factor        for a batch, by what was recorded after the step before it
    after a step     is its record there?  yes ─▶ go by it (a step that is trained again, or a replay)
                                           no  ─▶ evidence ─▶ decide ─▶ create the record
                            decide may ask for a measurement first, which all ranks make

Rank 0 decides and tells the others; they never look at the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.batch import Batch
from pipeline.data.event_log import EventLog
from pipeline.data.membership import Member
from pipeline.errors import StoreError
from pipeline.ports.learner import Update, looked_at
from precision.controller.policy import (
    ControllerSettings,
    Decision,
    EngineEvidence,
    Evidence,
    Ladder,
    Outcome,
    State,
    decide,
)
from precision.ratios import ess_from_sums, loss_of, lr_factor

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

MIN_ENGINE_TOKENS = 64
"""Tokens of an engine, and of all others, below which a batch says nothing about it alone."""


@dataclass(kw_only=True)
class StepController:
    """See the module's head. All of it is the same on every rank but for what `files` and `members` say."""

    settings: ControllerSettings
    ladder: Ladder
    learner: MegatronLearner
    files: ControlFiles
    measure: Callable[[str, Batch, Sequence[str]], Any]
    """Measure on tokens of a batch, at the present weights; None where the learner cannot emulate the engines' formats.
    Collective. `quantization`: -ln of the token ESS of the learner against itself with these formats emulated, where
    the groups that are named are not quantized. `groups`: the same by group, each as the only one that is quantized."""
    members: Callable[[], Sequence[Member]]
    """The engines that are announced."""
    is_lost: Callable[[Member], bool]
    """Whether an engine that is announced is gone for good, as far as one can tell: it holds up nothing."""
    digest: Callable[[Sequence[str]], str]
    """Of the quant map in which these groups are promoted."""
    use_map: Callable[[int, Sequence[str]], None]
    """Publish in the formats of this map, by its number and by the modules that it does not quantize. Collective."""
    modules_of: Callable[[Sequence[str]], tuple[str, ...]]
    """The modules of some groups."""
    updates_per_batch: int
    event_log: EventLog
    decided_before: ControlFiles | None = None
    """Of the run that is replayed: its decisions hold, and none is made."""
    _record: ControlRecord | None = field(init=False, default=None)
    """Of the step before."""
    state: State = field(init=False, default_factory=State)
    """After the step before."""

    def restore(self, step: int) -> None:
        """Begin at `step`. Collective. Raises StoreError where the record of the step before is missing."""
        if step == 0:
            self.use_map(0, ())
            return

        def read() -> dict[str, Any]:
            source = self.decided_before or self.files
            record = source.read(step - 1)
            if record is None:
                raise StoreError(
                    f"{source.folder} lacks the record of step {step - 1}, which a checkpoint holds; "
                    f"`evenkeel repair {source.folder.parent}` goes back to where it is decided again"
                )
            return record.model_dump(mode="json")

        self._take(ControlRecord.model_validate(self.learner.tell(read)))

    def lr_factor(self, batch: Batch) -> float:
        """On the learning rate of every optimizer step on this batch."""
        if self._record is None or not self._record.lr_by_age:
            return 1.0
        return lr_factor(mean_age(batch, self.updates_per_batch))

    def after(self, batch: Batch, update: Update) -> dict[str, float]:
        """Decide what follows from a batch that was trained on, or go by what was decided. Collective. Returns what is
        in force, by the names of metrics."""
        known: dict[str, Any] = {}
        look = partial(self._next, batch, update, known)
        while "record" not in (told := self.learner.tell(look)):
            needs = told["needs"]
            found = self.measure(needs, batch, told["groups"] if needs == "groups" else self.state.promoted)
            known.update(dict(unmeasurable=True) if found is None else {needs: found})
        self._take(ControlRecord.model_validate(told["record"]))
        state = self.state
        return dict(
            quant_map=float(state.quant_map),
            promoted_groups=float(len(state.promoted)),
            staleness_rung=float(state.staleness),
        )

    def skip(self, step: int) -> None:
        """A step whose batch was lost by damage. What was decided before the loss holds; without, what holds goes on.
        Collective."""

        def read() -> dict[str, Any]:
            record = (self.decided_before or self.files).read(step)
            if record is None:
                before = self._record or ControlRecord(step=step, state=State())
                record = before.model_copy(update=dict(step=step, evidence=None, decision=None))
            self.files.create(record)
            return record.model_dump(mode="json")

        self._take(ControlRecord.model_validate(self.learner.tell(read)))

    def _take(self, record: ControlRecord) -> None:
        """What it says holds from now on."""
        self._record, self.state = record, record.state
        self.use_map(record.state.quant_map, record.promoted)

    def _next(self, batch: Batch, update: Update, known: dict[str, Any]) -> dict[str, Any]:
        """Return the record of the step, or what must be measured for it. On rank 0."""
        step, before = batch.index, self._record
        record = (self.decided_before or self.files).read(step)
        if record is None and self.decided_before is not None:
            raise StoreError(f"{self.decided_before.folder} lacks the record of step {step}; replay up to there")
        if record is None:
            members, state, first_seen = self.members(), self.state, {} if before is None else before.first_seen
            sums = ratio_sums(batch, update)
            if not sums.any():
                raise StoreError(f"batch {step} has no token that was scored; the controller cannot judge it")
            wanted, to_restart = self.digest(state.promoted), {} if before is None else before.restarts
            # Engines whose tokens in the batch are all of one start: the batch began after it was first seen. Those
            # that the run did not start (rollout.urls) are none of them: nobody would start them again.
            starts = {
                member.index: member.started
                for member in members
                if member.started
                and member.index in first_seen
                and first_seen[member.index][0] == member.started
                and step > first_seen[member.index][1] + self.ladder.lag
            }
            evidence = Evidence(
                step=step,
                loss=ess_loss(sums.sum(axis=1)),
                age=mean_age(batch, self.updates_per_batch),
                engines=engine_evidence(sums, starts),
                in_transition=any(
                    (member.quant_map != wanted or to_restart.get(member.index) == member.started)
                    and not self.is_lost(member)
                    for member in members
                ),
            ).model_copy(update=known)
            outcome = decide(self.settings, self.ladder, self.state, evidence)
            if outcome.needs is not None:
                return dict(needs=outcome.needs, groups=list(outcome.groups))
            record = self._recorded(evidence, outcome)
        if not self.files.create(record):
            record = self.files.wait(step)
        elif record.decision is not None:
            self.event_log.event("controlled", **described(record))
        return dict(record=record.model_dump(mode="json"))

    def _recorded(self, evidence: Evidence, outcome: Outcome) -> ControlRecord:
        before, state, decision = self._record, outcome.state, outcome.decision
        rung, lag_before = self.ladder.in_force(state), self.ladder.in_force(self.state).lag
        lags = () if before is None else before.lags
        if rung.lag != lag_before:
            # The first batch that cannot have begun yet: it waits for the version that is published after this record.
            lags = (*lags, (evidence.step + 1 + lag_before, rung.lag))
        restarts = {} if before is None else dict(before.restarts)
        if decision is not None and decision.engine is not None:
            restarts[decision.engine] = decision.engine_start or 0
        seen, first_seen = {member.index: (member.started, evidence.step) for member in self.members()}, {}
        if before is not None:
            first_seen = dict(before.first_seen)
        first_seen |= {i: one for i, one in seen.items() if first_seen.get(i, (None, 0))[0] != one[0]}
        return ControlRecord(
            step=evidence.step,
            evidence=evidence,
            state=state,
            decision=decision,
            lr_by_age=rung.lr_by_age,
            lags=lags,
            promoted=self.modules_of(state.promoted),
            restarts=restarts,
            first_seen=first_seen,
        )


def described(record: ControlRecord) -> dict[str, Any]:
    """Return a record with a decision, as an event."""
    decision, evidence = record.decision, record.evidence
    assert isinstance(decision, Decision)
    assert evidence is not None, "a skipped step decides nothing"
    return dict(
        step=record.step,
        **decision.model_dump(mode="json", exclude_none=True),
        ess=evidence.ess,
        quantization_loss=evidence.quantization,
        age=evidence.age,
        lr_by_age=record.lr_by_age,
        lags=[list(lag) for lag in record.lags],
        quant_map=record.state.quant_map,
    )


def mean_age(batch: Batch, updates_per_batch: int) -> float:
    """Optimizer steps between the sampling of a token of the batch and the step on it, in the mean."""
    versions = (batch.index - batch.policy_version)[batch.loss_mask]
    return float(versions.mean(dtype=np.float64)) * updates_per_batch + (updates_per_batch - 1) / 2.0


def ratio_sums(batch: Batch, update: Update) -> NDArray[np.float64]:
    """float64 [updates, engines, 3]: of the ratios of learner over engine, how many there are, their sum and that of
    their squares; over the tokens that each optimizer step on the batch saw, as the metrics have it."""
    steps = np.zeros(batch.num_samples, np.int32) if update.mismatch is None else update.mismatch.update
    seen = looked_at(batch, update.logprobs) & np.repeat(steps >= 0, batch.response_lengths)
    step, engine = (np.repeat(of, batch.response_lengths)[seen].astype(np.int64) for of in (steps, batch.engine))
    ratios = np.exp(update.logprobs[seen].astype(np.float64) - batch.rollout_logprobs[seen].astype(np.float64))
    shape = int(step.max(initial=-1)) + 1, int(engine.max(initial=-1)) + 1
    cells = step * shape[1] + engine
    sums = [np.bincount(cells, weights=each, minlength=shape[0] * shape[1]) for each in (None, ratios, ratios**2)]
    return np.stack(sums, axis=-1).astype(np.float64).reshape(*shape, 3)


def ess_loss(sums: NDArray[np.float64]) -> float:
    """-ln of the token ESS as the metrics have it: the mean of that of each update. `sums` is [updates, 3]; updates
    without a token say nothing."""
    each = [ess_from_sums(ratio, squared, int(tokens)) for tokens, ratio, squared in sums.tolist() if tokens]
    return loss_of(float(np.mean(each)))


def engine_evidence(sums: NDArray[np.float64], starts: dict[int, int]) -> dict[int, EngineEvidence]:
    """Of each engine in `starts` (index → its start), where the batch has enough tokens of it and of the others. `sums`
    as `ratio_sums` has them."""
    tokens = sums[:, :, 0].sum(axis=0)
    engines = np.arange(len(tokens))
    # Sums of sums: the others' as a difference would lose the digits that a large ratio of one engine takes.
    return {
        index: EngineEvidence(
            loss=ess_loss(sums[:, index]),
            loss_of_others=ess_loss(sums[:, engines != index].sum(axis=1)),
            start=starts[index],
        )
        for index in engines.tolist()
        if index in starts and MIN_ENGINE_TOKENS <= tokens[index] <= tokens.sum() - MIN_ENGINE_TOKENS
    }
