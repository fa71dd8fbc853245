from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from precision.mismatch.attribution import TERMS, TokenScores, attribute, by_bucket, suspects, term_statistics

NAMES = ("now", "then", "quantized", "routed", "prefill", "decode")


def random_scores(seed: int, tokens: int = 500, absent: tuple[str, ...] = ()) -> TokenScores:
    """float32 numbers, as learners and engines give them, in float64."""
    draw = torch.Generator().manual_seed(seed)
    base = -3 * torch.rand(tokens, generator=draw)
    noise = {name: (base + 0.1 * torch.randn(tokens, generator=draw)).double() for name in NAMES}
    return TokenScores(**{name: value for name, value in noise.items() if name not in absent})


@pytest.mark.parametrize("absent", [(), ("routed",), ("quantized", "routed"), ("then", "routed", "prefill")])
def test_terms_add_up_token_by_token(absent: tuple[str, ...]) -> None:
    scores = random_scores(0, absent=absent)
    terms = scores.terms()
    assert tuple(terms) == TERMS
    summed = sum(terms.values(), torch.zeros_like(scores.now))
    assert torch.equal(summed, scores.now - scores.decode)  # float32 inputs: not even the last bit differs
    result = attribute(scores)
    assert result.largest_error == 0.0
    assert sum(term.mean for term in result.terms.values()) == pytest.approx(result.total.mean, abs=1e-12)
    assert sum(term.share for term in result.terms.values()) == pytest.approx(1.0, abs=1e-12)


def test_a_score_that_was_not_taken_has_a_term_of_exactly_zero() -> None:
    scores = random_scores(1, absent=("quantized", "routed"))
    assert scores.then is not None
    assert scores.prefill is not None
    terms = scores.terms()
    assert not terms["quantization"].any()
    assert not terms["routing"].any()
    assert torch.equal(terms["kernels"], scores.then - scores.prefill)
    assert attribute(scores).terms["quantization"].ess == pytest.approx(1.0)


@pytest.mark.parametrize("moved", range(1, 6))
def test_one_cause_moves_one_term(moved: int) -> None:
    same = random_scores(2).now
    shift = 0.2 * torch.sin(torch.arange(500.0, dtype=torch.float64))
    scores = TokenScores(**{name: same - shift if at >= moved else same for at, name in enumerate(NAMES)})
    result = attribute(scores)
    for at, (name, term) in enumerate(result.terms.items(), start=1):
        assert (term.share, term.max_abs > 0) == pytest.approx((1.0, True) if at == moved else (0.0, False)), name


def test_statistics_against_numpy() -> None:
    term = random_scores(3).total
    values = term.numpy()
    total = random_scores(4).total
    found = term_statistics(term, total)
    ratios = np.exp(values)
    assert found.ess == pytest.approx(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()), rel=1e-9)
    assert found.k3 == pytest.approx((ratios - 1 - values).mean(), rel=1e-9)
    assert found.share == pytest.approx((values * total.numpy()).sum() / (total.numpy() ** 2).sum(), rel=1e-12)
    assert found.mean_positive + found.mean_negative == pytest.approx(found.mean, abs=1e-15)
    assert found.mean_positive - found.mean_negative == pytest.approx(found.mean_abs, abs=1e-15)
    assert found.positive_share == (values > 0).mean()
    for order, value in found.quantiles.items():
        assert value == pytest.approx(np.quantile(values, float(order) / 100), abs=1e-14)


def test_one_token_and_agreement() -> None:
    one = torch.tensor([-1.5], dtype=torch.float64)
    result = attribute(TokenScores(now=one, decode=one.clone()))
    assert (result.total.share, result.total.ess, result.total.k3) == (0.0, pytest.approx(1.0), 0.0)
    assert result.total.quantiles["50"] == 0.0


def test_what_is_refused() -> None:
    one, two = torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="shapes"):
        TokenScores(now=one, decode=two)
    with pytest.raises(ValueError, match="shapes"):
        TokenScores(now=one[:0], decode=one[:0])
    with pytest.raises(ValueError, match="float64"):
        TokenScores(now=one.float(), decode=one)
    with pytest.raises(FloatingPointError, match="kernels"):
        TokenScores(now=one, prefill=one - math.inf, decode=one - math.inf).terms()


def test_buckets_by_hand() -> None:
    term = torch.tensor([1.0, -3.0, 5.0], dtype=torch.float64)
    found = by_bucket({"kernels": term}, torch.tensor([0, 0, 2]), 3)["kernels"]
    assert (found[0], found[2]) == (2.0, 5.0)
    assert math.isnan(found[1])


def test_a_large_term_that_another_cancels_is_measured() -> None:
    """A tool against wrong weights must not stop at wrong weights: -5 by the learner, -60 and -10 by the engine."""
    scores = TokenScores(now=float64([-5.0, -1.0]), prefill=float64([-60.0, -1.0]), decode=float64([-10.0, -1.0]))
    found = attribute(scores)
    assert found.terms["kernels"].max_abs == 55.0
    assert found.terms["decoding"].max_abs == 50.0
    assert found.terms["kernels"].ess == pytest.approx(0.5)
    assert found.largest_error == 0.0
    assert math.isfinite(found.terms["kernels"].k3)
    far = attribute(TokenScores(now=float64([-1.0, -1.0]), decode=float64([-2000.0, -1.0])))
    assert far.total.ess == pytest.approx(0.5)
    assert math.isfinite(far.total.k3)


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_planted_fault_comes_first_with_its_amount() -> None:
    draw = torch.Generator().manual_seed(0)
    effects = {f"module {index}": torch.randn(400, generator=draw, dtype=torch.float64) for index in range(20)}
    noise = 0.3 * torch.randn(400, generator=draw, dtype=torch.float64)
    found = suspects(-2.5 * effects["module 7"] + noise, effects, {"module 7": -10.0})
    assert found[0].name == "module 7"
    assert found[0].amount == pytest.approx(-2.5, rel=0.05)
    assert found[0].explained == pytest.approx(2.5**2 / (2.5**2 + 0.3**2), abs=0.02)
    assert found[1].explained < 0.1


def test_the_opposite_of_a_fault_is_not_that_fault() -> None:
    """An engine with newer weights than the learner's does not hold older ones, and no scale is below 0."""
    effect = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    for amount, explained in ((-0.5, 1.0), (-1.0, 0.0), (-1.5, 0.0), (0.5, 1.0)):
        (found,) = suspects(amount * effect, {"it": effect}, {"it": -1.0})
        assert (found.explained, found.amount) == (pytest.approx(explained), pytest.approx(amount))
    assert suspects(-effect, {"it": effect})[0].explained == 0.0


def test_an_exact_multiple_is_explained_to_the_end() -> None:
    effect = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    (found,) = suspects(3 * effect, {"it": effect})
    assert (found.explained, found.amount) == (pytest.approx(1.0), pytest.approx(3.0))
