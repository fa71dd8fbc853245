"""How far learner and engine are apart on the tokens of an optimizer step, over all and over parts of them.

    StepTokens ──▶ chunks, dealt out to the ranks ─┬▶ GroupSums            added in the chunks' order  ─┐
                                                   ├▶ sorted log-ratios    exact quantiles, by counting ─┼▶ Mismatch
                                                   └▶ segments             one row for each sequence   ─┘

Everything up to `Mismatch` is computed where the tensors lie, in float64. Where the chunks are cut depends on the step
alone, and what comes of them is added in their order. What is random on a GPU (sums by atomics) is not used. So the
statistics are the same, bit for bit, on every rank and for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from precision.ess import sequence_ess_of_totals
from precision.histogram import NUM_LOG_RATIO_BINS
from precision.mismatch import step_tokens
from precision.mismatch.quantiles import quantiles_of_ranks
from precision.mismatch.splits import ALL, GROUPS, OFFSETS, SPLITS
from precision.mismatch.step_tokens import StepTokens
from precision.ranks import ALONE, Ranks
from precision.ratios import MAX_LOG_RATIO, SUMS, RatioSums, log_ratio_bins, ratio_terms, require_usable
from precision.torch_on_use import Tensor, torch

QUANTILES = (0.0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 1.0)
"""Of the log-ratios; between two tokens they are interpolated linearly, as NumPy does."""

SEQUENCE_COLUMNS = (
    "num_tokens",
    "log_ratio",
    "log_ratio_abs",
    "log_ratio_max",
    "log_ratio_min",
    "learner_logprob",
    "rollout_logprob",
    "ess",
)
"""Of each sequence: sums over its tokens, the extremes of a token, and the ESS among its tokens."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Learner against engine over `num_tokens` tokens."""

    num_tokens: int
    max_abs: float
    """Largest |log pi_learner - log pi_engine|, nats."""
    mean_abs: float
    """Mean |log pi_learner - log pi_engine|, nats."""
    k3: float
    """KL(engine || learner) in nats, k3 estimate; an expectation only if the engine sampled the tokens."""
    ess: float
    """Token ESS, in [1/num_tokens, 1]; 1 is agreement."""


def gap(learner: Tensor, engine: Tensor, mask: Tensor | None = None) -> Gap:
    """Compare logprobs (nats) of any one shape; `mask` is bool of that shape, None means every token.

    Raises FloatingPointError when a compared pair is not finite, ValueError when shapes differ or nothing is compared.
    """
    selected = torch.ones_like(learner, dtype=torch.bool) if mask is None else mask
    sums = RatioSums.from_logprobs(learner, engine, selected)
    return Gap(
        num_tokens=sums.num_tokens,
        max_abs=sums.max_abs_log_ratio,
        mean_abs=sums.mean_abs_log_ratio,
        k3=sums.k3_kl,
        ess=sums.ess,
    )


