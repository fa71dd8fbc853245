"""A synthetic run, written with the real event log and the real recipe; every number can be worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pipeline.config.loader import recipe_from
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from precision.ratios import LOG_RATIO_EDGES, NUM_LOG_RATIO_BINS

START = 1_700_000_000.0
SECONDS = {"wait": 1.2, "logprobs": 0.2, "update": 0.4, "publish": 0.15, "save": 0.05}
"""Two seconds a step, of which 60 % are waiting."""


def write_run(
    root: Path,
    steps_done: int,
    *,
    steps: int = 24,
    name: str = "demo",
    seconds: dict[str, float] | None = None,
    overrides: dict[str, Any] | None = None,
    evaluations: bool = True,
) -> Path:
    """A run directory below `root` with its recipe and its logs."""
    data = dict(run=dict(name=name, steps=steps, root=str(root)), model=dict(path="m"), task={"name": "sort_digits"})
    run = RunDirectory(root / name)
    run.freeze(recipe_from(data | (overrides or {}), source="test"))
    if steps_done:
        _write_journal(EventLog(run.path, "learner-000001"), steps_done, seconds or SECONDS, evaluations=evaluations)
    return run.path


def _write_journal(event_log: EventLog, steps: int, seconds: dict[str, float], *, evaluations: bool) -> None:
    for process in ("engine-0", "collector", "learner"):
        event_log.event("started", process=process, time=START)
    for step in range(steps):
        event_log.event(
            "issued", batch=step, first_group=32 * step, next_group=32 * (step + 1), version=step, time=START
        )
        started = START + 10.0 + 2.0 * step
        spent = {"generate": 1.0, "hold": 0.05, "commit": 0.1}
        event_log.event(
            "committed", batch=step, samples=256, dropped=0, started=started, seconds=spent, time=started + 1.15
        )
        event_log.metrics(step, **step_metrics(step, seconds), time=started + sum(seconds.values()))
        if evaluations and step in (0, steps - 1):
            _evaluate(event_log, step + 1 if step else 0, 0.125 if step == 0 else 0.5, started)


def _evaluate(event_log: EventLog, version: int, value: float, time: float) -> None:
    event_log.event(
        "evaluated",
        version=version,
        pass_at_1=value,
        pass_at_1_low=value - 0.0625,
        pass_at_1_high=value + 0.0625,
        pass_at_k={"1": value, "2": value + 0.1, "8": value + 0.25},
        prompts=64,
        samples=8,
        seconds=0.8,
        time=time,
    )


def step_metrics(step: int, seconds: dict[str, float]) -> dict[str, Any]:
    """One line of metrics, smooth in `step`."""
    ess = 1.0 - 0.001 * (1 + step)
    return dict(
        reward_mean=0.2 + 0.02 * step,
        solve_rate=0.1 + 0.02 * step,
        loss=-0.01,
        grad_norm=1.0 / (1 + 0.1 * step),
        lr=4e-4,
        entropy=1.5 - 0.03 * step,
        ess=ess,
        k3_kl=1e-3 * (1 + step),
        num_tokens=2000,
        num_updated_tokens=2000,
        num_model_tokens=4096,
        padding_share=0.25,
        lag_mean=0.5,
        lag_max=1.0,
        truncated_share=0.03125,
        response_tokens_mean=7.75,
        verifier_failures=0,
        seconds=seconds,
        publish_seconds={"export_s": 0.05, "load_s": 0.1},
        log_ratio_histogram=histogram(0.01 * (1 + step)),
        **mismatch_metrics(0.01 * (1 + step)),
    )


def mismatch_metrics(std: float) -> dict[str, Any]:
    """What the learner measures of normally distributed log-ratios, by what the token is."""
    quantiles = {"0_1": -3.09, "1": -2.33, "5": -1.64, "25": -0.67, "50": 0.0}
    quantiles |= {"75": 0.67, "95": 1.64, "99": 2.33, "99_9": 3.09}
    shares = {"advantage": {"negative": 0.5, "zero": 0.25, "positive": 0.25}, "age": {"0": 0.75, "1": 0.25}}
    shares |= {"position": {"0": 0.125, "1-3": 0.375, "4-15": 0.5}, "entropy": {"0-0.01": 0.5, "3-": 0.5}}

    def bucket(share: float, place: int) -> dict[str, float]:
        wide = std * (1 + place)
        spread = dict(log_ratio_mean=-wide / 9, log_ratio_abs_mean=0.8 * wide, ratio_max=math.exp(3 * wide))
        return dict(share=share, ess=math.exp(-(wide**2)), k3_kl=wide**2 / 2, probability_error=1 + wide, **spread)

    return dict(
        k2_kl=std**2 / 2,
        log_ratio_mean=0.0,
        log_ratio_abs_mean=0.8 * std,
        sequence_ess=math.exp(-8 * std**2),
        sequence_mean_ratio_ess=math.exp(-(std**2) / 8),
        ratio_above_2_share=std / 10,
        ratio_below_half_share=std / 20,
        logprob_pearson=1 - std**2,
        probability_pearson=1 - 2 * std**2,
        **{f"log_ratio_p{share}": z * std for share, z in quantiles.items()},
        mismatch={
            split: {name: bucket(share, place) for place, (name, share) in enumerate(parts.items())}
            for split, parts in shares.items()
        },
    )


def histogram(std: float) -> list[float]:
    """Counts of 2,000 normally distributed log-ratios in the fixed bins, rounded."""
    below = [0.5 * (1 + math.erf(edge / std / math.sqrt(2))) for edge in LOG_RATIO_EDGES]
    bins = [b - a for a, b in zip([0.0, *below], [*below, 1.0], strict=True)]
    assert len(bins) == NUM_LOG_RATIO_BINS
    return [float(round(2000 * share)) for share in bins]
