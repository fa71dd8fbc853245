"""Kernels, copies and waits that one more micro-batch adds to a pass of the real learner, counted as on a GPU.

Prints one JSON line. The learner has Megatron's own layers in float32, on the counted device of tests.support; what a
pass does once, however many micro-batches it has, is left out: it is the same in passes over two and over three.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from launch.convert.new_model import new_model
from megatron_bridge.step import passes
from pipeline.config.recipe import LearnerSection
from pipeline.data.batch import Batch, LogprobContract, Response, given_batch
from precision.objectives.p3o import P3O
from tests.bench.figures import tell
from tests.support import quiet_megatron  # noqa: F401
from tests.support.counted_device import Counts, counted, counting_learner

CONTRACT = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="")
PROMPT_TOKENS, ROW_LENGTHS = 3, (40, 33, 17, 9)
"""Tokens of a prompt, and of the rows of a micro-batch."""


class PassOverError(Exception):
    """Leaves an update when its pass has been counted: the optimizer's kernels are Apex's."""


def batch_of(vocabulary: int, micro_batches: int) -> Batch:
    draw = np.random.default_rng(0)
    responses = [
        Response(draw.integers(0, vocabulary, n - PROMPT_TOKENS).tolist(), [-1.0] * (n - PROMPT_TOKENS), reward=1.0)
        for n in ROW_LENGTHS * micro_batches
    ]
    return given_batch(0, [(draw.integers(0, vocabulary, PROMPT_TOKENS).tolist(), responses)], CONTRACT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    chosen = parser.parse_args()
    found: dict[str, list[Counts]] = dict(score=[], train=[])
    score, train = passes.score, passes.train

    def counted_score(*arguments: Any, **named: Any) -> Any:
        with counted() as counts:
            scored = score(*arguments, **named)
        found["score"].append(counts)
        return scored

    def counted_train(*arguments: Any, **named: Any) -> Any:
        with counted() as counts:
            train(*arguments, **named)
        found["train"].append(counts)
        raise PassOverError

    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as scratch:
        folder = Path(scratch) / "model"
        shape = dict(hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=96)
        new_model(folder, characters="0123456789", layers=chosen.layers, **shape)
        section = LearnerSection(precision="fp32", micro_batch_tokens=sum(ROW_LENGTHS), distributed_optimizer=False)
        with (
            patch.object(passes, "score", counted_score),
            patch.object(passes, "train", counted_train),
            counting_learner(folder, section, P3O(), temperature=1.0, seed=0, total_steps=10) as learner,
        ):
            for micro_batches in (1, 2, 3):  # the first also makes what stays
                batch = batch_of(learner.model_config.vocab_size, micro_batches)
                scored = learner.score(batch)
                with suppress(PassOverError):
                    learner.update(batch, np.ones(batch.num_samples, np.float32), scored)
    tell({name: added(*counts[1:]) for name, counts in found.items()})


def added(two: Counts, three: Counts) -> dict[str, Any]:
    """What the third micro-batch added, and of what."""
    found: dict[str, Any] = {}
    for kind in ("kernels", "copies", "waits"):
        difference: Counter[str] = getattr(three, kind) - getattr(two, kind)
        found |= {kind: difference.total(), f"{kind}_of": dict(difference.most_common())}
    return found


if __name__ == "__main__":
    main()
