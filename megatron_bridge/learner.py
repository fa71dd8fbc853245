"""Score batches with the policy on Megatron-Core and train it, as the learner loop (pipeline.trainer.loop) asks.

    score:     plan ─▶ forward only ─▶ gather
    update:    prepare ─▶ plan ─▶ forward + backward ─▶ gather ─▶ all finite? ─▶ clip ─▶ AdamW

Every method is collective and returns the same on every rank. Per-token tensors stay on the device from scoring to the
update; code that writes or reports them copies them to the host.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from numpy.typing import NDArray
from torch import Tensor

from megatron_bridge.checkpoint import training_state
from megatron_bridge.checkpoint.training_state import ShardSave
from megatron_bridge.hf.folders import export_policy
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.model.build import build_chunks, choose_layers
from megatron_bridge.model.te_precision import Layers, token_multiple, warm_up_passes
from megatron_bridge.parallel.layout import Layout, check_layout, initialize
from megatron_bridge.parallel.rank_sync import RankSync
from megatron_bridge.step import passes
from megatron_bridge.step.expert_replay import ExpertReplay, Replayed, install_replay
from megatron_bridge.step.fp8_emulation import TE_LAYERS, Fp8Emulation, weights_changed
from megatron_bridge.step.host_weights import PinnedMemory
from megatron_bridge.step.micro_batches import Plan, Split, TokenRows, deal, plan_micro_batches
from megatron_bridge.step.optimizer import LearningRates, finite_beside_norm, take_step, wrap_and_optimize
from megatron_bridge.step.parking import Parking
from megatron_bridge.weights import export_hf, load_hf
from pipeline.config.recipe import LearnerSection
from pipeline.data.batch import Batch, Share
from pipeline.data.run_directory import unfenced
from pipeline.errors import ModelError, NonFiniteError
from pipeline.ports.learner import Update
from precision.formats.quant_map import QuantMap
from precision.mismatch.statistics import Mismatch, Ranks, StepTokens
from precision.objectives.objective import Objective, Prepared, ScoredStep, TokenBatch
from precision.ratios import MAX_LOG_RATIO

_log = logging.getLogger(__name__)
Scores = Tensor | NDArray[np.float32] | None
_GRAPH_ROW = 128
"""Tokens of a micro-batch for each of its rows under CUDA graphs; shorter rows fill more micro-batches."""
_LOOK_S = 3.0
"""Longest time that `save` waits before the ranks check again whether their shares are written."""


class MegatronLearner(RankSync):
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
        """Build model and optimizer in the existing parallel state. `create` initializes that state first."""
        if learner.fp8_emulation != (emulate is not None):
            raise ValueError(
                f"learner.fp8_emulation is {str(learner.fp8_emulation).lower()}, but the learner was given "
                f"{'no' if emulate is None else 'a'} quant map; pass build_quant_map(recipe) exactly where it is true"
            )
        if emulate is not None and layers == "transformer_engine":
            raise ModelError(TE_LAYERS)
        self.model_folder = model_folder
        self.section = learner
        self.model_config = ModelConfig.from_hf(read_hf_config(model_folder))
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.layout = Layout.of(learner)
        dtype = torch.float32 if learner.precision == "fp32" else torch.bfloat16
        self.layers = choose_layers(layers if emulate is None else "megatron", dtype)
        """The layers' origin: Megatron's own or Transformer Engine's."""
        chunks = build_chunks(
            self.model_config,
            self.layout,
            dtype,
            temperature,
            recompute=learner.recompute,
            fp32_lm_head=fp32_lm_head,
            layers=self.layers,
            precision=learner.precision,
            settings=learner.megatron.transformer,
        )
        load_hf(chunks, self.model_config, model_folder)
        self._chunks, self.optimizer = wrap_and_optimize(chunks, learner)
        self._gathered = True
        """Whether all parameters are whole since the last step; see `model`."""
        self.emulation: Fp8Emulation | None = None
        """The formats that every scoring and training pass emulates; see `emulate`."""
        self.emulate(emulate)
        self._routers = install_replay(self.model, self.model_config)
        self.step = 0
        """Number of optimizer steps taken."""
        self.rates = LearningRates.of(learner.optimizer, total_steps)  # a run whose recipe was changed replaces it
        super().__init__(learner.step_deadline_s)
        self.split = Split(
            data_ranks=parallel_state.get_data_parallel_world_size(),
            data_rank=parallel_state.get_data_parallel_rank(),
            context_ranks=parallel_state.get_context_parallel_world_size(),
            context_rank=parallel_state.get_context_parallel_rank(),
            sequence_ranks=self.layout.sequence_ranks,
            token_multiple=token_multiple(learner.precision),
            # The interleaved schedule works in groups of as many micro-batches as there are pipeline stages.
            count_multiple=self.layout.pipeline if self.layout.virtual > 1 else 1,
            preferred_multiple=128 if self.device.type == "cuda" else 1,
            row_slots=0 if chunks[0].config.cuda_graph_impl == "none" else learner.micro_batch_tokens // _GRAPH_ROW + 1,
            one_length=self.layout.pipeline > 1,
            attention_parity=self.model_config.attention_parity,
        )
        """This rank's place and the sizes that a plan must keep."""
        self.num_data_ranks = self.split.data_ranks
        self._objective = objective
        self._runner = passes.ObjectiveRunner(objective, self.device)
        self._ranks = Ranks(rank=self.rank, size=self.num_ranks, sum=_sum)
        self.parking = Parking(self)
        """Where gradients and optimizer state are while engines on the same GPUs sample (rollout.colocated)."""
        self._measured: tuple[int, int] | None = None
        """Batch and step of the last update."""
        self._warm_ups = warm_up_passes(learner.precision)  # passes still to run
        self._save_memory = PinnedMemory(self.device.type == "cuda")

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
        """Join the process group, load the HF folder, build the optimizer. `temperature` is the sampling temperature.
        `layers` is as in `choose_layers`. `emulate` is as in the method of that name; pass it if and only if
        learner.fp8_emulation is set. Raises ModelError (an FP8 precision without its requirements) or LayoutError."""
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

    @property
    def model(self) -> list[DistributedDataParallel]:
        """The wrapped model chunks, for all that reads or writes weights. With overlap_param_gather
        (learner.megatron.ddp) a step leaves each rank its share of the new weights: passes gather the rest layer by
        layer, and the first use of this property after a step gathers it at once, which is then collective."""
        if not self._gathered:
            self._gathered = True
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        return self._chunks

    def emulate(self, quant_map: QuantMap | None) -> None:
        """Emulate these formats (None: none) in later scoring and training. The weights do not change; the next pass
        rounds them. Raises ModelError for layers or modules that cannot be emulated."""
        self.emulation = None if quant_map is None else Fp8Emulation(self, quant_map)

    def share(self, lengths: NDArray[np.int64], together: Sequence[NDArray[np.bool_]]) -> Share:
        """Divide samples of these `lengths` [samples], in tokens, over the ranks, alike on every rank. Each set in
        `together` [samples] is dealt out evenly, so that a pass over it alone takes all ranks as long. A batch whose
        share is read (Batch.share) can be scored and trained on, as a whole or in parts."""
        return Share(ranks=deal(lengths, self.split, together), rank=self.split.data_rank)

    def sum_of_shares(self, values: NDArray[Any]) -> NDArray[Any]:
        """Exchange values of all samples between data parallel ranks. Each rank has its samples' values and 0
        elsewhere. Values are of 1 or 4 bytes and arrive bit for bit; `values` is overwritten."""
        integers = {1: np.uint8, 4: np.int32}[values.dtype.itemsize]
        summed = torch.from_numpy(values.view(integers)).to(self.device)
        dist.all_reduce(summed, group=parallel_state.get_data_parallel_group())
        return np.asarray(summed.cpu().numpy()).view(values.dtype)

    def score(self, batch: Batch) -> Tensor:
        """Return the natural log-probability of every response token at the present weights: float32 [responses], in
        the batch's order, on the learner's device. The engine's experts are replayed if the batch has them;
        `replace(batch, experts=None)` has none."""
        return self.score_rows(TokenRows.of_batch(batch)).logprobs

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        """Return `score(batch)` on the host, float32 [responses], for programs that compare learners."""
        logprobs: NDArray[np.float32] = self.score(batch).cpu().numpy()
        return logprobs

    def score_tokens(
        self, rows: Sequence[Sequence[int]], *, temperature: float | None = None
    ) -> list[NDArray[np.float32]]:
        """Return, for each row of n tokens, the natural log-probabilities [n - 1] of its tokens after the first. Uses
        the sampling temperature or `temperature`, and the learner's own experts."""
        tokens = [np.asarray(row, np.int32) for row in rows]
        whole = TokenRows(tokens=tokens, starts=np.ones(len(rows), np.int64))  # every token but the first predicted
        policies = [chunk.module for chunk in self.model]
        usual = policies[0].temperature
        for policy in policies:
            policy.temperature = usual if temperature is None else temperature
        try:
            flat = self.score_rows(whole).logprobs.cpu().numpy()
        finally:
            for policy in policies:
                policy.temperature = usual
        return np.split(flat, whole.offsets[1:-1]) if rows else []

    def score_rows(self, rows: TokenRows) -> passes.Gathered:
        """Compute log-probabilities and entropies of the predicted tokens, flat, at the present weights."""
        plan = plan_micro_batches(rows, micro_batch_tokens=self.section.micro_batch_tokens, split=self.split)
        num_predicted = int(rows.offsets[-1])
        self._warm_up(plan, num_predicted)
        with self._as_rollouts(rows, plan) as replay:
            return passes.score(self._chunks, plan, num_predicted, self.device, replay)

    def _warm_up(self, plan: Plan, num_predicted: int) -> None:
        """Run the passes that come before the first one that counts: not every run scores before it trains."""
        while self._warm_ups:
            passes.warm_up(self._chunks, plan, num_predicted, self.device)
            self._warm_ups -= 1

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
        `scored`. `trained` [samples] selects the samples that run through the model, by default all; the others still
        count in the denominators. `lr_factor` multiplies the learning rate.

        The metrics hold loss, grad_norm (before clipping), gradient_retries, lr, entropy (nats per token),
        padding_share, num_tokens (the loss's denominator), the mean of each of the objective's sums, the objective's
        prepared metrics, and mismatch statistics of the training pass. Means of the pass are over the tokens that ran
        through the model. The loss is divided by num_tokens; prepared metrics are means over all sampled tokens, with
        or without `trained`.

        A pass whose loss or gradient is not finite is repeated once from the same state, and the two are compared
        (gradient_retries). Raises NonFiniteError before any parameter or optimizer state is changed, and ValueError if
        the objective needs the step scored but `scored` is None.
        """
        num_tokens = batch.num_sampled_tokens
        if num_tokens == 0:
            raise ValueError(f"batch {batch.index} has no response tokens to train on")
        given = by_token(batch, advantages).to(self.device)
        prepared, inputs = self._prepare(batch, given, scored, old_logprobs)
        rows = TokenRows.of_batch(batch)
        plan = plan_micro_batches(
            rows, micro_batch_tokens=self.section.micro_batch_tokens, split=self.split, chosen=trained
        )
        self._warm_up(plan, int(rows.offsets[-1]))

        found = self._pass(rows, plan, inputs, num_tokens, prepared.step_ess)
        if retries := not found.is_finite:  # all ranks agree; weights and optimizer are unchanged
            first, found = found, self._pass(rows, plan, inputs, num_tokens, prepared.step_ess)
            _compare(first, found, batch.index)

        # In a second update on a batch the policy is newer than the batch's version: tokens count as one version older.
        later_update, self._measured = self._measured == (batch.index, self.step - 1), (batch.index, self.step)
        gathered, looked = found.gathered, None
        seen = torch.from_numpy(batch.loss_mask).to(self.device)
        if trained is not None:
            looked = torch.from_numpy(np.repeat(trained, batch.response_lengths)).to(self.device)
            seen = seen & looked
        tokens = StepTokens(
            learner_logprobs=gathered.logprobs,
            rollout_logprobs=inputs.rollout_logprobs,
            seen=seen,
            advantages=given,
            entropy=gathered.entropy,
            age=torch.from_numpy(batch.index + int(later_update) - batch.policy_version).to(self.device),
            place=torch.from_numpy(batch.places).to(self.device),
            offsets=torch.from_numpy(batch.episode_offsets).to(self.device),
        )
        try:
            mismatch = Mismatch.of_step(tokens, self._ranks)
        except FloatingPointError as error:
            raise NonFiniteError(f"batch {batch.index}: {error}") from error

        lr = lr_factor * self.rates.at(batch.index, self.step)
        take_step(self.optimizer, self.section.optimizer, lr, found.grad_norm)
        if self._chunks[0].ddp_config.overlap_param_gather:
            self._gathered = False
            for chunk in self._chunks:
                chunk.zero_grad_buffer()  # it also marks the parameters as not gathered
        weights_changed(self.emulation)
        self.step += 1

        logprobs, num_seen = gathered.logprobs, int(seen.sum())  # the tokens that the objective's sums are over
        if looked is not None:
            rest = torch.nan if scored is None else scored
            logprobs = torch.where(looked, logprobs, torch.as_tensor(rest, device=self.device))
        metrics = mismatch.statistics()
        metrics["loss"] = found.loss
        metrics["entropy"] = gathered.entropy[seen].double().mean().item()
        metrics["num_tokens"] = float(num_tokens)
        for name in self._runner.names:
            metrics[name] = gathered.sums[name].item() / num_seen
        metrics |= {"grad_norm": found.grad_norm, "lr": lr, "padding_share": plan.padding_share, **prepared.measured}
        metrics["gradient_retries"] = float(retries)
        if found.replayed is not None:
            metrics |= asdict(found.replayed)
        return Update(
            metrics=metrics,
            histogram=mismatch.group().histogram.tolist(),
            mismatch=mismatch,
            device_logprobs=logprobs,
        )

    def begin_save(self, directory: Path) -> ShardSave:
        """Begin writing model, optimizer, step and RNG state, as they are now, into an empty directory while training
        continues. No commit marker is written: that is the caller's task. Only one save may be under way."""
        return training_state.begin_save(
            directory,
            self.model,
            self.optimizer,
            step=self.step,
            layout=self.layout,
            gather=self.gather,
            memory=self._save_memory,
        )

    def save(self, directory: Path) -> None:
        """Save as `begin_save` does, and wait for the end."""
        under_way = self.begin_save(directory)
        while not under_way.advance(_LOOK_S):
            pass

    def load(self, directory: Path) -> None:
        """Restore a save of any layout. Raises CorruptCheckpointError."""
        self.step = training_state.load(directory, self.model, self.optimizer, layout=self.layout)
        weights_changed(self.emulation)
        self._warm_ups = warm_up_passes(self.section.precision)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every HF tensor by name, in the learner's precision. Collective: every rank must exhaust it."""
        return export_hf(self.model, self.model_config)

    def export(
        self, directory: Path, fence: Callable[[], None] = unfenced, beside: Callable[[Path], None] | None = None
    ) -> None:
        """Write a full-precision HF folder: safetensors, config, tokenizer, manifest.json. `beside` is as in
        `write_policy`. `fence` is called before the folder is named; it raises if this process may not write anymore.
        """
        export_policy(self.named_weights(), self.model_folder, directory, self, beside=beside, fence=fence)

    def barrier(self) -> None:
        """Wait for every rank, at most learner.step_deadline_s."""
        dist.barrier()

    @contextmanager
    def _as_rollouts(self, rows: TokenRows, plan: Plan, *, recomputes: bool = False) -> Iterator[ExpertReplay | None]:
        """Run one pass of `plan` over `rows` with the rollout's formats emulated and its experts replayed, where there
        are any. `recomputes`: every router routes again in backward passes. Collective: at the end all ranks check the
        replay. Raises ExpertReplayError if the experts are another model's or were not replayed exactly once."""
        if self.emulation is not None:
            _ = self.model  # the emulation rounds whole weights before the pass
        with nullcontext() if self.emulation is None else self.emulation.applied():
            if rows.experts is None:
                yield None
                return
            replay = ExpertReplay(
                self._routers,
                rows.experts,
                self.model_config,
                recomputes=recomputes,
                sequence_parallel=self.layout.sequence,
                device=self.device,
            )
            try:
                yield replay
                replay.finish(rows, plan)
            finally:
                replay.close()

    def _prepare(
        self, batch: Batch, given: Tensor, scored: Scores, old_logprobs: Scores
    ) -> tuple[Prepared, TokenBatch]:
        """Prepare the objective for the whole step from the advantages of tokens `given` [responses], and return the
        passes' flat inputs too; the same on every rank."""
        device = self.device
        rollout = torch.as_tensor(batch.rollout_logprobs, device=device)
        sampled = torch.as_tensor(batch.loss_mask, device=device)
        present = old_logprobs if scored is None and not self._objective.facts.reads_step_logprobs else scored
        if not self._objective.facts.needs_scoring:
            prepared = Prepared(advantages=given)
        elif present is None:
            raise ValueError("the objective needs the step scored: pass what score(batch) returned")
        else:
            old = present if old_logprobs is None else old_logprobs
            step = ScoredStep(
                logprobs=torch.as_tensor(present, device=device),
                rollout_logprobs=rollout,
                old_logprobs=torch.as_tensor(old, device=device),
                advantages=given,
                sampled=sampled,
                offsets=torch.as_tensor(batch.episode_offsets, device=device),
            )
            try:
                prepared = self._objective.prepare(step)
            except FloatingPointError as error:
                raise NonFiniteError(f"batch {batch.index}: {error}") from error
        reference = batch.reference_logprobs
        return prepared, TokenBatch(
            rollout_logprobs=rollout,
            advantages=prepared.advantages,
            mask=sampled,
            anchor_logprobs=prepared.anchor_logprobs,
            reference_logprobs=None if reference is None else torch.as_tensor(reference, device=device),
        )

    def _pass(
        self, rows: TokenRows, plan: Plan, inputs: TokenBatch, num_tokens: int, step_ess: float | None
    ) -> TrainingPass:
        """Make one training pass. All ranks agree on whether its result is finite, so all continue alike."""
        config = self._chunks[0].config
        whole, some = config.recompute_granularity == "full", config.recompute_granularity == "selective"
        routes_again = whole or (some and "moe" in config.recompute_modules)
        with self._as_rollouts(rows, plan, recomputes=routes_again) as replay:
            gathered = passes.train(
                self._chunks,
                plan,
                inputs,
                self._runner,
                num_tokens=num_tokens,
                step_ess=step_ess,
                device=self.device,
                replay=replay,
            )
        self.optimizer.prepare_grads()
        loss, grad_norm = gathered.sums["loss"].item(), float(self.optimizer.get_grad_norm())
        failed = bool(gathered.sums["failed"].item())
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm) and finite_beside_norm(self.optimizer)
        worst = torch.tensor([0.0 if is_finite and not failed else 1.0], device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return TrainingPass(
            gathered=gathered,
            replayed=None if replay is None else replay.found,
            loss=loss,
            grad_norm=grad_norm,
            failed=failed,
            is_finite=not worst.item(),
        )


@dataclass(frozen=True, kw_only=True)
class TrainingPass:
    """The result of one training pass over a batch; the gradients are in the optimizer."""

    gathered: passes.Gathered
    replayed: Replayed | None
    loss: float
    grad_norm: float
    """L2 norm over all parameters of all ranks."""
    failed: bool
    """Whether the objective refused a micro-batch."""
    is_finite: bool
    """Whether the loss and the gradient are finite on every rank."""

    def __str__(self) -> str:
        refused = ", and the objective refused a micro-batch" if self.failed else ""
        seen = self.is_finite or self.failed or not math.isfinite(self.loss) or not math.isfinite(self.grad_norm)
        alone = "" if seen else ", but a gradient is not finite on one rank alone"
        return f"loss is {self.loss:g} and the gradient norm {self.grad_norm:g}{refused}{alone}"


def _compare(first: TrainingPass, second: TrainingPass, batch: int) -> None:
    """Log how the second pass over a batch differs from the first, which was not finite. Raises NonFiniteError, on
    every rank, if the second is not finite either."""
    if second.is_finite:
        _log.warning(
            "batch %d: %s the first time, %s the second, from the same weights and tokens: the step is taken from "
            "the second. Hardware that computes otherwise from one time to the next does this; look at the errors "
            "of the GPUs and the memory of this learner's hosts",
            *(batch, first, second),
        )
        return
    alike = str(second) == str(first)
    same = "as it was the first time: this is no fault of the hardware" if alike else f"first {first}"
    raise NonFiniteError(
        f"batch {batch}: {second}, {same}; no step was taken. A log-probability is not finite, or a ratio above "
        f"e^{MAX_LOG_RATIO:g}: look at the batch's rollout_logprobs and lower learner.optimizer.lr"
    )


def by_token(batch: Batch, advantages: NDArray[np.float32]) -> Tensor:
    """Return one advantage a token, float32 [responses], from one a sample or a token, or raise ValueError."""
    if len(advantages) == batch.num_samples:
        advantages = np.repeat(advantages, batch.response_lengths)
    elif len(advantages) != batch.num_response_tokens:
        raise ValueError(
            f"{len(advantages)} advantages for {batch.num_samples} samples and {batch.num_response_tokens} "
            "response tokens; give one for each sample or one for each token"
        )
    return torch.from_numpy(np.asarray(advantages, np.float32))


def _sum(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values