@dataclass(frozen=True)
class GroupSums:
    """What adds up, for each of GROUPS; float64 tensors on one device. All-reduce both with SUM."""

    sums: Tensor
    """[groups, len(SUMS)]"""
    histogram: Tensor
    """[groups, NUM_LOG_RATIO_BINS] tokens by log-ratio."""

    @classmethod
    def zero(cls, device: torch.device | None = None) -> GroupSums:
        """Of no tokens."""
        shapes = ((len(GROUPS), len(SUMS)), (len(GROUPS), NUM_LOG_RATIO_BINS))
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    @classmethod
    def from_tokens(cls, learner_logprobs: Tensor, rollout_logprobs: Tensor, buckets: Tensor) -> GroupSums:
        """Of tokens with checked logprobs, float64 [tokens] in nats, and `buckets` as StepTokens.buckets gives them.

        Sums are products with a 0-1 matrix, not scattered: deterministic, and quick on a GPU though groups are few.
        """
        found = cls.zero(learner_logprobs.device)
        for start in range(0, len(buckets), step_tokens.CHUNK_TOKENS):
            chunk = slice(start, start + step_tokens.CHUNK_TOKENS)
            found += cls._of_chunk(learner_logprobs[chunk], rollout_logprobs[chunk], buckets[chunk])
        return found

    @classmethod
    def _of_chunk(cls, learner: Tensor, rollout: Tensor, buckets: Tensor) -> GroupSums:
        member = torch.zeros(len(learner), len(GROUPS), dtype=torch.float64, device=learner.device)
        member[:, 0] = 1.0
        member.scatter_(1, buckets, 1.0)
        rows = torch.cat([torch.zeros_like(buckets[:, :1]), buckets], dim=1)
        cells = rows * NUM_LOG_RATIO_BINS + log_ratio_bins(learner - rollout)[:, None]
        counts = torch.bincount(cells.flatten(), minlength=len(GROUPS) * NUM_LOG_RATIO_BINS)
        return cls(member.T @ ratio_terms(learner, rollout), counts.view(len(GROUPS), -1).double())

    def __add__(self, other: GroupSums) -> GroupSums:
        return GroupSums(self.sums + other.sums, self.histogram + other.histogram)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The statistics of one batch, on the host: `updates` optimizer steps, each on sequences of its own."""

    sums: NDArray[np.float64]
    """[updates, groups, len(SUMS)]"""
    histogram: NDArray[np.float64]
    """[updates, groups, NUM_LOG_RATIO_BINS]"""
    quantiles: NDArray[np.float64]
    """[updates, groups, len(QUANTILES)] of the log-ratios; NaN in groups without tokens."""
    sequences: NDArray[np.float64]
    """[sequences, len(SEQUENCE_COLUMNS)] in the batch's order; num_tokens is 0 and all else NaN where none was seen."""
    update: NDArray[np.int32]
    """[sequences] which update saw the sequence; -1 for none."""

    @staticmethod
    def of_step(tokens: StepTokens, ranks: Ranks = ALONE) -> Mismatch:
        """Of one optimizer step. Collective where there are several `ranks`: each has all tokens, measures some of the
        step's chunks, and gets the statistics of all.

        Raises, on every rank, FloatingPointError on a log-ratio that is not finite or above MAX_LOG_RATIO, ValueError
        when no token was seen.
        """
        if not bool(tokens.seen.any()):
            raise ValueError("mismatch statistics of 0 tokens are undefined, expected at least 1; check the mask")
        bounds, device = tokens.chunks(), tokens.seen.device
        _require_usable(tokens, bounds)
        if len(bounds) == 1:
            ranks = ALONE
        mine = {place: _Chunk.of(tokens.part(*bounds[place])) for place in range(ranks.rank, len(bounds), ranks.size)}
        sums = _added(mine, len(bounds), ranks, device)
        sequences = _in_order(mine, bounds, ranks, device)
        return Mismatch(
            sums=_host(sums.sums)[None],
            histogram=_host(sums.histogram)[None],
            quantiles=_host(quantiles_of_ranks(_sorted_groups(mine, device), QUANTILES, ranks))[None],
            sequences=sequences,
            update=np.where(sequences[:, 0] > 0, 0, -1).astype(np.int32),
        )

    @staticmethod
    def stack(parts: Sequence[Mismatch], samples: Sequence[NDArray[np.bool_]]) -> Mismatch:
        """Of a batch whose updates were measured one by one; `samples` holds which of its samples each part is of."""
        sequences = np.full((len(samples[0]), len(SEQUENCE_COLUMNS)), np.nan)
        sequences[:, 0] = 0.0
        update = np.full(len(sequences), -1, np.int32)
        for number, (part, chosen) in enumerate(zip(parts, samples, strict=True)):
            sequences[chosen] = part.sequences
            update[chosen] = np.where(part.update < 0, -1, number)
        return Mismatch(
            sums=np.concatenate([part.sums for part in parts]),
            histogram=np.concatenate([part.histogram for part in parts]),
            quantiles=np.concatenate([part.quantiles for part in parts]),
            sequences=sequences,
            update=update,
        )

    def group(self, name: str = ALL) -> RatioSums:
        """What the tokens of one of GROUPS add up to, over all updates."""
        return self._cell(slice(None), GROUPS.index(name))

    def _cell(self, updates: slice, row: int) -> RatioSums:
        low, high = self.quantiles[updates, row, 0], self.quantiles[updates, row, -1]
        extremes = [np.fmax.reduce(high), np.fmax.reduce(-low)]
        return RatioSums(
            sums=torch.from_numpy(self.sums[updates, row].sum(axis=0)),
            maxima=torch.tensor(extremes, dtype=torch.float64).nan_to_num(-math.inf),
            histogram=torch.from_numpy(self.histogram[updates, row].sum(axis=0)),
        )

    def statistics(self) -> dict[str, float]:
        """Of all tokens and of whole sequences, under the names that metrics use; quantiles are those of the last
        update."""
        quantiles = zip(QUANTILES[1:-1], self.quantiles[-1, 0, 1:-1], strict=True)
        named = {f"log_ratio_p{100 * share:g}".replace(".", "_"): float(value) for share, value in quantiles}
        return self.group().statistics() | named | self._of_sequences()

    def table(self) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """Names, and float64 [updates, groups, names]: RatioSums.statistics of each group in each update. NaN in groups
        without tokens, and where a correlation is undefined."""
        every = [
            [self._cell(slice(update, update + 1), row) for row in range(len(GROUPS))]
            for update in range(len(self.sums))
        ]
        cells = [[sums.statistics() if sums.num_tokens else {} for sums in update] for update in every]
        names = tuple(dict.fromkeys(name for update in cells for cell in update for name in cell))
        return names, np.array([[[cell.get(name, math.nan) for name in names] for cell in update] for update in cells])

    def by_split(self) -> dict[str, dict[str, dict[str, float]]]:
        """Split → bucket → the few statistics that tell where the mismatch lies; without buckets that hold no token."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        total = self.group().num_tokens
        for split in SPLITS:
            groups = ((bucket, self.group(f"{split.name}/{bucket}")) for bucket in split.buckets)
            found[split.name] = {bucket: _told(sums, total) for bucket, sums in groups if sums.num_tokens}
        return found

    def _of_sequences(self) -> dict[str, float]:
        """Statistics of the ratios of whole sequences: the products of their tokens' ratios.

        Products over long sequences leave every range of numbers, so k3 and chi2 are of ratios cut at
        e^MAX_LOG_RATIO; the ESS is computed in logs and cuts nothing.
        """
        seen = self.sequences[self.update >= 0]
        column = dict(zip(SEQUENCE_COLUMNS, seen.T, strict=True))
        totals = torch.from_numpy(column["log_ratio"])
        cut = totals.clamp(max=MAX_LOG_RATIO)
        sums = RatioSums.from_logprobs(cut, torch.zeros_like(cut), torch.ones_like(cut, dtype=torch.bool))
        means = torch.from_numpy(column["log_ratio"] / column["num_tokens"])
        return {
            "sequence_ess": sequence_ess_of_totals(totals),
            "sequence_mean_ratio_ess": sequence_ess_of_totals(means),
            "sequence_chi2": sums.chi2,
            "sequence_k1_kl": sums.k1_kl,
            "sequence_k2_kl": sums.k2_kl,
            "sequence_k3_kl": sums.k3_kl,
            "sequence_log_ratio_mean": float(totals.mean()),
            "sequence_log_ratio_abs_mean": float(totals.abs().mean()),
            "sequence_log_ratio_max": float(totals.max()),
            "sequence_log_ratio_min": float(totals.min()),
        }


def _told(sums: RatioSums, total: int) -> dict[str, float]:
    return {
        "share": sums.num_tokens / total,
        "ess": sums.ess,
        "k3_kl": sums.k3_kl,
        "log_ratio_mean": sums.mean_log_ratio,
        "log_ratio_abs_mean": sums.mean_abs_log_ratio,
        "ratio_max": sums.max_ratio,
        "probability_error": sums.probability_error,
    }


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """What is measured of some sequences of a step, on the device."""

    sums: GroupSums
    log_ratios: Tensor
    """float64 [seen tokens]"""
    buckets: Tensor
    """int64 [seen tokens, splits], as StepTokens.buckets."""
    sequences: Tensor
    """float64 [sequences, len(SEQUENCE_COLUMNS)]"""

    @staticmethod
    def of(tokens: StepTokens) -> _Chunk:
        seen, log_ratios, buckets = tokens.seen, tokens.log_ratios(), tokens.buckets()
        learner, rollout = tokens.learner_logprobs.double(), tokens.rollout_logprobs.double()
        return _Chunk(
            sums=GroupSums.from_tokens(learner[seen], rollout[seen], buckets),
            log_ratios=log_ratios[seen],
            buckets=buckets,
            sequences=_sequences(log_ratios, learner, rollout, tokens),
        )


def _require_usable(tokens: StepTokens, bounds: Sequence[tuple[int, int]]) -> None:
    """Of all log-ratios; each rank looks at all of them, so that none is left waiting for one that has raised."""
    extreme = []
    for each in bounds:
        log_ratios = tokens.part(*each).log_ratios()
        extreme.append(log_ratios[~(log_ratios.abs() <= MAX_LOG_RATIO)])
    require_usable(torch.cat(extreme), f"of {int(tokens.seen.sum())} tokens")


def _added(mine: Mapping[int, _Chunk], count: int, ranks: Ranks, device: torch.device) -> GroupSums:
    """The sums of all `count` chunks, added in their order, of which this rank has `mine` by place. Collective."""
    zero = GroupSums.zero(device)
    parts = [mine[place].sums if place in mine else zero for place in range(count)]
    sums = ranks.sum(torch.stack([part.sums for part in parts]))
    histogram = ranks.sum(torch.stack([part.histogram for part in parts]))
    added = zero
    for place in range(count):
        added += GroupSums(sums[place], histogram[place])
    return added


def _in_order(
    mine: Mapping[int, _Chunk], bounds: Sequence[tuple[int, int]], ranks: Ranks, device: torch.device
) -> NDArray[np.float64]:
    """The rows of all sequences. Collective."""
    rows = torch.zeros(bounds[-1][1], len(SEQUENCE_COLUMNS), dtype=torch.float64, device=device)
    for place, chunk in mine.items():
        rows[slice(*bounds[place])] = chunk.sequences
    return _host(ranks.sum(rows))


def _sorted_groups(mine: Mapping[int, _Chunk], device: torch.device) -> list[Tensor]:
    """For each of GROUPS, the log-ratios of this rank's chunks in ascending order."""
    nothing = torch.zeros(0, len(SPLITS), dtype=torch.int64, device=device)
    ordered, order = torch.cat([nothing[:, 0].double(), *(chunk.log_ratios for chunk in mine.values())]).sort()
    columns = torch.cat([nothing, *(chunk.buckets for chunk in mine.values())])[order].T
    groups = [ordered]
    for split, offset, column in zip(SPLITS, OFFSETS, columns, strict=True):
        groups += [ordered[column == offset + place] for place in range(len(split.buckets))]
    return groups


