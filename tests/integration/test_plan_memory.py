"""The planner's memory model against a real learner process: resident memory of two models, float32 on a CPU.

float32 on a CPU differs from bfloat16 on a GPU: 4 bytes of parameters, 4 of gradients, 8 of Adam's moments and no main
copies, 16 in all (with one data parallel rank the distributed optimizer has nobody to share with, so it is the same
with and without); Megatron's own layers keep more than fused ones; there is no CUDA context. glibc is told to hand
large blocks back at once, as CUDA's caching allocator would reuse them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from launch.convert.new_model import new_model
from launch.plan.footprint import Footprint, Workload, worst_footprint
from megatron_bridge.hf.model_config import ModelConfig
from pipeline.config.recipe import LearnerSection

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "workers" / "memory_worker.py"
TOLERANCE = 0.10
HANDS_BACK = dict(MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="0")
ALPHABET = "".join(chr(0x4E00 + index) for index in range(8000))
"""A character-level tokenizer with many characters: logits and embedding are to count."""


@dataclass(frozen=True)
class Case:
    hidden: int
    layers: int
    rows: int
    distributed: bool
    width: int = 256

    @property
    def section(self) -> LearnerSection:
        return LearnerSection(
            precision="fp32",
            micro_batch_tokens=self.rows * self.width,
            distributed_optimizer=self.distributed,
            overlap_grad_reduce=self.distributed,
        )


SMALL = Case(hidden=512, layers=12, rows=4, distributed=True)
LARGE = Case(hidden=768, layers=12, rows=1, distributed=False)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def run(case: Case, folder: Path) -> tuple[Footprint, dict[str, int]]:
    """(predicted, measured bytes)."""
    model = folder / f"{case.hidden}"
    heads = case.hidden // 64
    new_model(
        model,
        hidden=case.hidden,
        layers=case.layers,
        heads=heads,
        kv_heads=heads // 2,
        ffn=4 * case.hidden,
        characters=ALPHABET,
    )
    done = subprocess.run(
        [sys.executable, str(WORKER), str(model), str(case.rows), str(case.width), case.section.model_dump_json()],
        env={**os.environ, **HANDS_BACK, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shape = ModelConfig.from_hf(json.loads((model / "config.json").read_text()))
    work = Workload(
        tokens=case.rows * case.width,
        count=1,
        kernels="local",
        runtime_bytes=0,
        fragmentation=0.0,
    )
    return worst_footprint(shape, case.section, work), json.loads(done.stdout.splitlines()[-1])


def test_resident_memory_is_within_a_tenth(folder: Path) -> None:
    """Also peak less what stays: activations, logits and scratch alone."""
    predicted, measured = run(SMALL, folder)
    assert predicted.held.total == pytest.approx(55.4e6, rel=0.01)
    assert measured["built"] == pytest.approx(predicted.parameters + predicted.gradients, rel=TOLERANCE)
    assert measured["stepped"] == pytest.approx(predicted.static, rel=TOLERANCE)
    assert measured["peak"] == pytest.approx(predicted.total, rel=TOLERANCE)
    assert measured["peak"] - measured["stepped"] == pytest.approx(predicted.training, rel=TOLERANCE)


@pytest.mark.repeated
def test_a_larger_model_costs_what_is_predicted(folder: Path) -> None:
    """The difference of two models is free of what every process has (code pages, thread buffers)."""
    (small, small_measured), (large, large_measured) = run(SMALL, folder), run(LARGE, folder)
    found = large_measured["stepped"] - small_measured["stepped"]
    assert found == pytest.approx(large.static - small.static, rel=0.03)
