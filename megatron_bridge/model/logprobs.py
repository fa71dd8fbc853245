"""Compute log-probabilities and entropies of tokens from vocabulary-parallel logits.

With logits z [sequence, batch, vocab/tp] and temperature T, for the token t of a position:

    log p(t) = z_t / T - logsumexp(z / T)              H = logsumexp(z / T) - sum_v p(v) z_v / T
    d log p(t) / d z_v = ([v = t] - p(v)) / T

A back end reads this rank's slice of the vocabulary once and computes statistics of each row's slice; two small
all-reduces over the tensor parallel group combine them into the whole row's:

    peak     max z / T                       sums[0]  Σ exp(z / T - peak)
    sums[1]  z_t / T - peak, 0 elsewhere     sums[2]  Σ exp(z / T - peak) (z / T - peak)

Back ends: `logprobs_triton` on a GPU, this module's `statistics` on a CPU, for float64 and where Triton is missing. If
an engine's top-p or top-k cut the distribution, `kept_statistics` on either: all sums, and with them p and H, then
cover only the kept tokens, so p is the probability with which the engine draws. A logit of -inf is a token that cannot
be sampled; a row of only -inf, or with NaN or +inf, has NaN as its results.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data.batch import KeptSets
from precision.text import one_line

_log = logging.getLogger(__name__)


def vocab_parallel_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None,
    overwrite_logits: bool = False,
    kept: KeptRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the natural log-probabilities of `tokens` and the distributions' entropies, both [sequence, batch].

    `logits` [sequence, batch, vocab/tp] is this rank's slice of the vocabulary, `tokens` int64 [sequence, batch] holds
    global ids. Results are float32 (float64 for float64 logits), the same on every rank of `group` (None: one rank).
    The entropy has no gradient. With `overwrite_logits` the backward pass writes the gradient over the logits, which
    nothing else may read. (Autograd refuses a second backward pass.)

    With `kept`, one set for each of the sequence × batch rows and containing the row's token, both results are of the
    distribution renormalized over the set; 0, without a gradient, for an empty set.
    """
    logprobs, entropy = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits, tokens, temperature, group, overwrite_logits, kept
    )
    return logprobs, entropy


def rebase(peak: Tensor, sums: Tensor, top: Tensor, here: Tensor) -> Tensor:
    """Return `sums` [3, rows] of a slice with `peak` [rows] as if its peak were `top` >= peak. `here` [rows]: the slice
    holds the row's token. With d = peak - top, exp(z - top) is exp(d) exp(z - peak), and z - top is d + (z - peak).
    Slices of a row rebased onto their highest peak can be added."""
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
            peak, sums = kept_statistics(rows, wanted, temperature, kept, first)
        if group is not None and dist.get_world_size(group) > 1:
            top = peak.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            sums = rebase(peak, sums, top, is_local(wanted, vocab))
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
            write_kept_gradient(*arguments, settings.kept, settings.first_token)
        return target.view_as(logits), None, None, None, None, None


