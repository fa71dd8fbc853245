"""Logits that are hard on a one-pass softmax, and what must come out of them.

Bounds count roundings in float32, u = 2^-24 each, of exponents as large as z / T: plain torch and Triton's interpreter
multiply and then subtract the peak, where a GPU rounds once. The interpreter also cuts bfloat16 off where others round
to nearest: a gradient may be off by one unit in the last place of its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SEQUENCE, BATCH = 3, 2
STRETCH = 4096
"""Elements that a program sees at a time in 2-byte logits; half of it in 4-byte ones."""


U = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `vocab_parallel_logprobs` and what its gradient is multiplied by."""

    logits: Tensor
    """[sequence, batch, vocab]"""
    tokens: Tensor
    upstream: Tensor
    """float32 [sequence, batch]; rows of 0 are prompt tokens."""
    temperature: float = 1.0
    overwrite: bool = False


def case(logits: Tensor, *, temperature: float = 1.0, overwrite: bool = False) -> Case:
    """With the first, the last and inner tokens of the vocabulary, and every other row without a gradient."""
    vocab = logits.shape[-1]
    tokens = torch.tensor([0, vocab - 1, vocab // 2, 1 % vocab, vocab // 3, vocab - 1]).view(SEQUENCE, BATCH)
    upstream = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.0, -0.0]).view(SEQUENCE, BATCH)
    return Case(logits=logits, tokens=tokens, upstream=upstream, temperature=temperature, overwrite=overwrite)


def gaussian(vocab: int, dtype: torch.dtype = torch.bfloat16, deviation: float = 5.0) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (deviation * torch.randn(SEQUENCE, BATCH, vocab, generator=generator)).to(dtype)


def _ramp(start: float, stop: float) -> Tensor:
    """Every stretch has another maximum than the one before it."""
    return torch.linspace(start, stop, 3 * STRETCH + 5).expand(SEQUENCE, BATCH, -1).bfloat16()


