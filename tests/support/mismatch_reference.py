"""Mismatch statistics by brute force: NumPy, float64, one group of tokens after the other, from the definitions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from precision.mismatch.statistics import QUANTILES, StepTokens

Array = NDArray[Any]
AGES = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9-16": (9, 16), "17-": (17, 10**9)}
PLACES = ("0-0", "1-3", "4-15", "16-63", "64-255", "256-1023", "1024-4095", "4096-16383", "16384-1000000000")
ENTROPIES = ("0-0.01", "0.01-0.1", "0.1-0.3", "0.3-1", "1-3", "3-")


def random_tokens(seed: int, lengths: list[int], *, spread: float = 0.1) -> StepTokens:
    """Ragged responses; every fifth token or so is not seen, and holds what must not be read."""
    random = np.random.default_rng(seed)
    count = sum(lengths)
    rollout = -random.exponential(1.5, count)
    learner = np.minimum(rollout + random.normal(0.0, spread, count) * random.standard_t(3, count).clip(-20, 20), 0.0)
    seen = random.random(count) > 0.2
    learner[~seen], rollout[~seen] = np.nan, -np.inf
    columns: dict[str, Array] = dict(
        learner_logprobs=learner.astype(np.float32),
        rollout_logprobs=rollout.astype(np.float32),
        seen=seen,
        advantages=(random.integers(-1, 2, count) * random.random(count)).astype(np.float32),
        entropy=(10.0 ** random.uniform(-3.0, 1.0, count)).astype(np.float32),
        age=random.integers(0, 25, count).astype(np.int32),
        place=np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )
    return StepTokens(**{name: torch.from_numpy(values) for name, values in columns.items()})


def masks(tokens: StepTokens) -> dict[str, Array]:
    """Name of each group → bool [responses]."""
    seen = tokens.seen.numpy()
    sign, entropy = np.sign(tokens.advantages.numpy()), tokens.entropy.numpy().astype(np.float64)
    age, offsets = tokens.age.numpy(), tokens.offsets.numpy()
    position = np.concatenate([np.arange(b - a) for a, b in itertools.pairwise(offsets)])
    found = {"all": seen}
    found |= {f"advantage/{name}": seen & (sign == s) for s, name in ((-1, "negative"), (0, "zero"), (1, "positive"))}
    for text in PLACES:
        low, high = map(int, text.split("-"))
        name = {"0-0": "0", "16384-1000000000": "16384-"}.get(text, text)
        found[f"position/{name}"] = seen & (position >= low) & (position <= high)
    for text in ENTROPIES:
        lowest, _, highest = text.partition("-")
        found[f"entropy/{text}"] = seen & (entropy >= float(lowest)) & (entropy < float(highest or "inf"))
    found |= {f"age/{name}": seen & (age >= low) & (age <= high) for name, (low, high) in AGES.items()}
    return found


def statistics(learner: Array, rollout: Array) -> dict[str, float]:
    """Of tokens, [tokens] nats each."""
    x, y = learner.astype(np.float64), rollout.astype(np.float64)
    gaps = x - y
    ratios, p, q = np.exp(gaps), np.exp(x), np.exp(y)
    return {
        "ess": ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum() + len(ratios) * 1e-8),
        "chi2": (ratios**2).mean() - 1.0,
        "k1_kl": -gaps.mean(),
        "k2_kl": (gaps**2).mean() / 2.0,
        "k3_kl": (ratios - 1.0 - gaps).mean(),
        "log_ratio_mean": gaps.mean(),
        "log_ratio_abs_mean": np.abs(gaps).mean(),
        "ratio_mean": ratios.mean(),
        "ratio_max": ratios.max(),
        "ratio_min": ratios.min(),
        "ratio_above_2_share": (ratios > 2).mean(),
        "ratio_below_half_share": (ratios < 0.5).mean(),
        "ratio_above_10_share": (ratios > 10).mean(),
        "ratio_below_tenth_share": (ratios < 0.1).mean(),
        "probability_error": np.exp(np.abs(gaps)).mean(),
        "probability_gap_abs_mean": np.abs(p - q).mean(),
        "logprob_pearson": np.corrcoef(x, y)[0, 1] if len(x) > 1 else np.nan,
        "probability_pearson": np.corrcoef(p, q)[0, 1] if len(p) > 1 else np.nan,
        "num_tokens": float(len(x)),
    }


def quantiles(learner: Array, rollout: Array) -> Array:
    """[len(QUANTILES)] of the log-ratios."""
    return np.quantile(learner.astype(np.float64) - rollout.astype(np.float64), QUANTILES)


def sequence_totals(tokens: StepTokens) -> list[Array]:
    """The log-ratios of the seen tokens of each sequence, one array each."""
    gaps = tokens.learner_logprobs.double().numpy() - tokens.rollout_logprobs.double().numpy()
    seen, offsets = tokens.seen.numpy(), tokens.offsets.numpy()
    return [gaps[a:b][seen[a:b]] for a, b in itertools.pairwise(offsets)]
