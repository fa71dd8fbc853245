"""`python -m tests.evidence.controller`: what the ESS controller does when two layers go bad in the middle of a run.

    with      the demo with a section `controller`      at half of the steps the FP8 rounding error of two
    without   the same without it                       layers grows tenfold, in engine and learner (emulation)

The real engine and the real learner, on a CPU. The fault is made by tests/evidence/layer_fault, from outside of the
product. Each run is resumed where it was killed. Writes docs/controller.svg and prints what was decided.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import yaml
from matplotlib.figure import Figure

from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.event_log import read_metrics
from pipeline.data.run_directory import RunDirectory, unfenced

ROOT = Path(__file__).parents[2]
FAULTY = ("model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.qkv_proj")
FACTOR = 10


def main() -> int:
    """Run both, at once, then draw them."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.controller", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT / "runs" / "controller", help="where run directories live")
    parser.add_argument("--model", type=Path, default=ROOT / "runs" / "models" / "demo", help="made by `make demo`")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32, help="of a batch")
    parser.add_argument("--floor", type=float, default=0.99)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "controller.svg")
    parser.add_argument("--draw-only", action="store_true", help="run nothing")
    options = parser.parse_args()
    fault_at = options.steps // 2
    if not options.draw_only:
        running = [_start(name, options, fault_at) for name in ("with", "without")]
        if any([process.wait() for process in running]):
            return 1
    _draw(options.root, fault_at, options.floor, options.out)
    print(_told(options.root, fault_at))
    return 0


def _start(name: str, options: argparse.Namespace, fault_at: int) -> subprocess.Popen[bytes]:
    recipe: dict[str, Any] = yaml.safe_load((ROOT / "pipeline" / "recipes" / "demo.yaml").read_text())
    recipe["run"] |= dict(name=name, root=str(options.root.absolute()), steps=options.steps)
    recipe["model"]["path"] = str(options.model.absolute())
    recipe["rollout"]["prompts_per_batch"] = options.prompts
    recipe["learner"] |= dict(tensor_parallel=1)
    recipe["learner"]["optimizer"]["lr"] = 2e-4
    recipe["evaluation"]["every"] = options.steps
    # So large a fault would otherwise take the engine out at the next publish, by the probe's bound.
    recipe["weights"] = dict(probe_max_gap_nats=10.0)
    if name == "with":
        recipe["controller"] = dict(ess_floor=options.floor, cooldown_steps=5, evidence_tokens=1024)
    options.root.mkdir(parents=True, exist_ok=True)
    file = options.root / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    trigger = RunDirectory(options.root / name).batches / f"{fault_at - 1:06d}.zarr.zip"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent / "layer_fault")]),
        "EVENKEEL_TEST_LAYER_FAULT": " ".join([str(FACTOR), *FAULTY]),
        "EVENKEEL_TEST_LAYER_TRIGGER": str(trigger.absolute()),
    }
    command = [sys.executable, "-P", "-m", "launch.cli", "train", str(file)]
    with (options.root / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)


def decided(root: Path) -> list[ControlRecord]:
    """What the controller decided, in order."""
    return ControlFiles(RunDirectory(root / "with").control, unfenced).decisions()


def _draw(root: Path, fault_at: int, floor: float, out: Path) -> None:
    lines = {name: read_metrics(root / name) for name in ("with", "without")}
    with mpl.rc_context(
        {"svg.hashsalt": "controller", "svg.fonttype": "none", "font.size": 9, "figure.facecolor": "white"}
    ):
        figure = Figure(figsize=(8.4, 5.4), layout="constrained")
        ess, reward = figure.subplots(2, 1, sharex=True)
        for name, color in (("without", "#d0692c"), ("with", "#2b6cb0")):
            steps = [line["step"] for line in lines[name]]
            for axes, metric in ((ess, "ess"), (reward, "reward_mean")):
                values = [line[metric] for line in lines[name]]
                axes.plot(steps, values, color=color, linewidth=1.6, label=f"{name} the controller")
        for axes in (ess, reward):
            axes.axvline(fault_at, color="#888888", linewidth=1, linestyle=":")
            axes.spines[["top", "right"]].set_visible(False)
        ess.axhline(floor, color="#888888", linewidth=0.8, linestyle="--")
        ess.set_ylim(-0.05, 1.08)
        ess.annotate(f"floor {floor:g}", (0, floor), (0, -12), textcoords="offset points", color="#666666")
        told = f"from here on: rounding error\nof two layers × {FACTOR}"
        ess.annotate(told, (fault_at, 0.1), (-6, 0), textcoords="offset points", color="#666666", ha="right")
        for record in decided(root):
            assert record.decision is not None
            ess.axvline(record.step, color="#2b6cb0", linewidth=1)
            where = dict(textcoords="offset points", color="#2b6cb0", ha="right")
            ess.annotate(record.decision.rung, (record.step, 0.75), (-30, 0), **where)
        ess.set_ylabel("token ESS of a batch")
        reward.set_ylabel("mean reward")
        reward.set_xlabel("step")
        reward.legend(loc="lower left", frameon=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, metadata={"Date": None})


def _told(root: Path, fault_at: int) -> str:
    lines = [f"fault from step {fault_at} on: {', '.join(FAULTY)}"]
    for record in decided(root):
        assert record.decision is not None
        names = ", ".join(record.decision.groups) or "no layers"
        lines.append(f"after step {record.step}: {record.decision.action} to {record.decision.rung} ({names})")
        lines.append(f"    {record.decision.because}")
    for name in ("with", "without"):
        found = read_metrics(root / name)
        parts = {
            "before": found[fault_at - 5 : fault_at],
            "after": found[fault_at : fault_at + 5],
            "at the end": found[-5:],
        }
        for when, some in parts.items():
            ess, reward = (sum(line[key] for line in some) / len(some) for key in ("ess", "reward_mean"))
            lines.append(f"{name:8} five steps {when:10}  ESS {ess:.4f}  reward {reward:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
