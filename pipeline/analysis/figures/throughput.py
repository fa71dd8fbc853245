"""The figures of a report that say how fast a run is: tokens a second on both sides, and the use of the learner's GPUs.

generated    response tokens of a batch ÷ seconds in which it was generated, from when the batch that was done before it
             was done: batches of async and staged runs are under way together
updated      response tokens that the updates ran through the model ÷ seconds of log-probabilities and updates
trained      the same ÷ seconds of the whole step, waiting and publishing included
MFU          6 · parameters · tokens of these samples, prompts included ÷ (seconds of updates · ranks · peak of a GPU)

MFU is that of PaLM (arXiv 2204.02311, appendix B) without the products of attention, which makes it a little too low.
Of a mixture, parameters are those that a token visits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.analysis.figures.drawing import Named, curve
from pipeline.analysis.run_log import RunLog, number

MFU_TITLE = "Model FLOPs utilization (MFU)"
_LINES = [
    ("generated", "generated", "blue"),
    ("updated", "trained, of the updates", "violet"),
    ("trained", "trained, of the whole step", "gray"),
]


def throughput_figures(run_log: RunLog) -> list[Named]:
    """Tokens a second, and MFU where it can be known."""
    own = replace(run_log, metrics=speeds(run_log))
    return [
        ("Response tokens a second", curve(own, "Response tokens a second", _LINES, log=True, floor=0.0)),
        (MFU_TITLE, curve(own, MFU_TITLE, [("mfu", "MFU", "teal")], percent=True, floor=0.0)),
    ]


def throughput_text(run_log: RunLog) -> str:
    """What the speeds are of, and why there is no MFU where there is none."""
    if not run_log.metrics:
        return ""
    said = "Tokens that are trained are counted against the seconds of the updates, and of the whole step."
    reason = why_no_mfu(run_log)
    return f"{said} There is no MFU: {reason}." if reason else said


def why_no_mfu(run_log: RunLog) -> str:
    """Empty where the newest step has one."""
    known = at_time(learner_environments(run_log), float(run_log.metrics[-1]["time"])) if run_log.metrics else None
    if known is None:
        return "what the learner ran on was not noted"
    if not known.get("gpus"):
        return "the learner ran on a CPU, whose peak is not known"
    if number(known, "peak_tflops") is None:
        return f"the peak of {' and '.join(sorted(set(known['gpus'])))} is not known"
    return ""


def speeds(run_log: RunLog) -> list[dict[str, Any]]:
    """Of each step `generated`, `updated` and `trained`, response tokens a second, and `mfu`; what is not known is
    missing."""
    committed = {int(event["batch"]): event for event in run_log.of_kind("committed")}
    samples = {batch: number(event, "samples") for batch, event in committed.items()}
    generating_s, noted = _generating_s(committed), learner_environments(run_log)
    return [
        _speed(
            line,
            samples.get(int(line["step"])),
            generating_s.get(int(line["step"])),
            at_time(noted, float(line["time"])) or {},
        )
        for line in run_log.metrics
    ]


def _generating_s(committed: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Batch → seconds from when it was begun, or a batch that was done before it was done, to when it was generated."""
    spans = []
    for batch, event in committed.items():
        started, spent = number(event, "started"), number(event.get("seconds") or {}, "generate")
        if started is not None and spent is not None:
            spans.append((started + spent, started, batch))
    ends = [-math.inf, *(end for end, *_ in sorted(spans))]
    return {
        batch: end - max(started, before) for before, (end, started, batch) in zip(ends, sorted(spans), strict=False)
    }


def _speed(
    line: Mapping[str, Any], samples: float | None, generating_s: float | None, known: Mapping[str, Any]
) -> dict[str, Any]:
    seconds = line.get("seconds") or {}
    update_s = sum(number(seconds, phase) or 0.0 for phase in ("logprobs", "update"))
    mean = number(line, "response_tokens_mean")
    tokens = number(line, "num_updated_tokens")
    sampled = None if samples is None or mean is None else samples * mean
    found = dict(
        generated=_over(sampled, generating_s),
        updated=_over(tokens, update_s),
        trained=_over(tokens, sum(number(seconds, phase) or 0.0 for phase in seconds)),
        mfu=_mfu(line, known),
    )
    return {"step": line["step"], "time": line["time"], **found}


def _mfu(line: Mapping[str, Any], known: Mapping[str, Any]) -> float | None:
    """Share of the peak, 0 to 1."""
    tokens = number(line, "num_model_tokens")
    machine = [number(known, name) for name in ("active_parameters", "ranks", "peak_tflops")]
    update_s = number(line.get("seconds") or {}, "update")
    if tokens is None or update_s is None or any(value is None for value in machine):
        return None
    parameters, ranks, peak = (value or 0.0 for value in machine)
    return _over(6.0 * parameters * tokens, update_s * ranks * peak * 1e12)


def learner_environments(run_log: RunLog) -> list[dict[str, Any]]:
    """What the starts of the learner noted, by time."""
    return [event for event in run_log.of_kind("environment") if event["role"] == "learner"]


def at_time(noted: Sequence[dict[str, Any]], time: float) -> dict[str, Any] | None:
    """What the start noted that trained at `time`; None where nothing was noted by then."""
    return next((event for event in reversed(noted) if event["time"] <= time), None)


def _over(amount: float | None, seconds: float | None) -> float | None:
    return None if amount is None or not seconds else amount / seconds
