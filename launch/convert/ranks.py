"""One rank of `convert hf-to-megatron`: load this rank's share of the HF folder, save it with the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.run.processes import run_child
from megatron_bridge.hf.headers import DTYPES
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.parallel.layout import Layout, initialize
from pipeline.child_process import die_with_parent
from pipeline.config.recipe import LearnerSection
from pipeline.data.run_directory import RunDirectory


def write(run: RunDirectory) -> None:
    """Body of one rank; job.json names source, out, dtype and the learner's sizes."""
    import torch

    from megatron_bridge.checkpoint import weights_only
    from megatron_bridge.model.build import build_chunks
    from megatron_bridge.weights.convert import load_hf

    job = json.loads((run.path / "job.json").read_text(encoding="utf-8"))
    section = LearnerSection.model_validate(job["learner"])
    layout, source = Layout.of(section), Path(job["source"])
    initialize(layout, 0, section.step_deadline_s)
    config = ModelConfig.from_hf(read_hf_config(source))
    chunks = build_chunks(config, layout, getattr(torch, DTYPES[job["dtype"]]), 1.0)
    load_hf(chunks, config, source)
    weights_only.save(Path(job["out"]), chunks)


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "conversion", lambda: write(directory))
