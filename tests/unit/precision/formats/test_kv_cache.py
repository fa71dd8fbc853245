"""The FP8 cache: a scale from a calibration, saturation beyond it, its bound, and no silent default."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precision.formats.casts import error_bound
from precision.formats.formats import E4M3
from precision.formats.kv_cache import calibrated_scale, fake_quantize_cache, require_calibrated
from tests.support.examples import examples


def test_a_scale_by_hand() -> None:
    assert calibrated_scale(448.0, margin=1.0) == 1.0
    assert calibrated_scale(4.48) == pytest.approx(0.015)
    assert fake_quantize_cache(torch.tensor([17.0, -900.0]), 1.0).tolist() == [16.0, -448.0]
    assert fake_quantize_cache(torch.tensor([17.0, -900.0]), 4.0).tolist() == [17.0 - 1.0, -896.0]
    for largest, margin in ((0.0, 1.5), (float("inf"), 1.5), (float("nan"), 1.5), (1.0, 0.5)):
        with pytest.raises(ValueError, match="largest magnitude is"):
            calibrated_scale(largest, margin)


@given(st.integers(0, 10_000), st.floats(1e-3, 1e3), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=examples(40))
def test_the_bound(seed: int, largest: float, dtype: torch.dtype) -> None:
    """For what a calibration has seen, and up to its margin."""
    values = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
    values = (values / values.abs().max() * largest * 1.4).to(dtype)
    scale = calibrated_scale(largest)
    error = (fake_quantize_cache(values, scale).double() - values.double()).abs()
    rounded_back = torch.finfo(dtype).eps * values.double().abs()
    assert bool((error <= error_bound(values, E4M3, scale) + rounded_back).all())


def test_gradients_pass_through() -> None:
    values = torch.tensor([1.1, 900.0], requires_grad=True)
    fake_quantize_cache(values, 1.0).backward(torch.tensor([2.0, 3.0]))
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, 3.0]


def test_the_silent_default_is_named() -> None:
    require_calibrated({"model.layers.0.self_attn.k": 0.02})
    for scale in (1.0, 0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"1 of 2 scales .* are not calibrated, first b"):
            require_calibrated({"a": 0.5, "b": scale})
