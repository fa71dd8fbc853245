"""One rank of `convert hf-to-megatron`: load this rank's share of the HF folder, save it with the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.processes import die_with_parent, run_child
from megatron_bridge.layout import Layout, initialise
from megatron_bridge.shape import ModelShape, read_hf_config
from pipeline.recipe import LearnerSection
from pipeline.rundir import RunDirectory


def write(run: RunDirectory) -> None:
    """Body of one rank; job.json names source, out, dtype and the learner's sizes."""
    from megatron_bridge import weight_checkpoint
    from megatron_bridge.model import build_chunks
    from megatron_bridge.tensor_files import DTYPES
    from megatron_bridge.weights import load_hf

    job = json.loads((run.path / "job.json").read_text())
    section = LearnerSection.model_validate(job["learner"])
    layout, source = Layout.of(section), Path(job["source"])
    initialise(layout, 0, section.step_deadline_s)
    shape = ModelShape.from_hf(read_hf_config(source))
    chunks = build_chunks(shape, layout, DTYPES[job["dtype"]], 1.0)
    load_hf(chunks, shape, source)
    weight_checkpoint.save(Path(job["out"]), chunks)


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "conversion", lambda: write(directory))