def _rows(logits: Tensor) -> Tensor:
    """Return [tokens, vocab/tp], contiguous within a row; a view if strides allow."""
    rows = logits.detach().reshape(-1, logits.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _back_end(logits: Tensor) -> ModuleType:
    if not logits.is_cuda:
        return sys.modules[__name__]
    if logits.dtype is torch.float64:
        return _slow_on_gpu("the logits are float64")
    try:
        from megatron_bridge.model import logprobs_triton  # Triton is only on GPU machines
    except ImportError as error:
        return _slow_on_gpu(f"Triton does not load: {one_line(error, 200)}")
    return logprobs_triton


@cache
def _slow_on_gpu(reason: str) -> ModuleType:
    _log.warning(
        "log-probabilities are computed by torch on the GPU, which took 194 times as long as one read of the logits on "
        "an H200, where the Triton kernel took 1.3: %s",
        reason,
    )
    return sys.modules[__name__]


LOWEST = -1e30
"""A stand-in for -inf that avoids 0 × -inf and inf - inf; its exponential is 0."""

_CHUNK_ELEMENTS = 1 << 22
"""Elements of a chunk in full precision: 16 MiB of float32."""


def statistics(rows: Tensor, wanted: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return a back end's statistics (peak, sums) of `rows` [tokens, vocab/tp] and `wanted` int64 [tokens]."""
    vocab = rows.shape[-1]
    precise = torch.promote_types(rows.dtype, torch.float32)
    peak = (rows.amax(-1).to(precise) / temperature).clamp_(min=LOWEST)
    sums = peak.new_zeros(3, len(rows))
    step = max(1, _CHUNK_ELEMENTS // vocab)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        shifted = rows[part].to(precise, copy=True).div_(temperature).sub_(peak[part, None])
        token = shifted.gather(1, wanted[part].clamp(0, vocab - 1)[:, None])[:, 0]
        sums[1, part] = torch.where(is_local(wanted[part], vocab), token, 0)
        weight = shifted.exp()
        sums[0, part] = weight.sum(-1)
        sums[2, part] = weight.mul_(shifted.clamp_(min=LOWEST)).sum(-1)
    return peak, sums


def write_gradient(
    rows: Tensor, wanted: Tensor, normalizer: Tensor, scale: Tensor, temperature: float, target: Tensor
) -> None:
    """Fill `target` [tokens, vocab/tp], possibly `rows` itself, with scale × ([v = wanted] - exp(z / T - normalizer)).
    `normalizer` and `scale` are [tokens]; rows of scale 0 become 0, whatever their logits."""
    vocab = rows.shape[-1]
    precise, step = torch.promote_types(rows.dtype, torch.float32), max(1, _CHUNK_ELEMENTS // vocab)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        probability = rows[part].to(precise, copy=True).div_(temperature).sub_(normalizer[part, None]).exp_()
        gradient = probability.mul_(-scale[part, None])
        here = is_local(wanted[part], vocab)
        gradient.scatter_add_(1, wanted[part].clamp(0, vocab - 1)[:, None], torch.where(here, scale[part], 0)[:, None])
        target[part] = gradient.masked_fill_((scale[part] == 0)[:, None], 0).to(rows.dtype)


def is_local(wanted: Tensor, vocab: int) -> Tensor:
    """Return whether this rank's slice of `vocab` tokens holds the wanted token, counted from the slice's first."""
    return (wanted >= 0) & (wanted < vocab)


@dataclass(frozen=True)
class KeptRows:
    """The kept set of each row of logits; rows without one (a prompt, padding) have an empty set."""

    owner: Tensor
    """int64 [kept], the row of each entry, ascending."""
    tokens: Tensor
    """int64 [kept], global token ids."""
    counts: Tensor
    """int64 [rows], number of entries of each row."""

    @staticmethod
    def of(sets: KeptSets) -> KeptRows:
        """Return the sets on the host, one row a set."""
        return KeptRows(
            owner=torch.from_numpy(np.repeat(np.arange(len(sets)), sets.counts)),
            tokens=torch.from_numpy(sets.tokens.astype(np.int64)),
            counts=torch.from_numpy(sets.counts),
        )

    def of_rows(self, rows: Tensor) -> KeptRows:
        """Return the sets of `rows` int64 [n], in that order."""
        counts = self.counts[rows]
        owner = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
        within = torch.arange(len(owner), device=rows.device) - (counts.cumsum(0) - counts)[owner]
        starts = (self.counts.cumsum(0) - self.counts)[rows]
        return KeptRows(owner=owner, tokens=self.tokens[starts[owner] + within], counts=counts)


def kept_statistics(
    rows: Tensor, wanted: Tensor, temperature: float, kept: KeptRows, first_token: int
) -> tuple[Tensor, Tensor]:
    """Return `statistics` over the kept tokens. The first column of `rows` [tokens, vocab/tp] is the token
    `first_token`, from which `wanted` int64 [tokens] counts. Rows without a kept token here have sums of 0."""
    vocab, places = rows.shape[-1], kept.tokens - first_token
    logits = rows[kept.owner, places.clamp(0, vocab - 1)].to(torch.promote_types(rows.dtype, torch.float32))
    values = torch.where(is_local(places, vocab), logits / temperature, -torch.inf)
    peak = values.new_full((len(rows),), LOWEST).scatter_reduce(0, kept.owner, values, "amax")
    shifted = values - peak[kept.owner]
    weight = shifted.exp()
    token = rows.gather(1, wanted.clamp(0, vocab - 1)[:, None])[:, 0].to(values.dtype) / temperature - peak
    # Sums run in the entries' order, which a scattered sum on a GPU would not keep.
    row_sums = partial(torch.segment_reduce, reduce="sum", lengths=kept.counts, unsafe=True)
    total, weighted = row_sums(weight), row_sums(weight * shifted.clamp(min=LOWEST))
    return peak, torch.stack((total, torch.where(is_local(wanted, vocab), token, 0), weighted))


def write_kept_gradient(
    rows: Tensor,
    wanted: Tensor,
    normalizer: Tensor,
    scale: Tensor,
    temperature: float,
    target: Tensor,
    kept: KeptRows,
    first_token: int,
) -> None:
    """Fill `target` as `write_gradient` does, but only on kept tokens; other tokens get 0. `target` may be `rows`."""
    vocab, places, factor = rows.shape[-1], kept.tokens - first_token, scale[kept.owner]
    columns = places.clamp(0, vocab - 1)
    logits = rows[kept.owner, columns].to(torch.promote_types(rows.dtype, torch.float32))
    probability = (logits / temperature - normalizer[kept.owner]).exp()
    chosen = (places == wanted[kept.owner]).to(probability.dtype)
    gradient = torch.where(is_local(places, vocab) & (factor != 0), factor * (chosen - probability), 0)
    target.zero_()
    # Entries of other ranks add 0 to a column of their row; a sum makes that harmless in any order.
    target.index_put_((kept.owner, columns), gradient.to(target.dtype), accumulate=True)
