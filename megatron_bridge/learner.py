"""The trained policy on Megatron-Core, as the learner loop (pipeline.trainer.loop) calls it.

    score:     plan ─▶ forward only ─▶ gather
    update:    prepare ─▶ plan ─▶ forward + backward ─▶ gather ─▶ all finite? ─▶ clip ─▶ AdamW

Every method is collective. What a method returns is the same on every rank. What is counted in tokens stays on the
device from scoring to the update; whoever writes or reports it copies it from there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_bridge.checkpoint import training_state
from megatron_bridge.checkpoint.training_state import ShardSave
from megatron_bridge.hf.folders import export_policy
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.model.build import build_chunks, choose_layers
from megatron_bridge.model.te_precision import Layers, warm_up_passes
from megatron_bridge.parallel.layout import Layout, check_layout, initialize
from megatron_bridge.parallel.rank_sync import RankZero
from megatron_bridge.step import passes
from megatron_bridge.step.expert_replay import ExpertReplay, replayer
from megatron_bridge.step.fp8_emulation import Fp8Emulation, emulating, require_emulation, weights_changed
from megatron_bridge.step.micro_batches import Plan, Split, TokenRows, deal, plan_micro_batches, split_of, sum_of_shares
from megatron_bridge.step.optimizer import (
    LearningRates,
    follow_recipe,
    reduced_gradient_norm,
    step_with_clipping,
    wrap_and_optimize,
)
from megatron_bridge.step.passes import Gathered
from megatron_bridge.weights import export_hf, load_hf
from pipeline.config.recipe import LearnerSection
from pipeline.data.batch import Batch, Share
from pipeline.data.run_directory import unfenced
from pipeline.errors import NonFiniteError
from pipeline.ports.learner import Update
from precision.formats.quant_map import QuantMap
from precision.mismatch.statistics import ALONE, Mismatch, Ranks, StepTokens
from precision.objectives.base import Objective, Prepared, ScoredStep
from precision.ratios import MAX_LOG_RATIO

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
Scores = Tensor | NDArray[np.float32] | None
_LOOK_S = 3.0
"""Ranks tell one another so often whether they have written their shares."""


class MegatronLearner:
    """One rank of the learner."""

    def __init__(
        self,
        model_folder: Path,
        learner: LearnerSection,
        objective: Objective,
        *,
        temperature: float,
        total_steps: int,
        fp32_lm_head: bool = False,
        layers: Layers | None = None,
        emulate: QuantMap | None = None,
    ) -> None:
        """Build model and optimizer in the parallel state as it is: use `create`, which makes that state too."""
        require_emulation(learner, layers, emulate)
        self.model_folder = model_folder
        self.section = learner
        self.model_config = ModelConfig.from_hf(read_hf_config(model_folder))
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.layout = Layout.of(learner)
        """The parallel sizes in use."""
        dtype = torch.float32 if learner.precision == "fp32" else torch.bfloat16
        self.layers = choose_layers(layers if emulate is None else "megatron", dtype)
        """Whose layers the model is built from."""
        chunks = build_chunks(
            self.model_config,
            self.layout,
            dtype,
            temperature,
            recompute=learner.recompute,
            fp32_lm_head=fp32_lm_head,
            layers=self.layers,
            precision=learner.precision,
        )
        load_hf(chunks, self.model_config, model_folder)
        self.model, self.optimizer = wrap_and_optimize(chunks, learner)
        self.emulation: Fp8Emulation | None = None
        """The formats that every pass, of scoring and of training, emulates; see `emulate`."""
        self.emulate(emulate)
        self._replaying = replayer(self.model, self.model_config, self.layout, self.device)
        self.step = 0
        """Optimizer steps taken."""
        self.rates = LearningRates.of(learner.optimizer, total_steps)  # a run whose recipe was changed sets its own
        self._objective = objective
        self._rank_zero = RankZero(learner.step_deadline_s)
        self._runner = passes.ObjectiveRunner(objective, self.device)
        self._meter = MismatchMeter()
        self._warm_ups = warm_up_passes(learner.precision)  # still to do

    @staticmethod
    def create(
        model_folder: Path,
        learner: LearnerSection,
        objective: Objective,
        *,
        temperature: float,
        seed: int,
        total_steps: int,
        fp32_lm_head: bool = False,
        layers: Layers | None = None,
        emulate: QuantMap | None = None,
    ) -> MegatronLearner:
        """Join the process group, load the HF folder, build the optimizer.

        `temperature` is that of the sampling. `layers` as in `model.choose_layers`; `emulate` as in the method, given
        where learner.fp8_emulation is set. Raises ModelError (an FP8 precision without what it needs) or LayoutError.
        """
        check_layout(read_hf_config(model_folder), learner)
        initialize(Layout.of(learner), seed, learner.step_deadline_s)
        return MegatronLearner(
            model_folder,
            learner,
            objective,
            temperature=temperature,
            total_steps=total_steps,
            fp32_lm_head=fp32_lm_head,
            layers=layers,
            emulate=emulate,
        )

    def emulate(self, quant_map: QuantMap | None) -> None:
        """From now on, score and train with these formats emulated; None: with none. The weights do not change, and the
        next pass rounds them. Raises ModelError with layers or modules that cannot be emulated."""
        self.emulation = None if quant_map is None else Fp8Emulation.of(self, quant_map)

    @property
    def is_rank_zero(self) -> bool:
        """True on global rank 0."""
        return dist.get_rank() == 0

    @property
    def rank(self) -> int:
        """Global rank."""
        return dist.get_rank()

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return dist.get_world_size()

    @property
    def num_data_ranks(self) -> int:
        """Data parallel ranks."""
        return self._split().data_ranks

    def share(self, lengths: NDArray[np.int64], together: Sequence[NDArray[np.bool_]]) -> Share:
        """Divide samples of these `lengths` [samples], in tokens, over the ranks; every rank finds the same. Each set
        in `together` [samples] is dealt out evenly by itself: a pass over it alone should take all ranks as long. A
        batch of which a share is read (Batch.share) may be scored and trained on, as a whole or in parts."""
        return Share(ranks=deal(lengths, self._split(), together), rank=self._split().data_rank)

    def sum_of_shares(self, values: NDArray[Any]) -> NDArray[Any]:
        """Exchange numbers of all samples, of 1 or 4 bytes, between ranks that have those of their own, and 0 in the
        place of others: each place as the rank has it on which it is not 0, bit for bit. `values` are overwritten."""
        return sum_of_shares(values, self.device)

    def score(self, batch: Batch) -> Tensor:
        """float32 [responses] natural log-probability of every response token at the present weights, in the batch's
        order, on the learner's device. The engine's experts are replayed where the batch has them;
        `replace(batch, experts=None)` has none."""
        return self.score_rows(TokenRows.of_batch(batch)).logprobs

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        """[responses] what `score` returns, on the host: for programs that compare learners."""
        logprobs: NDArray[np.float32] = self.score(batch).cpu().numpy()
        return logprobs

    def score_tokens(
        self, rows: Sequence[Sequence[int]], *, temperature: float | None = None
    ) -> list[NDArray[np.float32]]:
        """For each row of n tokens, [n - 1] natural log-probabilities of tokens 1 … n-1 given those before; at the
        sampling's or at `temperature`, with the learner's own experts."""
        whole = TokenRows.whole(rows)
        with self._tempered(temperature):
            flat = self.score_rows(whole).logprobs.cpu().numpy()
        return np.split(flat, whole.offsets[1:-1]) if rows else []

    def update(
        self,
        batch: Batch,
        advantages: NDArray[np.float32],
        scored: Scores,
        *,
        old_logprobs: Scores = None,
        trained: NDArray[np.bool_] | None = None,
        lr_factor: float = 1.0,
    ) -> Update:
        """Take one optimizer step on the whole batch; `advantages` is [samples] or [responses].

        `scored` is what `score(batch)` returned at the present weights. It is None for an objective that is not
        prepared from it, or that is prepared from `old_logprobs` alone. `old_logprobs` are the learner's
        log-probabilities [responses] before the first of several updates (pipeline.trainer.old_logprobs), by default
        those of `scored`. `trained` [samples] names the samples that are run through the model, by default all; the
        others still count in the denominators. `lr_factor` is on the learning rate.

        The metrics hold loss, grad_norm (before clipping), gradient_retries, lr, entropy (nats per token),
        padding_share, num_tokens (the loss's denominator), the mean of each of the objective's sums, what it prepared,
        and mismatch statistics of the training pass. Means of the passes are over the tokens that were run through the
        model; the loss is divided by num_tokens, and what was prepared is a mean over the same tokens, those that
        `trained` leaves out included.
        A pass that comes to a loss or a gradient that is not finite is made once more, from the same state, and the two
        are compared (gradient_retries). Raises NonFiniteError before any parameter or optimizer state is changed, and
        ValueError when the objective needs the step scored but `scored` is None.
        """
        num_tokens = batch.num_sampled_tokens
        if num_tokens == 0:
            raise ValueError(f"batch {batch.index} has no response tokens to train on")
        prepared, inputs = self._prepare(batch, advantages, scored, old_logprobs)
        rows = TokenRows.of_batch(batch)
        self._warm_up(rows, plan := self._plan(rows, trained))
        recomputes = self.section.recompute != "none"

        def passed() -> tuple[passes.Gathered, ExpertReplay | None, Passed]:
            with emulating(self.emulation), self._replaying(rows, plan, recomputes=recomputes) as replay:
                gathered = passes.train(
                    self.model,
                    plan,
                    inputs,
                    self._runner,
                    num_tokens=num_tokens,
                    step_ess=prepared.step_ess,
                    device=self.device,
                    replay=replay,
                )
            return gathered, replay, self._passed(gathered)

        gathered, replay, found = passed()
        if retries := not found.is_finite:  # agreed on by all ranks; weights and optimizer are as they were
            first = found
            gathered, replay, found = passed()
            self._compare(first, found, batch.index)
        grad_norm = found.grad_norm
        seen = seen_tokens(batch, trained).to(self.device)
        mismatch = _finite_or_refused(lambda: self._meter(gathered, batch, advantages, seen, step=self.step), batch)
        lr = self._take_step(batch.index, grad_norm, lr_factor)
        measured = {"grad_norm": grad_norm, "lr": lr, "padding_share": plan.padding_share, **prepared.measured}
        measured["gradient_retries"] = float(retries)
        measured |= asdict(replay.found) if replay and replay.found else {}
        return Update(
            metrics=mismatch.statistics() | self._metrics(gathered, num_tokens, seen) | measured,
            histogram=mismatch.group().histogram.tolist(),
            mismatch=mismatch,
            device_logprobs=known_logprobs(gathered, batch, trained, scored),
        )

    def begin_save(self, directory: Path) -> ShardSave:
        """Write model, optimizer, step and RNG state, as they are now, into an empty directory while training goes on
        (no commit marker: that is the caller's). Only one such save may be under way."""
        return training_state.begin_save(
            directory,
            self.model,
            self.optimizer,
            step=self.step,
            layout=self.layout,
            gather=self._rank_zero.gather,
        )

    def save(self, directory: Path) -> None:
        """As `begin_save`, to its end."""
        under_way = self.begin_save(directory)
        while not under_way.advance(_LOOK_S):
            pass

    def load(self, directory: Path) -> None:
        """Restore what was saved, whatever layout saved it. Raises CorruptCheckpointError."""
        self.step = training_state.load(directory, self.model, self.optimizer, layout=self.layout)
        weights_changed(self.emulation)
        self._warm_ups = warm_up_passes(self.section.precision)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every HF tensor by name, in the learner's precision. Collective: every rank must exhaust it."""
        return export_hf(self.model, self.model_config)

    def export(
        self, directory: Path, fence: Callable[[], None] = unfenced, beside: Callable[[Path], None] | None = None
    ) -> None:
        """Write a full-precision HF folder: safetensors, config, tokenizer, manifest.json; `beside` as in
        `write_policy`. `fence` is called before the folder gets its name; it raises where this process may write no
        more."""
        export_policy(self.named_weights(), self.model_folder, directory, self._rank_zero, beside=beside, fence=fence)

    def tell(self, action: Callable[[], Result]) -> Result:
        """Run an action on rank 0 alone; every rank gets its result (a JSON value), or raises its error. What only the
        file system knows is decided so: ranks on different hosts may see different files for a while. The others wait
        no longer than learner.step_deadline_s: an action that may take longer is asked again."""
        return self._rank_zero.tell(action)

    def everywhere(self, action: Callable[[], None]) -> None:
        """Run an action on every rank; when it fails on one, all raise that error."""
        self._rank_zero.everywhere(action)

    def all_of(self, look: Callable[[], bool]) -> bool:
        """Whether all ranks say so. When one fails, all raise that error."""
        return all(self._rank_zero.gather(look))

    def barrier(self) -> None:
        """Wait for every rank, no longer than learner.step_deadline_s."""
        dist.barrier()

    @contextmanager
    def _tempered(self, temperature: float | None) -> Iterator[None]:
        """Divide logits by another temperature for a while."""
        policies = [chunk.module for chunk in self.model]
        usual = policies[0].temperature
        for policy in policies:
            policy.temperature = usual if temperature is None else temperature
        try:
            yield
        finally:
            for policy in policies:
                policy.temperature = usual

    def _split(self) -> Split:
        return split_of(self.section, self.layout, self.model_config)

    def _plan(self, rows: TokenRows, chosen: NDArray[np.bool_] | None = None) -> Plan:
        budget = self.section.micro_batch_tokens
        return plan_micro_batches(rows, micro_batch_tokens=budget, split=self._split(), chosen=chosen)

    def score_rows(self, rows: TokenRows) -> passes.Gathered:
        """Log-probabilities and entropies of the predicted tokens, flat, at the present weights."""
        self._warm_up(rows, plan := self._plan(rows))
        with emulating(self.emulation), self._replaying(rows, plan) as replay:
            return passes.score(self.model, plan, int(rows.offsets[-1]), self.device, replay)

    def _warm_up(self, rows: TokenRows, plan: Plan) -> None:
        """Before the first pass that counts, whichever that is: not every run scores before it trains."""
        while self._warm_ups:
            passes.warm_up(self.model, plan, int(rows.offsets[-1]), self.device)
            self._warm_ups -= 1

    def _prepare(
        self,
        batch: Batch,
        advantages: NDArray[np.float32],
        scored: Scores,
        old_logprobs: Scores,
    ) -> tuple[Prepared, passes.TrainingInputs]:
        """What the objective decides about the whole step, and what the passes take; the same on every rank."""

        def tensor(values: Tensor | NDArray[Any]) -> Tensor:
            return torch.as_tensor(values, device=self.device)

        given = tensor(by_token(batch, advantages))
        rollout, sampled = tensor(batch.rollout_logprobs), tensor(batch.loss_mask)
        present = old_logprobs if scored is None and not self._objective.facts.reads_step_logprobs else scored
        if not self._objective.facts.needs_scoring:
            prepared = Prepared(advantages=given)
        elif present is None:
            raise ValueError("the objective needs the step scored: pass what score(batch) returned")
        else:
            step = ScoredStep(
                logprobs=tensor(present),
                rollout_logprobs=rollout,
                old_logprobs=tensor(present if old_logprobs is None else old_logprobs),
                advantages=given,
                sampled=sampled,
                offsets=tensor(batch.response_offsets),
            )
            prepared = _finite_or_refused(lambda: self._objective.prepare(step), batch)
        return prepared, passes.TrainingInputs(
            rollout_logprobs=rollout,
            advantages=prepared.advantages,
            sampled=sampled,
            anchor_logprobs=prepared.anchor_logprobs,
            reference_logprobs=None if batch.reference_logprobs is None else tensor(batch.reference_logprobs),
        )

    def _take_step(self, batch: int, grad_norm: float, lr_factor: float) -> float:
        """One step of the optimizer, on clipped gradients. Returns its learning rate."""
        section = self.section.optimizer
        lr = lr_factor * self.rates.at(batch, self.step)
        follow_recipe(self.optimizer, section, lr)
        step_with_clipping(self.optimizer, grad_norm, section.clip_grad)
        weights_changed(self.emulation)
        self.step += 1
        return lr

    def _passed(self, gathered: passes.Gathered) -> Passed:
        """What a training pass came to; whether that is finite is agreed on: all ranks do the same next."""
        loss, grad_norm = gathered.sums["loss"].item(), reduced_gradient_norm(self.optimizer)
        failed = bool(gathered.sums["failed"].item())
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm) and not failed
        worst = torch.tensor([0.0 if is_finite else 1.0], device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return Passed(loss=loss, grad_norm=grad_norm, failed=failed, is_finite=not worst.item())

    def _compare(self, first: Passed, second: Passed, batch: int) -> None:
        """Tell how the second pass over a batch differs from the first, which was not finite. Raises NonFiniteError
        where the second is not either, on every rank."""
        if second.is_finite:
            _log.warning(
                "batch %d: %s the first time, %s the second, from the same weights and tokens: the step is taken from "
                "the second. Hardware that computes otherwise from one time to the next does this; look at the errors "
                "of the GPUs and the memory of this learner's hosts",
                *(batch, first, second),
            )
            return
        same = "as it was the first time: this is no fault of the hardware" if second == first else f"first {first}"
        raise NonFiniteError(
            f"batch {batch}: {second}, {same}; no step was taken. A log-probability is not finite, or a ratio above "
            f"e^{MAX_LOG_RATIO:g}: look at the batch's rollout_logprobs and lower learner.optimizer.lr"
        )

    def _metrics(self, gathered: passes.Gathered, num_tokens: int, seen: Tensor) -> dict[str, float]:
        num_seen = int(seen.sum())  # what the objective's sums are over
        means = {name: gathered.sums[name].item() / num_seen for name in self._runner.names}
        entropy, loss = gathered.entropy[seen].double().mean().item(), gathered.sums["loss"].item()
        return {"loss": loss, "entropy": entropy, "num_tokens": float(num_tokens), **means}


@dataclass(frozen=True)
class Passed:
    """What one training pass over a batch came to."""

    loss: float
    grad_norm: float
    failed: bool
    """Whether the objective refused a micro-batch."""
    is_finite: bool
    """All of it, on every rank."""

    def __str__(self) -> str:
        refused = ", and the objective refused a micro-batch" if self.failed else ""
        return f"loss is {self.loss:g} and the gradient norm {self.grad_norm:g}{refused}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Passed) and str(self) == str(other)  # NaN is NaN here


def _finite_or_refused(work: Callable[[], Result], batch: Batch) -> Result:
    try:
        return work()
    except FloatingPointError as error:
        raise NonFiniteError(f"batch {batch.index}: {error}") from error


def by_token(batch: Batch, advantages: NDArray[np.float32]) -> NDArray[np.float32]:
    """[responses] of one advantage a sample, or one a token. Raises ValueError on any other number of them."""
    if len(advantages) == batch.num_samples:
        advantages = np.repeat(advantages, batch.response_lengths)
    elif len(advantages) != batch.num_response_tokens:
        raise ValueError(
            f"{len(advantages)} advantages for {batch.num_samples} samples and {batch.num_response_tokens} "
            "response tokens; give one for each sample or one for each token"
        )
    return np.asarray(advantages, np.float32)


def seen_tokens(batch: Batch, trained: NDArray[np.bool_] | None) -> Tensor:
    """bool [responses]: sampled tokens of the samples that were run through the model."""
    seen = batch.loss_mask
    return torch.from_numpy(seen if trained is None else seen & np.repeat(trained, batch.response_lengths))


def known_logprobs(
    gathered: Gathered,
    batch: Batch,
    trained: NDArray[np.bool_] | None,
    scored: Tensor | NDArray[np.float32] | None,
) -> Tensor:
    """float32 [responses], on the device, at the weights before the step; NaN where neither pass looked."""
    found = gathered.logprobs
    if trained is None:
        return found
    looked = torch.from_numpy(np.repeat(trained, batch.response_lengths)).to(found.device)
    return torch.where(looked, found, torch.as_tensor(torch.nan if scored is None else scored, device=found.device))


class MismatchMeter:
    """Called once an optimizer step. It remembers the last one: in the second update on a batch the policy is no longer
    of the version that the batch is counted by, so all its tokens count as one version older."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        """Batch and step of the last call."""

    def __call__(
        self, gathered: Gathered, batch: Batch, advantages: NDArray[np.float32], seen: Tensor, *, step: int
    ) -> Mismatch:
        """Statistics of the tokens that are `seen`, bool [responses] on the device. `advantages` is [samples] or
        [responses], `step` the number of optimizer steps taken before this one.

        Raises FloatingPointError on an unusable log-ratio, ValueError when no token is seen.
        """
        device, later_update = gathered.logprobs.device, self._last == (batch.index, step - 1)
        self._last = (batch.index, step)

        def tensor(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values).to(device)

        return Mismatch.of_step(
            StepTokens(
                learner_logprobs=gathered.logprobs,
                rollout_logprobs=tensor(batch.rollout_logprobs),
                seen=seen,
                advantages=tensor(by_token(batch, advantages)),
                entropy=gathered.entropy,
                age=tensor(batch.index + int(later_update) - batch.policy_version),
                offsets=tensor(batch.response_offsets),
            ),
            all_ranks(),
        )


def all_ranks() -> Ranks:
    """Those of the default process group; this process alone where there is none."""
    if not dist.is_initialized():
        return ALONE
    return Ranks(rank=dist.get_rank(), size=dist.get_world_size(), sum=_sum)


def _sum(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values
