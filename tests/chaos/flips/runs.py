"""The run whose files are damaged: trained once, by the real programs, and then given what only larger runs have."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from launch.roles.base import Rendezvous
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.membership import Member
from pipeline.data.quant_maps import NumberedMaps
from pipeline.data.run_directory import RunDirectory
from precision.controller.policy import Evidence, State
from precision.formats.quant_map import QuantMapFile
from tests.support.runs import evenkeel, make_model, make_recipe

STEPS = 4


def real_run(folder: Path) -> Path:
    """Its directory; trained unless an earlier call did."""
    folder = folder.absolute()
    run = folder / "runs" / "flips"
    if not (folder / "COMPLETE").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        recipe = make_recipe(
            folder,
            make_model(folder / "model"),
            "flips",
            run=dict(name="flips", root=str(folder / "runs"), steps=STEPS),
            schedule=dict(kind="staged", updates_per_stage=2),
            rollout=dict(
                precision="fp8_block", prompts_per_batch=4, group_size=4, max_new_tokens=12, context_tokens=64
            ),
            evaluation=dict(every=2, prompts=4, samples=2),
        )
        done = evenkeel("train", recipe)
        assert done.returncode == 0, done.stderr
        complete(run)
        (folder / "COMPLETE").touch()
    return run


def complete(path: Path) -> None:
    """Write, by the product's own writers, what this run has not: old log-probabilities, the records and the map of a
    controller, members and a rendezvous."""
    run = RunDirectory(path)
    for step in range(2):
        learner = run.learner_logprobs(step)
        assert learner is not None
        run.write_logprobs(step, np.asarray(learner, np.float32), old=True)
    record = ControlRecord(step=0, evidence=Evidence(step=0, loss=0.25), state=State())
    ControlFiles(run.control, run.fence).create(record)
    NumberedMaps(run.quant_maps, run.fence).write(1, QuantMapFile(base="fp8_block"))
    run.membership().announce(Member(0, "http://127.0.0.1:30000", started=1))
    run.membership().announce_router("http://127.0.0.1:30001")
    Rendezvous(epoch=1, host="127.0.0.1", port=29500, nodes=1).write(path / "learner.json")
