"""Forward and forward-backward passes over the micro-batches of a plan, under Megatron's pipeline schedules.

Per-token results exist on the last pipeline stage, each on one data parallel rank. `Gathered` brings them to every rank
in the batch's flat order: each place is written by exactly one rank, so a sum over ranks gathers without rounding, and
every statistic computed from them is the same on every rank, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_bridge.step.expert_replay import ExpertReplay
from megatron_bridge.step.micro_batches import MicroBatch, Plan
from precision.objectives.base import Objective, StepContext, TokenBatch

_SUMS = ("loss", "failed")


@dataclass(kw_only=True)
class Gathered:
    """What a pass yields, the same on every rank once `share` has run."""

    logprobs: Tensor
    """float32 [predicted], natural log."""
    entropy: Tensor
    """float32 [predicted], nats."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """float64 scalars that add up over micro-batches and ranks."""
    replay: ExpertReplay | None = None
    """Of the pass; what it found is there once the pass has been checked (expert_replay.replaying)."""

    @staticmethod
    def empty(num_predicted: int, device: torch.device | str, names: Sequence[str] = ()) -> Gathered:
        return Gathered(
            logprobs=torch.zeros(num_predicted, device=device),
            entropy=torch.zeros(num_predicted, device=device),
            sums={name: torch.zeros((), dtype=torch.float64, device=device) for name in names},
        )

    def take(self, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> None:
        """Keep the predicted tokens of one micro-batch."""
        micro_batch.gather_into(self.logprobs, logprobs.detach())
        micro_batch.gather_into(self.entropy, entropy)

    def share(self) -> None:
        """Sum over data parallel ranks, then hand from the last pipeline stage to all stages."""
        names = sorted(self.sums)
        scalars = torch.stack([self.sums[name] for name in names]) if names else None
        for tensor in (self.logprobs, self.entropy, scalars):
            if tensor is not None:
                _share(tensor)
        if scalars is not None:
            self.sums = dict(zip(names, scalars, strict=True))


def _share(tensor: Tensor) -> None:
    dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    group = parallel_state.get_pipeline_model_parallel_group()
    if dist.get_world_size(group) > 1:
        dist.broadcast(tensor, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)


@torch.no_grad()
def score(
    model: Sequence[Any],
    plan: Plan,
    num_predicted: int,
    device: torch.device | str,
    replay: ExpertReplay | None = None,
) -> Gathered:
    """Log-probabilities and entropies of the predicted tokens at the present weights, with the engine's experts where
    `replay` has them.

    In evaluation mode: there is nothing to compute again, and under delayed scaling Transformer Engine would keep the
    scales of layers to be computed again for a backward pass that never comes, and use them up in that of another.
    """
    gathered = Gathered.empty(num_predicted, device)
    gathered.replay = replay

    def collect(micro_batch: MicroBatch, output: tuple[Tensor, Tensor], *, non_loss_data: bool) -> None:
        assert non_loss_data  # how Megatron calls it when only results are collected
        gathered.take(micro_batch, *output)

    for chunk in model:
        chunk.eval()
    try:
        _run(model, plan, collect, device, forward_only=True, replay=replay)
    finally:
        for chunk in model:
            chunk.train()
    gathered.share()
    return gathered


def warm_up(model: Sequence[Any], plan: Plan, num_predicted: int, device: torch.device | str) -> None:
    """Forward and backward over the plan for what they leave behind in FP8 scales; gradients are of no use."""

    def mean(micro_batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        loss = torch.where(micro_batch.mask, output[0], 0.0).sum() / max(1, num_predicted)
        return loss, torch.zeros((), dtype=torch.int, device=device), {}

    _prepare_gradients(model)
    _run(model, plan, mean, device, forward_only=False)


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """Per predicted token, flat."""

    rollout_logprobs: Tensor
    """float32 [predicted]"""
    advantages: Tensor
    """float32 [predicted]"""
    sampled: Tensor
    """bool [predicted]; False on tokens that no engine sampled."""
    anchor_logprobs: Tensor | None = None
    """float32 [predicted]"""
    reference_logprobs: Tensor | None = None
    """float32 [predicted]"""


class ObjectiveRunner:
    """Calls an objective so that a rank on which it fails stays in step with the others."""

    def __init__(self, objective: Objective, device: torch.device | str) -> None:
        self._objective = objective
        self._reductions: list[Tensor] = []
        nothing = torch.zeros(1, 1, device=device)
        batch = TokenBatch(rollout_logprobs=nothing, advantages=nothing, mask=nothing.bool(), anchor_logprobs=nothing)
        batch = replace(batch, reference_logprobs=nothing)
        context = StepContext(num_tokens=1, step_ess=1.0, sum_over_ranks=self._remember)
        _, sums = objective.loss(nothing.clone().requires_grad_(), batch, context)
        self.names = sorted(sums)
        """Of the sums that the objective reports; every pipeline stage knows them."""

    def _remember(self, sums: Tensor) -> Tensor:
        self._reductions.append(torch.full_like(sums, torch.nan))
        return sums

    def __call__(
        self, logprobs: Tensor, batch: TokenBatch, num_tokens: int, step_ess: float | None
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """(loss, sums), or None when the objective met a number that is not finite."""
        pending = list(self._reductions)

        def sum_over_ranks(sums: Tensor) -> Tensor:
            if pending:
                pending.pop(0)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            return sums

        context = StepContext(num_tokens=num_tokens, step_ess=step_ess, sum_over_ranks=sum_over_ranks)
        try:
            return self._objective.loss(logprobs, batch, context)
        except FloatingPointError:
            for sums in list(pending):  # the other ranks wait for these; NaN tells them
                sum_over_ranks(sums.clone())
            return None


def train(
    model: Sequence[Any],
    plan: Plan,
    inputs: TrainingInputs,
    objective: ObjectiveRunner,
    *,
    num_tokens: int,
    step_ess: float | None,
    device: torch.device | str,
    replay: ExpertReplay | None = None,
) -> Gathered:
    """Forward and backward over the plan; gradients end up reduced in Megatron's buffers.

    `sums["failed"]` is above 0 when the objective failed on some micro-batch: the gradients are then of no use.
    """
    gathered = Gathered.empty(len(inputs.advantages), device, [*_SUMS, *objective.names])

    def loss_function(micro_batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        logprobs, entropy = output
        gathered.take(micro_batch, logprobs, entropy)
        batch = TokenBatch(
            rollout_logprobs=micro_batch.scatter(inputs.rollout_logprobs),
            advantages=micro_batch.scatter(inputs.advantages),
            mask=micro_batch.scatter(inputs.sampled).bool(),
            anchor_logprobs=_scattered(micro_batch, inputs.anchor_logprobs),
            reference_logprobs=_scattered(micro_batch, inputs.reference_logprobs),
        )
        result = objective(logprobs, batch, num_tokens, step_ess)
        if result is None:
            gathered.sums["failed"] += 1
            loss = (logprobs * 0.0).sum()
        else:
            loss, sums = result
            gathered.sums["loss"] += loss.detach()
            for name in objective.names:
                gathered.sums[name] += sums[name]
        # 0 tokens: Megatron would divide by their number, but the objective has already done so.
        return loss, torch.zeros((), dtype=torch.int, device=device), {}

    _prepare_gradients(model)
    _run(model, plan, loss_function, device, forward_only=False, replay=replay)
    gathered.share()
    return gathered


def _scattered(micro_batch: MicroBatch, values: Tensor | None) -> Tensor | None:
    return None if values is None else micro_batch.scatter(values)


def _prepare_gradients(model: Sequence[Any]) -> None:
    for chunk in model:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.grad = None  # without the distributed optimizer it is last step's buffer under another name


def packed_rows(micro_batch: MicroBatch, device: torch.device | str = "cpu") -> PackedSeqParams:
    """Where the rows of a micro-batch on the host begin and end, as Megatron-Core takes it."""
    ends = micro_batch.row_ends.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=micro_batch.longest,
        max_seqlen_kv=micro_batch.longest,
    )


def _run(
    model: Sequence[Any],
    plan: Plan,
    on_output: Callable[..., Any],
    device: torch.device | str,
    *,
    forward_only: bool,
    replay: ExpertReplay | None = None,
) -> None:
    def forward_step(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        on_host = next(batches)
        micro_batch = on_host.to(device)
        chunk.module.kept = micro_batch.kept  # read in this very call, whatever the schedule runs next
        with replay.forward(chunk, on_host) if replay else nullcontext():
            output = chunk(
                micro_batch.tokens,
                micro_batch.positions,
                None,
                labels=micro_batch.labels,
                packed_seq_params=packed_rows(on_host, device),
            )
        return output, partial(on_output, micro_batch)

    get_forward_backward_func()(
        forward_step_func=forward_step,
        # Every virtual stage reads the same micro-batches; a list is how the interleaved schedule takes them.
        data_iterator=[iter(plan.micro_batches) for _ in model],
        model=list(model),
        num_microbatches=len(plan.micro_batches),
        seq_length=int(plan.micro_batches[0].row_ends[-1]),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
