"""Measure how far learner and engine are apart on the tokens of an optimizer step, over all and over parts of them.

    StepTokens ──▶ chunks, dealt out to the ranks ─┬▶ GroupSums            added in the chunks' order  ─┐
                                                   ├▶ sorted log-ratios    exact quantiles, by counting ─┼▶ Mismatch
                                                   └▶ segments             one row for each sequence   ─┘

Everything up to `Mismatch` is computed where the tensors lie, in float64. The step alone decides where chunks are cut,
and their results are added in order. No operation is used that is random on a GPU (sums by atomics). So the statistics
are the same, bit for bit, on every rank and for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from precision.ratios import (
    MAX_LOG_RATIO,
    NUM_LOG_RATIO_BINS,
    SUMS,
    RatioSums,
    log_ratio_bins,
    ratio_terms,
    require_usable,
    sequence_ess_of_totals,
)
from precision.torch_on_use import Tensor, torch


@dataclass(frozen=True)
class Split:
    """A division of the tokens by a number of each; bucket i holds edges[i - 1] <= number < edges[i]."""

    name: str
    title: str
    """Name of the number, for figures."""
    edges: tuple[float, ...]
    buckets: tuple[str, ...]


SPLITS = (
    Split("advantage", "sign of the advantage", (0.0, 1.0), ("negative", "zero", "positive")),
    Split(
        "position",
        "place in the response",
        (1, 4, 16, 64, 256, 1024, 4096, 16384),
        ("0", "1-3", "4-15", "16-63", "64-255", "256-1023", "1024-4095", "4096-16383", "16384-"),
    ),
    Split(
        "entropy",
        "learner's entropy, nats",
        (0.01, 0.1, 0.3, 1.0, 3.0),
        ("0-0.01", "0.01-0.1", "0.1-0.3", "0.3-1", "1-3", "3-"),
    ),
    Split(
        "age",
        "age, versions",
        (1, 2, 3, 5, 9, 17),
        ("0", "1", "2", "3-4", "5-8", "9-16", "17-"),
    ),
)


ALL = "all"


GROUPS = (ALL, *(f"{split.name}/{bucket}" for split in SPLITS for bucket in split.buckets))
"""Names of the rows of every table: all tokens, then the buckets of each split. A token is in one of each."""


OFFSETS = tuple(1 + sum(len(split.buckets) for split in SPLITS[:place]) for place in range(len(SPLITS)))
"""Row in GROUPS of each split's first bucket."""


