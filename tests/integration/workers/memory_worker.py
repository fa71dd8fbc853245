"""One learner process on a CPU that says how its memory grows: `memory_worker.py MODEL ROWS WIDTH LEARNER_JSON`.

Prints bytes above what the imports had taken: built (model and optimizer), stepped (after a step, when optimizer state
exists), peak (the highest point of a second step).
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np

warnings.filterwarnings("ignore")

from megatron_bridge.learner import MegatronLearner  # noqa: E402
from megatron_bridge.parallel import cpu_backend  # noqa: E402
from pipeline.config.recipe import LearnerSection  # noqa: E402
from pipeline.data.batch import Batch, LogprobContract  # noqa: E402
from precision.objectives.clipped import Clipped  # noqa: E402


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def forget_peak() -> None:
    """VmHWM starts again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def batch(index: int, rows: int, width: int) -> Batch:
    """Rows of `width` predicted tokens each."""
    rng = np.random.default_rng(index)
    return Batch(
        index=index,
        tokens=rng.integers(0, 300, rows * (width + 1)).astype(np.int32),
        sample_offsets=np.arange(rows + 1, dtype=np.int64) * (width + 1),
        prompt_lengths=np.ones(rows, np.int32),
        group=np.arange(rows, dtype=np.int64) // 2,
        problem=np.full(rows, -1, np.int64),
        rollout_logprobs=np.full(rows * width, -9.0, np.float32),
        policy_version=np.zeros(rows * width, np.int32),
        loss_mask=np.ones(rows * width, np.bool_),
        reward=np.zeros(rows, np.float32),
        reward_parts={},
        finish=np.zeros(rows, np.uint8),
        truncated=np.zeros(rows, np.bool_),
        engine=np.zeros(rows, np.uint16),
        queued_s=np.zeros(rows, np.float32),
        generated_s=np.zeros(rows, np.float32),
        contract=LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256=""),
        dropped=(),
        next_group=rows,
        recipe_sha256="",
    )


def main(model: Path, rows: int, width: int, section: LearnerSection) -> None:
    cpu_backend.install()  # whose imports are not the model's
    base = status("VmRSS")
    learner = MegatronLearner.create(
        model, section, Clipped(clip_low=0.2, clip_high=0.2), temperature=1.0, seed=0, total_steps=2
    )
    built = status("VmRSS") - base
    advantages = np.linspace(-1.0, 1.0, rows).astype(np.float32)
    learner.update(batch(0, rows, width), advantages, None)
    stepped = status("VmRSS") - base
    forget_peak()
    learner.update(batch(1, rows, width), advantages, None)
    print(json.dumps(dict(built=built, stepped=stepped, peak=status("VmHWM") - base)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), LearnerSection.model_validate_json(sys.argv[4]))
