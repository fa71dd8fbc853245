"""Three steps with settings of learner.megatron; see test_megatron_settings.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from launch.verify.layout_ranks import TEMPERATURE, make_batch, three_steps, train, weights
from launch.verify.layouts import section
from megatron_bridge.hf.model_config import read_hf_config
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, check_layout, initialize, leave_layout
from megatron_bridge.step.host_weights import ReferencePolicy
from precision.objectives.p3o import P3O

Case = tuple[str, str, str, dict[str, Any]]
"""Name, model, layout, and fields of LearnerSection over those of the layout."""


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Megatron's offloading optimizer looks where a parameter is, once, when it is built: pretend that all are on a
    GPU but what it copies to the host itself. Megatron also asks for TE's version, though only its own code runs."""
    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        tensor.on_host = True  # type: ignore[attr-defined]
        return tensor

    def carried(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = method(tensor)
            return on_host(found) if hasattr(tensor, "on_host") else found

        return patch.object(torch.Tensor, name, call)

    def divided(self: Any, offload_fraction: float) -> Any:
        with (
            patch.object(torch.Tensor, "is_cuda", property(lambda tensor: not hasattr(tensor, "on_host"))),
            patch.object(torch.Tensor, "cpu", on_host),
            carried("detach"),
            carried("clone"),
            carried("float"),
            patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        ):
            return divide(self, offload_fraction)

    with (
        patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divided),
        patch.object(optimizer_config, "is_te_min_version", lambda _: True),
    ):
        yield


def measure(folder: Path, cases: list[Case]) -> dict[str, Any]:
    """Name → what `three_steps` found, and whether its checkpoint after two steps goes on alike."""
    with pretended_gpu():
        return {name: _measured(folder, name, *case) for name, *case in cases}


def _measured(folder: Path, name: str, model: str, layout: str, fields: dict[str, Any]) -> dict[str, Any]:
    chosen = type(section(layout)).model_validate(section(layout).model_dump() | fields)
    check_layout(read_hf_config(folder / model), chosen)
    initialize(Layout.of(chosen), seed=0, deadline_s=120)
    learner, resumed = (
        MegatronLearner(folder / model, chosen, P3O(), temperature=TEMPERATURE, total_steps=3) for _ in "12"
    )
    found: dict[str, Any] = {
        key: values.tolist() for key, values in three_steps(learner, folder / f"{name}.checkpoint", "saved").items()
    }
    resumed.load(folder / f"{name}.checkpoint")
    train(resumed, 2)
    found["resumed_alike"] = bool((weights(resumed) == weights(learner)).all())
    leave_layout()
    return found


def reference_after_a_step(folder: Path, layout: str, choices: list[dict[str, Any]]) -> list[list[float]]:
    """For each choice of fields: log-probabilities after a step, once a reference has come and gone at once after it,
    and whether the reference's are those before the step."""
    found = []
    for fields in choices:
        chosen = type(section(layout)).model_validate(section(layout).model_dump() | fields)
        initialize(Layout.of(chosen), seed=0, deadline_s=120)
        learner = MegatronLearner(folder / "four", chosen, P3O(), temperature=TEMPERATURE, total_steps=3)
        reference = ReferencePolicy(learner, folder / "four")
        batch = make_batch(0, learner.model_config.vocab_size)
        first = learner.logprobs(batch)
        train(learner, 0)
        same = (reference.logprobs(batch) == first).all()
        found.append([*learner.logprobs(batch).tolist(), float(same)])
        leave_layout()
    return found