CHUNK_TOKENS = 1 << 16
"""Tokens that are processed at once, more only for a longer response: about 40 MB of float64 terms and memberships."""


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """The response tokens of a step, flat, sequence after sequence, on one device. An episode is one sequence, with the
    responses of all its rows."""

    learner_logprobs: Tensor
    """[tokens], nats."""
    rollout_logprobs: Tensor
    """[tokens], nats."""
    seen: Tensor
    """bool [tokens]; False on tokens that are not compared, where the other fields mean nothing."""
    advantages: Tensor
    """[tokens]; only the sign is used."""
    entropy: Tensor
    """[tokens], nats, of the learner's distribution."""
    age: Tensor
    """[tokens], versions between the policy that sampled the token and the policy that trains on it, rounded up."""
    place: Tensor
    """[tokens], the place in the response, from 0."""
    offsets: Tensor
    """int64 [sequences + 1], the beginning of each response."""

    def buckets(self) -> Tensor:
        """Return the row in GROUPS of each token, for each of SPLITS: int64 [seen tokens, splits]."""
        numbers = (self.advantages.sign(), self.place, self.entropy, self.age)
        columns = []
        for split, offset, number in zip(SPLITS, OFFSETS, numbers, strict=True):
            edges = torch.tensor(split.edges, dtype=torch.float64, device=number.device)
            columns.append(offset + torch.bucketize(number[self.seen].double(), edges, right=True))
        return torch.stack(columns, dim=1)

    def chunks(self) -> list[tuple[int, int]]:
        """Return (first sequence, one after the last) of runs of whole sequences with CHUNK_TOKENS at most, or of one
        longer sequence. They depend on the lengths alone."""
        offsets, found, first = self.offsets.cpu(), [], 0
        while first < len(offsets) - 1:
            fits = int(torch.searchsorted(offsets, offsets[first] + CHUNK_TOKENS, right=True)) - 1
            after = max(fits, first + 1)
            found.append((first, after))
            first = after
        return found

    def part(self, first: int, after: int) -> StepTokens:
        """Return the sequences from `first` to the one before `after`."""
        offsets = self.offsets[first : after + 1]
        tokens = slice(int(offsets[0]), int(offsets[-1]))
        return StepTokens(
            learner_logprobs=self.learner_logprobs[tokens],
            rollout_logprobs=self.rollout_logprobs[tokens],
            seen=self.seen[tokens],
            advantages=self.advantages[tokens],
            entropy=self.entropy[tokens],
            age=self.age[tokens],
            place=self.place[tokens],
            offsets=offsets - offsets[0],
        )

    def log_ratios(self) -> Tensor:
        """Return log pi_learner - log pi_engine, float64 [tokens]; 0 where not seen. Values are not checked."""
        learner, rollout = self.learner_logprobs.double(), self.rollout_logprobs.double()
        return torch.where(self.seen, learner - rollout, 0.0)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One of `size` processes that call the same functions in the same order."""

    rank: int
    """Index of this process, from 0."""
    size: int
    sum: Callable[[Tensor], Tensor]
    """Sum of a float64 or int64 tensor over all processes, bit-identical on each. It may overwrite its argument."""


ALONE = Ranks(rank=0, size=1, sum=lambda tensor: tensor)


QUANTILES = (0.0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 1.0)
"""Orders of the log-ratios' quantiles, interpolated linearly between two tokens as in NumPy."""


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
"""Columns of each sequence: sums over its tokens, the extremes of a token, and the ESS among its tokens."""

OF_A_BUCKET = ("share", "ess", "k3_kl", "log_ratio_mean", "log_ratio_abs_mean", "ratio_max", "probability_error")
"""Statistics of each bucket in a step's line of metrics; `share` is that of the step's tokens."""


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
    """Return the gap between logprobs (nats) of any one shape; `mask` is bool of that shape, None means every token.
    Raises FloatingPointError for a compared pair that is not finite, ValueError for other shapes or none compared."""
    selected = torch.ones_like(learner, dtype=torch.bool) if mask is None else mask
    sums = RatioSums.from_logprobs(learner, engine, selected)
    found = sums.statistics()
    return Gap(
        num_tokens=sums.num_tokens,
        max_abs=float(sums.maxima.max()),
        mean_abs=found["log_ratio_abs_mean"],
        k3=found["k3_kl"],
        ess=found["ess"],
    )


