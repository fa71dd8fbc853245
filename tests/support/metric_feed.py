"""Exporters of all roles, fed as a run feeds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from launch.run.metrics import RunMetrics
from pipeline.config.loader import load_recipe
from pipeline.data.checksums import write_sealed_json
from pipeline.data.run_directory import RunDirectory
from pipeline.ports.load import EngineLoad

STEP: dict[str, Any] = dict(
    step=7,
    time=1000.0,
    ess=0.93,
    sequence_ess=0.75,
    k1_kl=-0.25,
    k3_kl=0.002,
    log_ratio_abs_mean=0.03,
    ratio_mean=1.01,
    mismatch=dict(age={"0": dict(share=0.5, ess=0.96, k3_kl=0.004, probability_error=1.03), "1": dict(share=0.5)}),
    reward_mean=0.5,
    solve_rate=0.25,
    lag_mean=0.5,
    lag_max=2.0,
    truncated_share=0.125,
    response_tokens_mean=11.0,
    entropy=0.75,
    grad_norm=0.3,
    num_tokens=640,
    verifier_failures=1.0,
    teacher_failures=1.0,
    seconds=dict(wait=1.0, update=2.0, publish=0.5),
    publish_seconds=dict(load_s=0.25, publish_s=0.5),
    log_ratio_histogram=[1.0, 2.0],
)
COMMITTED: dict[str, Any] = dict(
    kind="committed",
    time=900.0,
    batch=8,
    samples=64,
    dropped=1,
    zero_variance=5,
    zero_variance_dropped=2,
    solved_groups=3,
    interrupted=4,
    retractions=7,
    seconds=dict(generate=3.0, hold=0.0, evaluate=0.0, commit=0.1),
)


@dataclass(frozen=True)
class Engine:
    """What a fleet says of one engine."""

    index: int
    version: int | None
    quarantined: bool
    in_flight: int
    load: EngineLoad | None


LOAD = EngineLoad(running=3, waiting=1, live_tokens=600, kv_tokens=800, kv_use=0.75)
ENGINES = (Engine(0, 8, False, 3, LOAD), Engine(1, None, True, 0, None))


@dataclass(frozen=True)
class SomeSlots:
    """What the slots of a collector say."""

    num_waiting: int = 5
    held: int = 2
    number: int = 6


SLOTS: Any = SomeSlots()


def scraped(metrics: RunMetrics) -> str:
    """What `/metrics` answers."""
    return generate_latest(metrics.registry).decode()


def fed(role: str, run_dir: Path) -> RunMetrics:
    """The metrics of a role that has seen every kind of line that it writes."""
    metrics = RunMetrics(role, run_dir)
    note = run_dir / "logs" / "fatal" / f"learner-seen-by-{role}.json"
    write_sealed_json(note, dict(error="NonFiniteError", message="loss is nan"))
    if role == "learner":
        metrics.observe("metrics", STEP)
        metrics.observe("event", dict(kind="saved", time=1.0, step=8, seconds=2.5))
    if role == "collector":
        metrics.observe("event", COMMITTED)
        metrics.observe("event", dict(kind="bad_answer", time=1.0, engine=1, url="http://b", reason="NaN"))
        metrics.observe("event", dict(kind="retried", time=1.0, group=3, reason="stale"))
        metrics.observe("event", dict(kind="evaluated", time=1.0, version=8, pass_at_1=0.625))
        metrics.fleet, metrics.slots = lambda: ENGINES, SLOTS
    if role == "supervisor":
        metrics.observe("event", dict(kind="started", time=1.0, process="engine-1"))
        metrics.observe("event", dict(kind="restarted", time=1.0, process="engine-1", reason="killed"))
    return metrics


def run_with_every_file(folder: Path) -> Path:
    """A run directory with each file that a scrape reads."""
    run = folder / "demo"
    RunDirectory(run).freeze(load_recipe(Path("demo"), ["run.steps=10"]))
    for folder_of_run in ("policy", "logs/fatal"):
        (run / folder_of_run).mkdir(parents=True, exist_ok=True)
    RunDirectory(run).set_published(8)
    return run
