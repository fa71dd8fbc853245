"""Log-probabilities and entropies of tokens from vocabulary-parallel logits.

With logits z [sequence, batch, vocab/tp] and temperature T, for the token t of a position:

    log p(t) = z_t / T - logsumexp(z / T)              H = logsumexp(z / T) - sum_v p(v) z_v / T
    d log p(t) / d z_v = ([v = t] - p(v)) / T

A back end reads this rank's slice of the vocabulary once and sums it up for each row; two small all-reduces over the
tensor parallel group make that the statistics of the whole row:

    peak     max z / T                       sums[0]  Σ exp(z / T - peak)
    sums[1]  z_t / T - peak, 0 elsewhere     sums[2]  Σ exp(z / T - peak) (z / T - peak)

Back ends: `logprobs_triton` on a GPU, `logprobs_torch` on a CPU and for float64. Where an engine's top-p or top-k cut
the distribution, `logprobs_kept` on either: all sums, and with them p and H, then run over the tokens that were kept,
so that p is the probability with which such a sampler draws. A logit of -inf is a token that
cannot be sampled; a row of nothing else has no distribution, and its results are NaN. NaN and +inf among the logits of
a row make its results NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.model import logprobs_kept, logprobs_torch
from megatron_bridge.model.logprobs_kept import KeptRows


def vocab_parallel_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None,
    overwrite_logits: bool = False,
    kept: KeptRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `tokens` and entropy of the distribution, both [sequence, batch], natural log.

    `logits` [sequence, batch, vocab/tp] is this rank's slice of the vocabulary, `tokens` int64 [sequence, batch] holds
    global ids; results are float32 (float64 for float64 logits) and the same on every rank of `group` (None: one rank).
    The entropy carries no gradient. With `overwrite_logits` the backward pass writes the gradient over the logits: only
    for logits that nothing else reads. (Autograd refuses a second backward pass.)

    With `kept`, one set for each of the sequence × batch rows and the row's token in it, both are of the distribution
    renormalized over the set; 0, without a gradient, where the set is empty.
    """
    logprobs, entropy = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits, tokens, temperature, group, overwrite_logits, kept
    )
    return logprobs, entropy


def rebase(peak: Tensor, sums: Tensor, top: Tensor, here: Tensor) -> Tensor:
    """`sums` [3, rows] of a slice with `peak` [rows], as if its peak had been `top` >= peak.

    `here` [rows] says whose token the slice holds. With d = peak - top, exp(z - top) is exp(d) exp(z - peak), and
    z - top is d + (z - peak). Slices of one row that are rebased onto their highest peak may be added.
    """
    drop = peak - top
    keep = drop.exp()
    token = torch.where(here, sums[1] + drop, 0)
    return torch.stack((keep * sums[0], token, keep * (sums[2] + drop * sums[0])))


@dataclass(frozen=True)
class _Saved:
    temperature: float
    first_token: int
    overwrite: bool
    kept: KeptRows | None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        overwrite: bool,
        kept: KeptRows | None,
    ) -> tuple[Tensor, Tensor]:
        vocab = logits.shape[-1]
        first = 0 if group is None else dist.get_rank(group) * vocab
        rows, wanted = _rows(logits), tokens.reshape(-1) - first
        if kept is None:
            peak, sums = _back_end(logits).statistics(rows, wanted, temperature)
        else:
            peak, sums = logprobs_kept.statistics(rows, wanted, temperature, kept, first)
        if group is not None and dist.get_world_size(group) > 1:
            top = peak.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            sums = rebase(peak, sums, top, logprobs_torch.is_local(wanted, vocab))
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
            peak = top
        log_sum = sums[0].log()
        logprobs, entropy = sums[1] - log_sum, log_sum - sums[2] / sums[0]
        if kept is not None:
            logprobs, entropy = (torch.where(kept.counts > 0, values, 0) for values in (logprobs, entropy))
        ctx.save_for_backward(logits, tokens, peak + log_sum)
        ctx.settings = _Saved(temperature, first, overwrite, kept)
        entropy = entropy.view(tokens.shape)
        ctx.mark_non_differentiable(entropy)
        return logprobs.view(tokens.shape), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, tokens, normalizer = ctx.saved_tensors
        settings: _Saved = ctx.settings
        rows, wanted = _rows(logits), tokens.reshape(-1) - settings.first_token
        target = rows if settings.overwrite else torch.empty_like(rows, memory_format=torch.contiguous_format)
        scale = (grads[0] / settings.temperature).reshape(-1)
        arguments = (rows, wanted, normalizer, scale, settings.temperature, target)
        if settings.kept is None:
            _back_end(logits).write_gradient(*arguments)
        else:
            logprobs_kept.write_gradient(*arguments, settings.kept, settings.first_token)
        return target.view_as(logits), None, None, None, None, None


def _rows(logits: Tensor) -> Tensor:
    """[tokens, vocab/tp], the logits themselves wherever strides allow, adjacent within a row."""
    rows = logits.detach().reshape(-1, logits.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _back_end(logits: Tensor) -> ModuleType:
    if not logits.is_cuda or logits.dtype is torch.float64:
        return logprobs_torch
    from megatron_bridge.model import logprobs_triton  # only where there is Triton

    return logprobs_triton
