"""Run forward and forward-backward passes over a plan's micro-batches, under Megatron's pipeline schedules.

Per-token results exist on the last pipeline stage, each on one data parallel rank. `Gathered` brings them to every rank
in the batch's flat order. Exactly one rank writes each place, so a sum over ranks gathers without rounding, and
statistics of the results are the same on every rank, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.model.packed_attention import PackedRows
from megatron_bridge.step.expert_replay import ExpertReplay
from megatron_bridge.step.micro_batches import MicroBatch, Plan
from precision.objectives.objective import Objective, StepContext, TokenBatch
from precision.ratios import deferred_checks


class Gathered:
    """The results of a pass, the same on every rank once `share` has run."""

    def __init__(self, num_predicted: int, device: torch.device | str, names: Iterable[str] = ()) -> None:
        """Allocate zeros for `num_predicted` tokens and for the sums called `names`."""
        self.logprobs = torch.zeros(num_predicted, device=device)
        """float32 [predicted], nats."""
        self.entropy = torch.zeros(num_predicted, device=device)
        """float32 [predicted], nats."""
        self.sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in sorted(names)}
        """float64 scalars, summed over micro-batches and ranks."""

    def take(self, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> None:
        """Store the results of one micro-batch's predicted tokens."""
        for gathered, values in ((self.logprobs, logprobs.detach()), (self.entropy, entropy)):
            found = values[0].index_select(0, micro_batch.columns)
            gathered.index_copy_(0, micro_batch.index, found.to(gathered.dtype))

    def share(self) -> None:
        """Sum over data parallel ranks, then broadcast from the last pipeline stage to all stages."""
        tensors = [self.logprobs, self.entropy]
        if self.sums:
            tensors.append(torch.stack(list(self.sums.values())))
        stages = parallel_state.get_pipeline_model_parallel_group()
        for tensor in tensors:
            dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            if dist.get_world_size(stages) > 1:
                dist.broadcast(tensor, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=stages)
        if self.sums:
            self.sums = dict(zip(self.sums, tensors[-1], strict=True))


