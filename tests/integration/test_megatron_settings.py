"""Settings of learner.megatron on real process groups: each trains, saves and resumes, with the numbers of one process
without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.convert.new_model import new_model
from launch.verify.layouts import compare
from tests.integration.workers import settings_worker
from tests.support.ranks import run_ranks

TOLERANCE = 3e-6
SIZES: dict[str, Any] = dict(hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96)


def transformer(**settings: Any) -> dict[str, Any]:
    return dict(megatron=dict(transformer=settings))


OFFLOAD = dict(
    use_precision_aware_optimizer=True,
    optimizer_cpu_offload=True,
    optimizer_offload_fraction=1.0,
    pin_cpu_grads=False,
    pin_cpu_params=False,
)
ONE: list[settings_worker.Case] = [
    ("four", "four", "one", {}),
    ("five", "five", "one", {}),
    ("six", "six", "one", {}),
    ("deterministic", "four", "one×MB2", transformer(deterministic_mode=True)),
    (
        "recomputed",
        "four",
        "one",
        dict(recompute="selective") | transformer(recompute_modules=["core_attn", "mlp"]),
    ),
    ("bf16", "four", "one", dict(precision="bf16")),
    ("offloaded", "four", "one", dict(precision="bf16", megatron=dict(optimizer=OFFLOAD))),
]
TWO: list[settings_worker.Case] = [
    ("2 + 3 layers", "five", "PP2×MB2", transformer(num_layers_in_first_pipeline_stage=2)),
    (
        "1, 2 + 2, 1 layers",
        "six",
        "PP2×VPP2×MB2",
        transformer(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True),
    ),
    (
        "gathered in passes",
        "four",
        "DP2×MB2",
        dict(megatron=dict(ddp=dict(overlap_param_gather=True, bucket_size=9000))),
    ),
]
LIKE = {
    **dict.fromkeys(("deterministic", "recomputed", "gathered in passes"), "four"),
    "offloaded": "bf16",
    "2 + 3 layers": "five",
    "1, 2 + 2, 1 layers": "six",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("settings")
    for name, layers in (("four", 4), ("five", 5), ("six", 6)):
        new_model(root / name, layers=layers, **SIZES)
    return root


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, Any]]:
    (one,) = run_ranks(1, settings_worker.measure, folder, ONE)
    first, second = run_ranks(2, settings_worker.measure, folder, TWO)
    assert first == second
    return one | first


@pytest.mark.parametrize("case", LIKE)
def test_a_setting_trains_like_one_process_without_it(found: dict[str, dict[str, Any]], case: str) -> None:
    reference, other = (
        {name: np.array(found[which][name]) for name in ("logprobs", "loss", "grad_norm", "ess", "weight_change")}
        for which in (LIKE[case], case)
    )
    assert max(compare(reference, other).values()) <= TOLERANCE
    assert found[case]["resumed_alike"]


def test_weights_are_whole_where_passes_gather_them(folder: Path) -> None:
    gathers = dict(megatron=dict(ddp=dict(overlap_param_gather=True, bucket_size=9000)))
    for plain, gathered in run_ranks(2, settings_worker.reference_after_a_step, folder, "DP2×MB2", [{}, gathers]):
        assert plain == gathered
        assert plain[-1] == 1.0
