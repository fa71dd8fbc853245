"""Log-probabilities and entropies of tokens from vocabulary-parallel logits.

With logits z [sequence, batch, vocab/tp] and temperature T, for the token t of a position:

    log p(t) = z_t / T - logsumexp(z / T)              H = logsumexp(z / T) - sum_v p(v) z_v / T
    d log p(t) / d z_v = ([v = t] - p(v)) / T

Rows are worked through in chunks, so that beside the logits themselves only one chunk ever exists in full precision;
two all-reduces over the tensor parallel group serve all chunks together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22
"""Elements of a chunk in full precision: 16 MiB of float32."""


def vocab_parallel_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `tokens` and entropy of the distribution, both [sequence, batch], natural log.

    `logits` [sequence, batch, vocab/tp] is this rank's slice of the vocabulary, `tokens` int64 [sequence, batch] holds
    global ids; results are float32 (float64 for float64 logits) and the same on every rank of `group` (None: one rank).
    The entropy carries no gradient. With `overwrite_logits` the backward pass writes the gradient over the logits: only
    for logits that nothing else reads. (Autograd refuses a second backward pass.)
    """
    logprobs, entropy = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits, tokens, temperature, group, overwrite_logits
    )
    return logprobs, entropy


@dataclass(frozen=True)
class _Saved:
    temperature: float
    first_token: int
    overwrite: bool


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, group: dist.ProcessGroup | None, overwrite: bool
    ) -> tuple[Tensor, Tensor]:
        vocab = logits.shape[-1]
        first = 0 if group is None else dist.get_rank(group) * vocab
        rows, wanted = logits.reshape(-1, vocab), tokens.reshape(-1) - first
        peak = rows.amax(-1).to(_full(logits)) / temperature
        _all_reduce(peak, dist.ReduceOp.MAX, group)
        sums = peak.new_zeros(3, len(rows))  # sum of exp, shifted logit of the token, sum of exp × shifted logit
        for part in _chunks(len(rows), vocab):
            shifted = _copied(rows[part]).div_(temperature).sub_(peak[part, None])
            sums[1, part] = _pick(shifted, wanted[part])
            weight = shifted.exp()
            sums[0, part] = weight.sum(-1)
            sums[2, part] = weight.mul_(shifted).sum(-1)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_sum = sums[0].log()
        entropy = (log_sum - sums[2] / sums[0]).view(tokens.shape)
        ctx.save_for_backward(logits, tokens, peak + log_sum)
        ctx.settings = _Saved(temperature, first, overwrite)
        ctx.mark_non_differentiable(entropy)
        return (sums[1] - log_sum).view(tokens.shape), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, tokens, normaliser = ctx.saved_tensors
        settings: _Saved = ctx.settings
        vocab = logits.shape[-1]
        rows, wanted = logits.detach().reshape(-1, vocab), tokens.reshape(-1) - settings.first_token
        target = rows if settings.overwrite else torch.empty_like(rows)
        scale = (grads[0] / settings.temperature).reshape(-1)
        for part in _chunks(len(rows), vocab):
            probability = _copied(rows[part]).div_(settings.temperature).sub_(normaliser[part, None]).exp_()
            gradient = probability.mul_(-scale[part, None])
            here = _local(wanted[part], vocab)
            gradient.scatter_add_(
                1, wanted[part].clamp(0, vocab - 1)[:, None], torch.where(here, scale[part], 0)[:, None]
            )
            target[part] = gradient.to(rows.dtype)
        return target.view_as(logits), None, None, None, None


def _full(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _copied(rows: Tensor) -> Tensor:
    return rows.to(_full(rows), copy=True)


def _local(wanted: Tensor, vocab: int) -> Tensor:
    return (wanted >= 0) & (wanted < vocab)


def _pick(shifted: Tensor, wanted: Tensor) -> Tensor:
    """[rows] the shifted logit of the wanted token, 0 where another rank holds it."""
    vocab = shifted.shape[-1]
    picked = shifted.gather(1, wanted.clamp(0, vocab - 1)[:, None])[:, 0]
    return torch.where(_local(wanted, vocab), picked, 0)


def _chunks(num_rows: int, vocab: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // vocab)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _all_reduce(tensor: Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=operation, group=group)
