"""P3O against an independent NumPy evaluation on stored batches.

`batches/*.npz` hold random inputs (float32, as a learner sees them), and the float64 loss and gradient that the code
below gave for them when they were written. The code shares nothing with the product: plain loops, gradients worked out
on paper. `python tests/golden/test_p3o_golden.py` writes the files again; do so only when the definition changes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from precision.objectives.objective import StepContext, TokenBatch
from precision.objectives.p3o import P3O
from precision.ratios import RatioSums

BATCHES = Path(__file__).parent / "batches"
NAMES = ("on_policy", "padded", "stale", "heavy_tailed")
ESTIMATORS: tuple[Literal["official", "importance"], ...] = ("official", "importance")
Array = NDArray[Any]


def reference_ess(inputs: dict[str, Array]) -> float:
    """S1^2 / (N (S2 + 1e-8)) over the tokens under the mask."""
    learner, sampler, mask = (inputs[name] for name in ("logprobs", "sampler_logprobs", "mask"))
    ratios = [math.exp(float(learner[i]) - float(sampler[i])) for i in np.ndindex(mask.shape) if mask[i]]
    return sum(ratios) ** 2 / (len(ratios) * (sum(r * r for r in ratios) + 1e-8))


def reference(inputs: dict[str, Array], ess: float, estimator: str) -> tuple[float, Array]:
    """Loss, and its gradient in the learner's logprobs, token by token in Python floats.

    d/dlogp of -sg(w) A logp is -w A. For the anchor, l = logp - logb, rho = e^l:
    official:   K = l + e^c - 1 with c = clip(-l, -10, 10); slope 1 - e^c
    importance: K = rho l - rho + 1, dK/dl = rho l + rho - rho = rho l, and rho is capped: slope min(rho, e) l
    """
    mask = inputs["mask"]
    count = int(mask.sum())
    loss, gradient = 0.0, np.zeros(mask.shape)
    for i in np.ndindex(mask.shape):
        if not mask[i]:
            continue
        logp, logb, advantage = (float(inputs[name][i]) for name in ("logprobs", "sampler_logprobs", "advantages"))
        log_ratio = logp - logb
        ratio = math.exp(log_ratio)
        weight = ratio if ratio < ess else ess
        if estimator == "official":
            exponential = math.exp(min(10.0, max(-10.0, -log_ratio)))
            anchor, slope = log_ratio + exponential - 1, 1 - exponential
        else:
            anchor, slope = ratio * log_ratio - ratio + 1, weight * log_ratio
        loss += (-weight * advantage * logp + (1 - ess) * anchor) / count
        gradient[i] = (-weight * advantage + (1 - ess) * slope) / count
    return loss, gradient


def load(name: str) -> dict[str, Array]:
    with np.load(BATCHES / f"{name}.npz", allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


def evaluate(
    stored: dict[str, Array], objective: P3O, ess: float | None, dtype: torch.dtype
) -> tuple[float, Array, dict[str, float]]:
    logprobs = torch.from_numpy(stored["logprobs"]).to(dtype).requires_grad_()
    batch = TokenBatch(
        rollout_logprobs=torch.from_numpy(stored["sampler_logprobs"]).to(dtype),
        advantages=torch.from_numpy(stored["advantages"]).to(dtype),
        mask=torch.from_numpy(stored["mask"]),
    )
    loss, sums = objective.loss(logprobs, batch, StepContext(num_tokens=int(stored["mask"].sum()), step_ess=ess))
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.numpy(), {name: float(value) for name, value in sums.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_reference_reproduces_what_is_stored(name: str, estimator: str) -> None:
    stored = load(name)
    assert reference_ess(stored) == pytest.approx(float(stored["ess"]), rel=1e-12)
    loss, gradient = reference(stored, float(stored["ess"]), estimator)
    assert loss == pytest.approx(float(stored[f"{estimator}_loss"]), rel=1e-12)
    np.testing.assert_allclose(gradient, stored[f"{estimator}_gradient"], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scope", ["step", "micro_batch"])
def test_p3o_matches(
    name: str,
    estimator: Literal["official", "importance"],
    dtype: torch.dtype,
    scope: Literal["step", "micro_batch"],
) -> None:
    stored = load(name)
    tensors = (torch.from_numpy(stored[field]) for field in ("logprobs", "sampler_logprobs", "mask"))
    ess = RatioSums.from_logprobs(*tensors).statistics()["ess"]
    assert ess == pytest.approx(float(stored["ess"]), rel=1e-12)
    objective = P3O(ess_scope=scope, kl_estimator=estimator)
    loss, gradient, _ = evaluate(stored, objective, ess if scope == "step" else None, dtype)
    tolerance = 1e-10 if dtype is torch.float64 else 2e-5
    assert loss == pytest.approx(float(stored[f"{estimator}_loss"]), rel=tolerance)
    largest = float(np.abs(stored[f"{estimator}_gradient"]).max())
    np.testing.assert_allclose(
        gradient, stored[f"{estimator}_gradient"], rtol=tolerance, atol=tolerance * 1e-2 * largest
    )
    assert (gradient[~stored["mask"]] == 0).all()


def test_batches_hold_what_their_names_say() -> None:
    """So that a regenerated file cannot quietly stop covering the hard cases."""
    ess = {name: float(load(name)["ess"]) for name in NAMES}
    assert ess["on_policy"] > 0.9999999
    assert 0.95 < ess["padded"] < 0.999
    assert 0.3 < ess["stale"] < 0.9
    assert ess["heavy_tailed"] < 0.1
    padded = load("padded")
    assert not np.isfinite(padded["sampler_logprobs"][~padded["mask"]]).all()
    heavy = load("heavy_tailed")
    log_ratios = (heavy["logprobs"] - heavy["sampler_logprobs"])[heavy["mask"]]
    assert log_ratios.min() < -10  # beyond the clip of the official estimator, on both sides
    assert log_ratios.max() > 10


def make_inputs(name: str) -> dict[str, Array]:
    generator = np.random.default_rng(NAMES.index(name))
    shape = (4, 12)
    sampler = np.log(generator.uniform(0.05, 1.0, shape))
    noise = generator.standard_normal(shape)
    if name == "heavy_tailed":
        noise = generator.standard_t(1.5, shape)
        noise[0, :2] = -11.5, 11.0
        sampler[0, 1] = -14.0  # a token that the sampler gave 1e-6 and the learner likes
    spread = {"on_policy": 0.0, "padded": 0.1, "stale": 0.8, "heavy_tailed": 1.0}[name]
    lengths = generator.integers(3, shape[1], shape[0])
    mask = np.arange(shape[1]) < lengths[:, None]
    advantages = np.repeat(generator.standard_normal((shape[0], 1)), shape[1], axis=1)
    inputs = {
        "logprobs": (sampler + spread * noise).astype(np.float32),
        "sampler_logprobs": sampler.astype(np.float32),
        "advantages": advantages.astype(np.float32),
    }
    if name == "padded":
        inputs["logprobs"][~mask] = -120.0
        inputs["sampler_logprobs"][~mask] = -np.inf
        inputs["advantages"][~mask] = np.nan
    return {**inputs, "mask": mask}


def write_batches() -> None:
    BATCHES.mkdir(exist_ok=True)
    for name in NAMES:
        inputs = make_inputs(name)
        ess = reference_ess(inputs)
        outputs: dict[str, Any] = {"ess": np.float64(ess)}
        for estimator in ESTIMATORS:
            loss, gradient = reference(inputs, ess, estimator)
            outputs |= {f"{estimator}_loss": np.float64(loss), f"{estimator}_gradient": gradient}
        np.savez_compressed(BATCHES / f"{name}.npz", **inputs, **outputs)


if __name__ == "__main__":
    write_batches()