@dataclass(frozen=True)
class GroupSums:
    """Sums for each of GROUPS; float64 tensors on one device. All-reduce both with SUM."""

    sums: Tensor
    """[groups, len(SUMS)]"""
    histogram: Tensor
    """[groups, NUM_LOG_RATIO_BINS] tokens by log-ratio."""

    @classmethod
    def zero(cls, device: torch.device | None = None) -> GroupSums:
        return cls(
            torch.zeros(len(GROUPS), len(SUMS), dtype=torch.float64, device=device),
            torch.zeros(len(GROUPS), NUM_LOG_RATIO_BINS, dtype=torch.float64, device=device),
        )

    @classmethod
    def from_tokens(cls, learner_logprobs: Tensor, rollout_logprobs: Tensor, buckets: Tensor) -> GroupSums:
        """Return the sums of tokens with checked logprobs, float64 [tokens] in nats, and `buckets` as of
        StepTokens.buckets. Sums are products with a 0-1 matrix, not scattered: deterministic, and quick on a GPU."""
        found = cls.zero(learner_logprobs.device)
        for start in range(0, len(buckets), CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            learner, rollout, rows = learner_logprobs[chunk], rollout_logprobs[chunk], buckets[chunk]
            member = torch.zeros(len(learner), len(GROUPS), dtype=torch.float64, device=learner.device)
            member[:, 0] = 1.0
            member.scatter_(1, rows, 1.0)
            rows = torch.cat([torch.zeros_like(rows[:, :1]), rows], dim=1)
            cells = rows * NUM_LOG_RATIO_BINS + log_ratio_bins(learner - rollout)[:, None]
            counts = torch.bincount(cells.flatten(), minlength=len(GROUPS) * NUM_LOG_RATIO_BINS)
            found += cls(member.T @ ratio_terms(learner, rollout), counts.view(len(GROUPS), -1).double())
        return found

    def __add__(self, other: GroupSums) -> GroupSums:
        return GroupSums(self.sums + other.sums, self.histogram + other.histogram)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The statistics of one batch, on the host: `updates` optimizer steps, each on different sequences."""

    sums: NDArray[np.float64]
    """[updates, groups, len(SUMS)]"""
    histogram: NDArray[np.float64]
    """[updates, groups, NUM_LOG_RATIO_BINS]"""
    quantiles: NDArray[np.float64]
    """[updates, groups, len(QUANTILES)] of the log-ratios; NaN in groups without tokens."""
    sequences: NDArray[np.float64]
    """[sequences, len(SEQUENCE_COLUMNS)] in batch order. Without seen tokens, num_tokens is 0 and the rest NaN."""
    update: NDArray[np.int32]
    """[sequences], the update that saw each sequence; -1 for none."""

    @staticmethod
    def of_step(tokens: StepTokens, ranks: Ranks = ALONE) -> Mismatch:
        """Return the statistics of one optimizer step. Collective where there are several `ranks`: each has all tokens,
        measures some of the step's chunks, and gets the statistics of all. Raises, on every rank, FloatingPointError on
        a log-ratio that is not finite or above MAX_LOG_RATIO, ValueError when no token was seen."""
        if not bool(tokens.seen.any()):
            raise ValueError("mismatch statistics of 0 tokens are undefined, expected at least 1; check the mask")
        bounds, device = tokens.chunks(), tokens.seen.device
        # Each rank checks all log-ratios, so that all raise and none is left waiting.
        extreme = []
        for each in bounds:
            log_ratios = tokens.part(*each).log_ratios()
            extreme.append(log_ratios[~(log_ratios.abs() <= MAX_LOG_RATIO)])
        require_usable(torch.cat(extreme), lambda: f"of {int(tokens.seen.sum())} tokens")
        if len(bounds) == 1:
            ranks = ALONE
        mine = dict[int, _Chunk]()
        for place in range(ranks.rank, len(bounds), ranks.size):
            mine[place] = _Chunk.of(tokens.part(*bounds[place]))
        total, sequences = (
            GroupSums.zero(device),
            torch.zeros(bounds[-1][1], len(SEQUENCE_COLUMNS), dtype=torch.float64, device=device),
        )
        parts = [mine[place].sums if place in mine else total for place in range(len(bounds))]
        sums = ranks.sum(torch.stack([part.sums for part in parts]))
        histogram = ranks.sum(torch.stack([part.histogram for part in parts]))
        for place in range(len(bounds)):  # in order, whichever rank measured them
            total += GroupSums(sums[place], histogram[place])
        for place, chunk in mine.items():
            sequences[slice(*bounds[place])] = chunk.sequences
        rows = ranks.sum(sequences).cpu().numpy()
        # For each of GROUPS, the log-ratios of this rank's chunks in ascending order.
        nothing = torch.zeros(0, len(SPLITS), dtype=torch.int64, device=device)
        ordered, order = torch.cat([nothing[:, 0].double(), *[chunk.log_ratios for chunk in mine.values()]]).sort()
        columns = torch.cat([nothing, *[chunk.buckets for chunk in mine.values()]])[order].T
        groups = [ordered]
        for split, offset, column in zip(SPLITS, OFFSETS, columns, strict=True):
            groups += [ordered[column == offset + place] for place in range(len(split.buckets))]
        return Mismatch(
            sums=total.sums.cpu().numpy()[None],
            histogram=total.histogram.cpu().numpy()[None],
            quantiles=quantiles(groups, QUANTILES, ranks).cpu().numpy()[None],
            sequences=rows,
            update=np.where(rows[:, 0] > 0, 0, -1).astype(np.int32),
        )

    @staticmethod
    def stack(parts: Sequence[Mismatch], samples: Sequence[NDArray[np.bool_]]) -> Mismatch:
        """Return the statistics of a batch from those of its updates; `samples` masks those of each part."""
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

    def group(self, name: str = ALL, updates: slice = slice(None)) -> RatioSums:
        """Return the sums over the tokens of one of GROUPS, of all updates or of some."""
        row = GROUPS.index(name)
        low, high = self.quantiles[updates, row, 0], self.quantiles[updates, row, -1]
        extremes = [np.fmax.reduce(high), np.fmax.reduce(-low)]
        return RatioSums(
            sums=torch.from_numpy(self.sums[updates, row].sum(axis=0)),
            maxima=torch.tensor(extremes, dtype=torch.float64).nan_to_num(-math.inf),
            histogram=torch.from_numpy(self.histogram[updates, row].sum(axis=0)),
        )

    def statistics(self) -> dict[str, float]:
        """Return the statistics of all tokens and of whole sequences by metric name; quantiles are those of the last
        update. The ratio of a sequence is the product of its tokens' ratios. Products over long sequences overflow, so
        their k3 and chi2 are of ratios cut at e^MAX_LOG_RATIO; the ESS is computed in logs and cuts nothing."""
        found = self.group().statistics()
        for share, value in zip(QUANTILES[1:-1], self.quantiles[-1, 0, 1:-1], strict=True):
            found[f"log_ratio_p{100 * share:g}".replace(".", "_")] = float(value)
        seen = self.sequences[self.update >= 0]
        column = dict(zip(SEQUENCE_COLUMNS, seen.T, strict=True))
        totals = torch.from_numpy(column["log_ratio"])
        means = torch.from_numpy(column["log_ratio"] / column["num_tokens"])
        cut = totals.clamp(max=MAX_LOG_RATIO)
        of_cut = RatioSums.from_logprobs(cut, torch.zeros_like(cut), torch.ones_like(cut, dtype=torch.bool))
        sequence = of_cut.statistics()
        return found | {
            "sequence_ess": sequence_ess_of_totals(totals),
            "sequence_mean_ratio_ess": sequence_ess_of_totals(means),
            "sequence_chi2": sequence["chi2"],
            "sequence_k1_kl": sequence["k1_kl"],
            "sequence_k2_kl": sequence["k2_kl"],
            "sequence_k3_kl": sequence["k3_kl"],
            "sequence_log_ratio_mean": float(totals.mean()),
            "sequence_log_ratio_abs_mean": float(totals.abs().mean()),
            "sequence_log_ratio_max": float(totals.max()),
            "sequence_log_ratio_min": float(totals.min()),
        }

    def table(self) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """Return names, and RatioSums.statistics of each group in each update, float64 [updates, groups, names]. NaN in
        groups without tokens, and where a correlation is undefined."""
        every = [[self.group(name, slice(at, at + 1)) for name in GROUPS] for at in range(len(self.sums))]
        cells = [[sums.statistics() if sums.num_tokens else {} for sums in update] for update in every]
        names = tuple(dict.fromkeys(name for update in cells for cell in update for name in cell))
        return names, np.array([[[cell.get(name, math.nan) for name in names] for cell in update] for update in cells])

    def by_split(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return split → bucket → the statistics OF_A_BUCKET, without buckets that hold no token."""
        found: dict[str, dict[str, dict[str, float]]] = {split.name: {} for split in SPLITS}
        total = self.group().num_tokens
        for split in SPLITS:
            for bucket in split.buckets:
                sums = self.group(f"{split.name}/{bucket}")
                if sums.num_tokens:
                    of_bucket = {"share": sums.num_tokens / total} | sums.statistics()
                    found[split.name][bucket] = {name: of_bucket[name] for name in OF_A_BUCKET}
        return found


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    sums: GroupSums
    log_ratios: Tensor
    """float64 [seen tokens]"""
    buckets: Tensor
    sequences: Tensor
    """float64 [sequences, len(SEQUENCE_COLUMNS)]"""

    @staticmethod
    def of(tokens: StepTokens) -> _Chunk:
        seen, log_ratios, buckets = tokens.seen, tokens.log_ratios(), tokens.buckets()
        learner, rollout = tokens.learner_logprobs.double(), tokens.rollout_logprobs.double()
        ratios, zero = torch.where(seen, log_ratios.exp(), 0.0), torch.zeros_like(log_ratios)
        added = [
            seen.double(),
            log_ratios,
            log_ratios.abs(),
            torch.where(seen, learner, zero),
            torch.where(seen, rollout, zero),
        ]
        of_tokens = torch.stack([*added, ratios, ratios.square()], 1)
        sums = torch.segment_reduce(of_tokens, "sum", offsets=tokens.offsets, axis=0)
        extremes = torch.stack([log_ratios, -log_ratios], 1).masked_fill(~seen[:, None], -math.inf)
        highest = torch.segment_reduce(extremes, "max", offsets=tokens.offsets, axis=0)
        count, total, absolute, of_learner, of_rollout, ratio, squared = sums.unbind(1)
        ess = ratio.square() / (count * squared)
        columns = torch.stack([total, absolute, highest[:, 0], -highest[:, 1], of_learner, of_rollout, ess], 1)
        return _Chunk(
            sums=GroupSums.from_tokens(learner[seen], rollout[seen], buckets),
            log_ratios=log_ratios[seen],
            buckets=buckets,
            sequences=torch.cat([count[:, None], columns.masked_fill(count[:, None] == 0, math.nan)], 1),
        )


_HIGHEST = (1 << 63) - 1
"""Largest int64. With all bits but the sign flipped in negative doubles, int64 orders them as the numbers do."""


def quantiles(groups: Sequence[Tensor], orders: Sequence[float], ranks: Ranks = ALONE) -> Tensor:
    """Return the exact quantiles of each group's values over all ranks, float64 [groups, orders]; NaN without values.

    `groups` are this rank's values, each float64 [values], ascending and finite. The result is, to the last bit, that
    of one rank with all values. torch.quantile takes no more than 16 million.

    Between two values a quantile is interpolated linearly, as in NumPy. The number of all values gives the places of
    these two in the order. Where several ranks hold the values, each value is found by bisection: the number of values
    not above a bound is a sum over ranks. Doubles and int64 have the same number of bits, so 64 bounds at most find it
    exactly, and no rank sees another's values.
    `orders` lie in [0, 1]. Collective.
    """
    device = groups[0].device
    counts = ranks.sum(torch.tensor([*map(len, groups)], device=device))
    # [groups, orders] where the quantiles lie in the order of so many values, from 0; 0 without values.
    shares = torch.tensor(orders, dtype=torch.float64, device=device)
    places = shares * (counts[:, None] - 1).clamp(min=0)
    wanted = torch.cat([places.floor(), places.ceil()], dim=1).long()
    if ranks.size == 1:
        found = torch.full(wanted.shape, math.nan, dtype=torch.float64, device=device)
        for row, ordered in enumerate(groups):
            if ordered.numel():
                found[row] = ordered[wanted[row]]
    else:
        # As int64 of the same order: -0.0 becomes 0.0, for they are equal, and their bits are not.
        keys = [bits ^ (bits >> 63 & _HIGHEST) for bits in ((ordered + 0.0).view(torch.int64) for ordered in groups)]
        low, high = torch.full_like(wanted, -_HIGHEST - 1), torch.full_like(wanted, _HIGHEST)
        while bool((low < high).any()):
            middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down, without an overflow
            not_above = torch.stack(
                [torch.searchsorted(own, bounds, right=True) for own, bounds in zip(keys, middle, strict=True)]
            )
            found = ranks.sum(not_above) > wanted
            low, high = torch.where(found, low, middle + 1), torch.where(found, middle, high)
        found = (low ^ (low >> 63 & _HIGHEST)).view(torch.float64)
    below, above = found.chunk(2, dim=1)
    return torch.where(counts[:, None] > 0, below + (above - below) * (places - places.floor()), math.nan)
