"""Run the ESS controller in the learner's loop.

    restore          the record of the step before the first one that is trained
    lr_factor        for a batch, from the record of the step before it
    after a step     does its record exist?  yes ─▶ follow it (a step that is trained again, or a replay)
                                             no  ─▶ evidence ─▶ decide ─▶ create the record
                            decide may first need a measurement, which all ranks make

Rank 0 decides and broadcasts; the other ranks never read the files.
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
"""Fewest tokens of an engine, and of all other engines, for which a batch is evidence about that engine alone."""


@dataclass(kw_only=True)
class StepController:
    """The controller's state in the learner loop, the same on every rank except for `files` and `members`."""

    settings: ControllerSettings
    ladder: Ladder
    learner: MegatronLearner
    files: ControlFiles
    measure: Callable[[str, Batch, Sequence[str]], Any]
    """Measure on tokens of a batch at the present weights; None if the learner cannot emulate the engines' formats.
    Collective. `quantization`: -ln of the token ESS between the learner and itself with these formats emulated, except
    in the named groups. `groups`: the same for each named group, quantized alone."""
    members: Callable[[], Sequence[Member]]
    """Returns the announced engines."""
    is_lost: Callable[[Member], bool]
    """Returns whether an announced engine seems to be gone for good, so that it holds up nothing."""
    digest: Callable[[Sequence[str]], str]
    """Returns the digest of the quant map with these groups promoted."""
    use_map: Callable[[int, Sequence[str]], None]
    """Publishes in a quant map's formats from now on, by its number and unquantized modules. Collective."""
    modules_of: Callable[[Sequence[str]], tuple[str, ...]]
    updates_per_batch: int
    event_log: EventLog
    decided_before: ControlFiles | None = None
    """The records of the run being replayed: its decisions hold, and no others are made."""
    _record: ControlRecord | None = field(init=False, default=None)
    """The record of the last step."""
    state: State = field(init=False, default_factory=State)
    """The state after the last step."""

    def restore(self, step: int) -> None:
        """Begin at `step`. Collective. Raises StoreError if the record of the step before is missing."""
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
        """Return the learning-rate factor of every optimizer step on this batch."""
        if self._record is None or not self._record.lr_by_age:
            return 1.0
        return lr_factor(mean_age(batch, self.updates_per_batch))

    def after(self, batch: Batch, update: Update) -> dict[str, float]:
        """Decide after a trained batch, or follow an existing decision; return the metrics in force. Collective."""
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
        """Record a step whose batch was lost: a decision made before the loss holds, or the state stays. Collective."""

        def read() -> dict[str, Any]:
            record = (self.decided_before or self.files).read(step)
            if record is None:
                before = self._record or ControlRecord(step=step, state=State())
                record = before.model_copy(update=dict(step=step, evidence=None, decision=None))
            self.files.create(record)
            return record.model_dump(mode="json")

        self._take(ControlRecord.model_validate(self.learner.tell(read)))

    def _take(self, record: ControlRecord) -> None:
        """Put a record's state in force."""
        self._record, self.state = record, record.state
        self.use_map(record.state.quant_map, record.promoted)

    def _next(self, batch: Batch, update: Update, known: dict[str, Any]) -> dict[str, Any]:
        """Return the step's record, or the measurement that it needs. Runs on rank 0."""
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
            # Engines whose tokens in the batch all come from one start, because the batch began after that start was
            # first seen. Engines that the run did not start (rollout.urls) are left out: nobody would restart them.
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
            # The first batch that cannot have begun yet: it waits for the version published after this record.
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
    """Return a record with a decision as an event's fields."""
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
    """Return the mean number of optimizer steps between a token's sampling and the step on it."""
    versions = (batch.index - batch.policy_version)[batch.loss_mask]
    return float(versions.mean(dtype=np.float64)) * updates_per_batch + (updates_per_batch - 1) / 2.0


def ratio_sums(batch: Batch, update: Update) -> NDArray[np.float64]:
    """Return count, sum and sum of squares of the ratios learner/engine, float64 [updates, engines, 3], over the tokens
    that each optimizer step on the batch saw, as in the metrics."""
    steps = np.zeros(batch.num_episodes, np.int32) if update.mismatch is None else update.mismatch.update
    steps = steps[batch.episode]
    seen = looked_at(batch, update.logprobs) & np.repeat(steps >= 0, batch.response_lengths)
    step, engine = (np.repeat(of, batch.response_lengths)[seen].astype(np.int64) for of in (steps, batch.engine))
    ratios = np.exp(update.logprobs[seen].astype(np.float64) - batch.rollout_logprobs[seen].astype(np.float64))
    shape = int(step.max(initial=-1)) + 1, int(engine.max(initial=-1)) + 1
    cells = step * shape[1] + engine
    sums = [np.bincount(cells, weights=each, minlength=shape[0] * shape[1]) for each in (None, ratios, ratios**2)]
    return np.stack(sums, axis=-1).astype(np.float64).reshape(*shape, 3)


def ess_loss(sums: NDArray[np.float64]) -> float:
    """Return -ln of the metrics' token ESS, averaged over updates with tokens. `sums` is [updates, 3]."""
    each = [ess_from_sums(ratio, squared, int(tokens)) for tokens, ratio, squared in sums.tolist() if tokens]
    return loss_of(float(np.mean(each)))


def engine_evidence(sums: NDArray[np.float64], starts: dict[int, int]) -> dict[int, EngineEvidence]:
    """Return the evidence about each engine in `starts` (index → start) with enough tokens, from `ratio_sums`."""
    tokens = sums[:, :, 0].sum(axis=0)
    engines = np.arange(len(tokens))
    # The others' sums are added up: a difference would lose digits to a large ratio of one engine.
    return {
        index: EngineEvidence(
            loss=ess_loss(sums[:, index]),
            loss_of_others=ess_loss(sums[:, engines != index].sum(axis=1)),
            start=starts[index],
        )
        for index in engines.tolist()
        if index in starts and MIN_ENGINE_TOKENS <= tokens[index] <= tokens.sum() - MIN_ENGINE_TOKENS
    }