@torch.no_grad()
def score(
    model: Sequence[Any],
    plan: Plan,
    num_predicted: int,
    device: torch.device | str,
    replay: ExpertReplay | None = None,
) -> Gathered:
    """Compute log-probabilities and entropies of the predicted tokens at the present weights, with the engine's experts
    where `replay` has them. In evaluation mode, because nothing is recomputed: otherwise, under delayed scaling,
    Transformer Engine would keep scales for a backward pass that never comes, and use them up in another pass's."""
    gathered = Gathered(num_predicted, device)

    def collect(micro_batch: MicroBatch, output: tuple[Tensor, Tensor], *, non_loss_data: bool) -> None:
        assert non_loss_data  # Megatron passes it when it only collects results
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
    """Run forward and backward to fill the history of FP8 scales; the gradients are not used."""

    def mean(micro_batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        loss = output[0][0].index_select(0, micro_batch.columns).sum() / max(1, num_predicted)
        return loss, torch.zeros((), dtype=torch.int, device=device), {}

    _run(model, plan, mean, device, forward_only=False)


class ObjectiveRunner:
    """An objective whose failure on one rank leaves that rank in step with the others."""

    def __init__(self, objective: Objective, device: torch.device | str) -> None:
        self._objective = objective
        self._reductions: list[Tensor] = []
        """NaN in the shape of each sum over ranks that the objective makes for a micro-batch."""

        def remember(sums: Tensor) -> Tensor:
            self._reductions.append(torch.full_like(sums, torch.nan))
            return sums

        none = torch.zeros(1, 1, device=device)
        batch = TokenBatch(
            rollout_logprobs=none, advantages=none, mask=none.bool(), anchor_logprobs=none, reference_logprobs=none
        )
        context = StepContext(num_tokens=1, step_ess=1.0, sum_over_ranks=remember)
        _, sums = objective.loss(none.clone().requires_grad_(), batch, context)
        self.names = sorted(sums)
        """Names of the objective's sums, known on every pipeline stage."""

    def __call__(
        self, logprobs: Tensor, batch: TokenBatch, num_tokens: int, step_ess: float | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor] | None:
        """Return (loss, sums, whether a number that the objective met was not usable), or None if it raised so. The
        host does not wait for the answer: numbers that are not usable spoil the loss and the gradients."""
        pending = list(self._reductions)

        def sum_over_ranks(sums: Tensor) -> Tensor:
            if pending:
                pending.pop(0)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            return sums

        context = StepContext(num_tokens=num_tokens, step_ess=step_ess, sum_over_ranks=sum_over_ranks)
        try:
            with deferred_checks() as checks:
                loss, found = self._objective.loss(logprobs, batch, context)
            usable = torch.stack(checks).all() if checks else torch.ones((), dtype=torch.bool, device=loss.device)
            return loss, found, ~usable
        except FloatingPointError:
            for sums in list(pending):  # the other ranks wait in these reductions; NaN reports the failure
                sum_over_ranks(sums.clone())
            return None


def train(
    model: Sequence[Any],
    plan: Plan,
    inputs: TokenBatch,
    objective: ObjectiveRunner,
    *,
    num_tokens: int,
    step_ess: float | None,
    device: torch.device | str,
    replay: ExpertReplay | None = None,
) -> Gathered:
    """Run forward and backward over the plan; gradients end up reduced in Megatron's buffers. The fields of `inputs`
    are flat, [predicted]; its `mask` is False for tokens that no engine sampled. `sums["failed"]` is above 0 if the
    objective failed on a micro-batch: the gradients are then useless."""
    gathered = Gathered(len(inputs.advantages), device, ["loss", "failed", *objective.names])

    def loss_function(micro_batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        logprobs, entropy = output
        gathered.take(micro_batch, logprobs, entropy)
        anchor, reference = inputs.anchor_logprobs, inputs.reference_logprobs
        batch = TokenBatch(
            rollout_logprobs=micro_batch.scatter(inputs.rollout_logprobs),
            advantages=micro_batch.scatter(inputs.advantages),
            mask=micro_batch.scatter(inputs.mask),
            anchor_logprobs=None if anchor is None else micro_batch.scatter(anchor),
            reference_logprobs=None if reference is None else micro_batch.scatter(reference),
        )
        result = objective(logprobs, batch, num_tokens, step_ess)
        if result is None:
            gathered.sums["failed"] += 1
            loss = (logprobs * 0.0).sum()
        else:
            loss, sums, failed = result
            gathered.sums["failed"] += failed
            gathered.sums["loss"] += loss.detach()
            for name in objective.names:
                gathered.sums[name] += sums[name]
        # With 0 tokens, Megatron does not divide by their number: the objective has already done so.
        return loss, torch.zeros((), dtype=torch.int, device=device), {}

    _run(model, plan, loss_function, device, forward_only=False, replay=replay)
    gathered.share()
    return gathered


def packed_rows(on_host: MicroBatch, on_device: MicroBatch, config: TransformerConfig) -> PackedRows:
    """Return the rows of a micro-batch as Megatron-Core's layers take them. Transformer Engine's kernels read the row
    ends on the device; Megatron's own layers need them as numbers, so theirs stay on the host."""
    ends, longest = on_host.row_ends, int(on_host.row_ends.diff().max())
    if config.transformer_impl == "transformer_engine":
        ends = on_device.row_ends
        # Four lengths an octave, so that rotations are found in Megatron's cache of 32. Its own layers would take
        # `longest` equal to all tokens as rotations of one row.
        step = 1 << max(7, (longest - 1).bit_length() - 3)
        longest = -(-longest // step) * step
    if config.cuda_graph_impl != "none":  # a graph holds one number
        longest = int(on_host.row_ends[-1])
    return PackedRows(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
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
    if not forward_only:
        for chunk in model:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.grad = None  # without the distributed optimizer it is still the last step's buffer

    def forward_step(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        on_host = next(batches)
        micro_batch = on_host.to(device)
        chunk.module.kept = micro_batch.kept  # read in the chunk call below, so no other micro-batch can come between
        with replay.forward(chunk, on_host) if replay else nullcontext():
            output = chunk(
                micro_batch.tokens,
                None,  # positions, which rotations take from the rows
                None,
                labels=micro_batch.labels,
                packed_seq_params=packed_rows(on_host, micro_batch, chunk.config),
            )
        return output, partial(on_output, micro_batch)

    get_forward_backward_func()(
        forward_step_func=forward_step,
        # Every virtual stage reads the same micro-batches; the interleaved schedule takes a list of iterators.
        data_iterator=list(map(iter, [plan.micro_batches] * len(model))),
        model=list(model),
        num_microbatches=len(plan.micro_batches),
        seq_length=int(plan.micro_batches[0].row_ends[-1]),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