def _with_minus_infinity() -> Tensor:
    """Single tokens, a whole first stretch, all but one token, and a row with nothing left."""
    logits = gaussian(2 * STRETCH + 100)
    logits[0, 0, 1:50] = -math.inf
    logits[0, 1, :STRETCH] = -math.inf
    logits[1, 0, : STRETCH + 50] = -math.inf
    logits[1, 1, :1] = logits[1, 1, 2:] = -math.inf
    logits[2, 0, STRETCH // 3 :] = -math.inf  # its own token too
    logits[2, 1] = -math.inf
    return logits


def _without_gradient_not_finite() -> Tensor:
    """Where `case` passes no gradient on, logits that would poison one."""
    logits = gaussian(STRETCH + 10)
    logits[0, 1, 7], logits[2, 0, 8], logits[2, 1, 9] = math.nan, math.inf, -math.inf
    return logits


def _in_a_wider_row() -> Tensor:
    return gaussian(5000)[..., 100:4500]


def _vocabulary_first() -> Tensor:
    return gaussian(700).permute(2, 0, 1).contiguous().permute(1, 2, 0)


def _batch_first() -> Tensor:
    return gaussian(700).transpose(0, 1).contiguous().transpose(0, 1)


CASES: dict[str, Callable[[], Case]] = {
    "bfloat16": lambda: case(gaussian(2 * STRETCH + 1813)),
    "float16": lambda: case(gaussian(2 * STRETCH + 1813, torch.float16)),
    "float32": lambda: case(gaussian(2 * STRETCH + 1813, torch.float32)),
    "hot": lambda: case(gaussian(STRETCH + 3), temperature=1.7),
    "cold": lambda: case(gaussian(STRETCH + 3, torch.float32), temperature=0.3),
    "whole_stretches": lambda: case(gaussian(2 * STRETCH)),
    "less_than_a_stretch": lambda: case(gaussian(37)),
    "one_token": lambda: case(gaussian(1)),
    "rising": lambda: case(_ramp(-40.0, 40.0)),
    "falling": lambda: case(_ramp(40.0, -40.0)),
    "all_negative": lambda: case(gaussian(STRETCH + 11, torch.float32) - 1e4),
    "large": lambda: case(1e4 * gaussian(300, torch.float32)),
    "flat": lambda: case(torch.zeros(SEQUENCE, BATCH, 5000).bfloat16()),
    "in_place": lambda: case(gaussian(STRETCH + 17), temperature=0.7, overwrite=True),
    "in_place_float32": lambda: case(gaussian(STRETCH + 17, torch.float32), temperature=0.7, overwrite=True),
    "minus_infinity": lambda: case(_with_minus_infinity()),
    "not_finite_without_gradient": lambda: case(_without_gradient_not_finite(), overwrite=True),
    "in_a_wider_row": lambda: case(_in_a_wider_row()),
    "in_a_wider_row_in_place": lambda: case(_in_a_wider_row(), overwrite=True),
    "vocabulary_first": lambda: case(_vocabulary_first(), overwrite=True),
    "batch_first": lambda: case(_batch_first(), overwrite=True),
}

COPIED = ("vocabulary_first", "batch_first")
"""Their rows are no view of the logits: what is overwritten is a copy."""

NUM_SLICES = 3


def slices() -> tuple[Tensor, Tensor]:
    """(logits [rows, vocab], tokens [rows]) to be cut into NUM_SLICES equal parts. One row has no slice but the last,
    in others the highest logit or the token are in the first, the middle, the last."""
    logits = gaussian(NUM_SLICES * 1500, torch.float32).flatten(0, 1)
    logits[0, 3], logits[1, 1502], logits[2, 4000] = 50.0, 60.0, 70.0
    logits[3, :3000] = -math.inf
    return logits, torch.tensor([0, 1499, 1500, 4000, 2999, 4499])


def assert_values(case: Case, logprobs: Tensor, entropy: Tensor) -> None:
    """Both float32 [sequence, batch], against their definitions in float64; NaN where these are NaN."""
    exact = torch.log_softmax(case.logits.double() / case.temperature, -1)
    probability = exact.exp()
    exact_entropy = -torch.where(probability > 0, probability * exact, 0).sum(-1)
    exact_entropy = torch.where(exact.isnan().any(-1), math.nan, exact_entropy)
    picked = exact.gather(-1, case.tokens[..., None])[..., 0]
    for found, wanted in ((logprobs, picked), (entropy, exact_entropy)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=_exponent_error(case), equal_nan=True)


def assert_gradient(case: Case, gradient: Tensor) -> None:
    """[sequence, batch, vocab] in the logits' dtype, against its definition in float64; 0 where upstream is."""
    assert gradient.dtype == case.logits.dtype
    probability = torch.softmax(case.logits.double() / case.temperature, -1)
    one_hot = case.tokens[..., None] == torch.arange(case.logits.shape[-1])
    upstream = case.upstream.double()[..., None] / case.temperature
    wanted = torch.where(upstream == 0, 0, upstream * (one_hot.double() - probability))
    precision = torch.finfo(case.logits.dtype)
    error = 2 * _exponent_error(case)  # of the exponent and of the normalizer
    cancelled = torch.where(one_hot, error * upstream.abs(), 0)  # 1 - p, where p is near 1
    subnormal = max(precision.smallest_normal * precision.eps, 1e-37)  # exponentials below a normal float32 are lost
    bound = (precision.eps + error) * wanted.abs() + cancelled + subnormal
    assert bool(((gradient.double() - wanted).abs() <= bound).all())


def _exponent_error(case: Case) -> float:
    """In nats: four roundings of the largest finite |z / T|, of the entropy's range and of 1."""
    largest = float(case.logits.double().nan_to_num(0, 0, 0).abs().max()) / case.temperature
    return 4 * U * (largest + math.log(case.logits.shape[-1]) + 1)