def _sequences(log_ratios: Tensor, learner: Tensor, rollout: Tensor, tokens: StepTokens) -> Tensor:
    """float64 [sequences, len(SEQUENCE_COLUMNS)]; `log_ratios` is 0 where no token was seen."""
    seen, ratios = tokens.seen, torch.where(tokens.seen, log_ratios.exp(), 0.0)
    zero = torch.zeros_like(log_ratios)
    added = [
        seen.double(),
        log_ratios,
        log_ratios.abs(),
        torch.where(seen, learner, zero),
        torch.where(seen, rollout, zero),
    ]
    sums = torch.segment_reduce(
        torch.stack([*added, ratios, ratios.square()], 1), "sum", offsets=tokens.offsets, axis=0
    )
    extremes = torch.stack([log_ratios, -log_ratios], 1).masked_fill(~seen[:, None], -math.inf)
    highest = torch.segment_reduce(extremes, "max", offsets=tokens.offsets, axis=0)
    count, total, absolute, of_learner, of_rollout, ratio, squared = sums.unbind(1)
    ess = ratio.square() / (count * squared)
    columns = torch.stack([total, absolute, highest[:, 0], -highest[:, 1], of_learner, of_rollout, ess], 1)
    return torch.cat([count[:, None], columns.masked_fill(count[:, None] == 0, math.nan)], 1)


def _host(tensor: Tensor) -> NDArray[np.float64]:
    return np.asarray(tensor.cpu().numpy(), np.float64)
