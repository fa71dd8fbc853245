"""The figures of a report about a mixture's experts: what replaying the engine's choice took away.

Both curves of a pair are of the same samples, scored before each step with the engine's experts and with the learner's
own (pipeline.trainer.loop).
"""

from __future__ import annotations

from pipeline.analysis.figures import drawing
from pipeline.analysis.figures.drawing import Named
from pipeline.analysis.run_log import RunLog

ROUTING_TEXT = (
    "The learner sends each token to the experts that the engine chose. Some samples are scored with its own choice "
    "too: the distance between the curves is what routing alone would add to the mismatch. Tokens before the last new "
    "version in a response, and whole responses that an engine retracted, have no known experts."
)


def routing_figures(run_log: RunLog) -> list[Named]:
    """Title and <svg>; None where a run replays no experts."""

    def pair(title: str, metric: str, *, log: bool = False) -> Named:
        lines = [(f"{metric}_with_replay", "replayed", "blue"), (f"{metric}_without_replay", "own experts", "orange")]
        return title, drawing.curve(run_log, title, lines, log=log)

    shares = [
        ("experts_known_share", "known", "gray"),
        ("expert_tokens_differ_share", "tokens that differ in any layer", "orange"),
        ("expert_rows_differ_share", "differ in a layer", "blue"),
    ]
    return [
        pair("ESS with the engine's experts, and with the learner's", "ess"),
        pair("k3 KL to the engine, of the same tokens", "k3_kl", log=True),
        pair("Mean absolute log-ratio, of the same tokens", "log_ratio_abs_mean", log=True),
        ("Experts of tokens", drawing.curve(run_log, "experts of tokens", shares, percent=True, floor=0.0)),
    ]
