"""The ESS controller on the real engine and the real learner: an engine changes its quant map, and a learner that is
killed between the decision and what follows from it carries the decision out once."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.control.files import ControlFiles
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.quant_maps import digest_of, read_quant_map
from pipeline.data.run_directory import RunDirectory, unfenced
from tests.support.processes import with_words
from tests.support.runs import ROOT, environment, evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.slow, pytest.mark.loop, pytest.mark.timeout(900)]
STEPS = 9


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """FP8 rollouts under a floor that they miss by little, so that groups are promoted after a few steps."""
    make_recipe(
        tmp_path,
        make_model(tmp_path / "model"),
        "c",
        run=dict(name="c", steps=STEPS),
        rollout=dict(precision="fp8_block", prompts_per_batch=4, group_size=4, max_new_tokens=12, context_tokens=64),
        learner=dict(micro_batch_tokens=256, optimizer=dict(lr=1e-3, warmup_steps=0)),
        controller=dict(ess_floor=0.9999, cooldown_steps=5, evidence_tokens=200),
    )
    return RunDirectory(tmp_path / "runs" / "c")


def test_killed_between_decision_and_action_it_acts_once(run: RunDirectory) -> None:
    files = ControlFiles(run.control, unfenced)
    command = [sys.executable, "-m", "launch.cli", "train", str(run.path.parents[1] / "c.yaml"), "--json"]
    with (run.path.parents[1] / "out").open("w") as out:
        supervisor = psutil.Popen(command, cwd=ROOT, env=environment(), stdout=out, stderr=out)
        try:
            record = None
            give_up = time.monotonic() + 400
            while record is None or record.decision is None:
                assert supervisor.poll() is None, Path(out.name).read_text(encoding="utf-8")
                assert time.monotonic() < give_up, "no decision was made"
                time.sleep(0.01)
                record = files.newest() if run.control.exists() else None
            ranks = with_words(supervisor.children(recursive=True), "learn_rank")
            for rank in ranks:
                rank.kill()
            published = run.published_version()
            assert ranks
            assert published == record.step, "killed before the version that the decision is for"
            assert supervisor.wait(600) == 0, Path(out.name).read_text(encoding="utf-8")
        finally:
            if supervisor.is_running():
                supervisor.terminate()
                supervisor.wait(60)
    (decided,) = files.decisions()
    assert decided == record
    assert decided.decision is not None
    assert decided.decision.cause == "quantization"
    assert len(read_events(run.path, "restarted")) >= 1
    assert [path.name for path in sorted(run.quant_maps.glob("*.yaml"))] == ["000000.yaml", "000001.yaml"]
    served = {
        digest_of(read_quant_map(folder)) for folder in run.policies.glob("[0-9]*") if int(folder.name) > record.step
    }
    assert len(served) == 1
    metrics = read_metrics(run.path)
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert metrics[-1]["ess"] > metrics[record.step]["ess"]
    replayed = evenkeel_json("train", "--replay", run.path)
    assert replayed["bit_identical"], json.dumps(replayed)
    assert ControlFiles(RunDirectory(Path(replayed["replay"])).control, unfenced).decisions() == [decided]
