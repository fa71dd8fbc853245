"""What healthy numbers look like, what a step's own number means, and what to do: for the figures of a report, and for
docs/metrics.md, whose table a test compares with GUIDES.

Bounds are those of the alarms (precision.mismatch.alarms), which name their sources, where a guide has a `rule`. Others
are rules of thumb and say so. Some figures have no bound: a reward that should rise is read over many steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.analysis.alarm_history import formats_differ_at
from pipeline.analysis.run_log import RunLog
from precision.mismatch.alarms import RULES, Rule

_RULES = {rule.name: rule for rule in RULES}
_AS_ESS = "as for `ess`"


@dataclass(frozen=True, kw_only=True)
class Guide:
    """One row of the table, and what stands below the figures of these titles."""

    look_at: str
    """Markdown: the metrics."""
    healthy: str
    closer: str
    """When to look closer."""
    then: str
    """What to do; Markdown, links relative to docs/."""
    titles: tuple[str, ...] = ()
    metric: str = ""
    """The number that is told, as RunLog.series takes it; with a rule it is the rule's."""
    rule: Rule | None = None
    low: float | None = None
    high: float | None = None
    """Bounds of the rule of thumb."""
    low_if_quantized: float | None = None
    """Instead of `low`, as Rule.bound_if_quantized."""
    times_median: float | None = None
    """The same, as a multiple of the median over the steps of the run at which the number is not next to 0."""

    @property
    def to_do(self) -> str:
        """When to look closer and what to do then, without Markdown."""
        return _sentence(f"look closer: {self.closer}. Then: {self.then}")

    @property
    def range(self) -> str:
        """What is healthy, without Markdown."""
        return _sentence(f"healthy: {self.healthy}")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a guide says of one run."""

    guide: Guide
    text: str
    """The newest number, and whether it is within its bounds."""
    state: str
    """`within`, `beyond`, or empty where there is no bound."""


def reading_of(title: str, run_log: RunLog) -> Reading | None:
    """What is said below the figure of this title; None for figures that need no words."""
    guide = next((guide for guide in GUIDES if title in guide.titles), None)
    if guide is None:
        return None
    steps, values = _points(guide, run_log)
    if not values:
        return Reading(guide=guide, text="", state="")
    newest = f"Last step {values[-1]:.4g}"
    bounds = {quantized: _bounds(guide, values, quantized=quantized) for quantized in (False, True)}
    if bounds[False] == (-math.inf, math.inf):
        return Reading(guide=guide, text=f"{newest}.", state="")
    # A fork may sample in other formats than its parent did: each step has the bounds of its own recipe.
    differ = formats_differ_at(run_log)
    of_step = (bounds[differ(step)] for step in steps)
    within = [low <= value <= high for (low, high), value in zip(of_step, values, strict=True)]
    beyond = within.count(False)
    if not beyond:
        return Reading(guide=guide, text=f"{newest}, within its bounds at every step.", state="within")
    what = f"beyond its bounds at {beyond} of {len(values)} steps"
    last = "not now" if within[-1] else "now too"
    return Reading(guide=guide, text=f"{newest}; {what}, {last}.", state="beyond")


def _points(guide: Guide, run_log: RunLog) -> tuple[list[int], list[float]]:
    """Steps and values."""
    if guide.rule is None:
        return run_log.series(guide.metric)
    found = [(int(line["step"]), guide.rule.value(line)) for line in run_log.metrics]
    known = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in known], [value for _, value in known]


def _bounds(guide: Guide, values: Sequence[float], *, quantized: bool) -> tuple[float, float]:
    """The lowest and the highest healthy value."""
    if guide.rule is not None:
        bound = guide.rule.bound_for(quantized=quantized)
        return (-math.inf, bound) if guide.rule.wrong == "above" else (bound, math.inf)
    if guide.times_median is not None:
        # Not the mean: ten percent of the steps would lift it to a tenth of what they hold, and so hide themselves.
        return -math.inf, guide.times_median * median(_beside_zero(values))
    low = guide.low_if_quantized if quantized and guide.low_if_quantized is not None else guide.low
    return (-math.inf if low is None else low), (math.inf if guide.high is None else guide.high)


def _beside_zero(values: Sequence[float]) -> list[float]:
    """Those above a millionth of the largest: without a contrast a gradient is 0, or what rounding makes of it."""
    least = 1e-6 * max(values)
    return [value for value in values if value > least] or list(values)


def _sentence(markdown: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "")
    return f"{plain[0].upper()}{plain[1:]}."


GUIDES = (
    Guide(
        look_at="`verifier_failures`",
        healthy="0",
        closer="any",
        then="fix the reward first: the message of the first failure is in the events",
        titles=("Samples without a reward",),
        metric="verifier_failures",
        high=0.0,
    ),
    Guide(
        look_at="`repeated_samples`",
        healthy="0",
        closer="any",
        then="an engine gives one answer again and again: `evenkeel trajectories show RUN STEP` names it; a fixed seed "
        "in `rollout.extra_args`?",
        rule=_RULES["samples_repeated"],
    ),
    Guide(
        look_at="`teacher_failures`, with `distillation`",
        healthy="0",
        closer="any",
        then="look at the teacher's servers (`logs/teacher.log`); the event `teacher_failed` says why",
        titles=("Samples that the teacher did not score",),
        metric="teacher_failures",
        high=0.0,
    ),
    Guide(
        look_at="`reward_mean`, `solve_rate`, held-out pass@1",
        healthy="rise, the held-out one too",
        closer="flat for 50 steps; the first rises alone (rule of thumb)",
        then="all 0 or all 1: the task is too hard or too easy; see `evenkeel trajectories show RUN 0`",
        titles=("Training reward",),
        metric="reward_mean",
    ),
    Guide(
        look_at="`ess`",
        healthy="near 1 at lag 0, above 0.3 otherwise",
        closer="below 0.3",
        then="[runbook 9](../ops/runbook.md#9-engine-and-learner-disagree): age first, then formats",
        titles=("Effective sample size", "ESS, floor and decisions", "ESS that caps and anchors"),
        rule=_RULES["ess_low"],
    ),
    Guide(
        look_at="`k1_kl`",
        healthy="within ±0.1 nats a token",
        closer="beyond ±0.1",
        then=_AS_ESS,
        titles=("Mean log-ratio, nats",),
        rule=_RULES["kl_high"],
    ),
    Guide(
        look_at="`mismatch`, `age`, `0`, `k3_kl`",
        healthy="below 1e-3; with FP8 on one side below 5e-2",
        closer="above",
        then="engines compute otherwise: `evenkeel verify parity`, `evenkeel mismatch RUN`",
        titles=("KL from engine to learner, nats a token",),
        rule=_RULES["fresh_kl_high"],
    ),
    Guide(
        look_at="`mismatch`, `age`, `0`, `probability_error`",
        healthy="below 1.05; with FP8 on one side below 1.25",
        closer="above",
        then="it rises from publish to publish: weights arrive wrong; else as for the row above",
        rule=_RULES["fresh_probability_error_high"],
    ),
    Guide(
        look_at="`ratio_mean`",
        healthy="1 within 0.05",
        closer="further",
        then="the sampler cuts the distribution and does not say so",
        rule=_RULES["ratio_mean_off"],
    ),
    Guide(
        look_at="`truncated_share`",
        healthy="below 0.1",
        closer="above",
        then="raise `rollout.max_new_tokens`, or `rollout.interruption`",
        titles=("Truncated responses",),
        rule=_RULES["truncated_high"],
    ),
    Guide(
        look_at="`lag_max`",
        healthy="at most 16; 0 with `sync`",
        closer="above",
        then="fewer prompts under way",
        titles=("Staleness, versions",),
        rule=_RULES["lag_high"],
    ),
    Guide(
        look_at="`grad_norm`",
        healthy="steady; early steps may be large; near 0 where no group has a contrast",
        closer="10 times its median",
        then="lower `learner.optimizer.lr`; see the batch",
        titles=("Gradient norm",),
        metric="grad_norm",
        times_median=10.0,
    ),
    Guide(
        look_at="`entropy`",
        healthy="falls slowly",
        closer="near 0 while rewards are not (rule of thumb)",
        then="a less sharp objective, a higher temperature, fewer steps",
        titles=("Entropy, nats a token",),
        metric="entropy",
    ),
    Guide(
        look_at="`response_tokens_mean`",
        healthy="no sudden change",
        closer="doubles or halves within 20 steps (rule of thumb)",
        then="read some: `evenkeel trajectories show RUN STEP`; `reward.overlong` holds length back",
        titles=("Response length, tokens",),
        metric="response_tokens_mean",
    ),
    Guide(
        look_at="`seconds`",
        healthy="no part grows",
        closer="`wait` or `publish` is the largest",
        then="`evenkeel trace RUN`; engines are the slower half, or weights move slowly",
        titles=("Learner, seconds a step",),
    ),
    Guide(
        look_at="`sequence_ess`",
        healthy="far below `ess`: it falls fast with the length of responses; steady",
        closer="falls while `ess` does not",
        then="some responses are far off as a whole: `evenkeel mismatch RUN`",
        titles=("Effective sample size of sequences",),
        metric="sequence_ess",
    ),
    Guide(
        look_at="`staleness_ess`",
        healthy="near 1 at lag 0, above 0.3 otherwise (rule of thumb)",
        closer="below",
        then="a lower `schedule.lag`",
        titles=("ESS of the staleness",),
        metric="staleness_ess",
        low=0.3,
    ),
    Guide(
        look_at="`mismatch`, `advantage`, `positive` and `negative`",
        healthy="both alike",
        closer="0.1 apart (rule of thumb)",
        then="bad or good samples alone have left the policy: fewer updates a batch, or a correction",
        titles=("Effective sample size by sign of A",),
    ),
    Guide(
        look_at="`log_ratio_p1`, `log_ratio_p99`",
        healthy="even around 0",
        closer="one reaches twice as far as the other (rule of thumb)",
        then="the engine samples with another temperature, or cuts its distribution",
        titles=("Log-ratio of a token, nats", "Log-ratio of a token"),
    ),
    Guide(
        look_at="`ratio_above_2_share`, `ratio_below_half_share`",
        healthy="0 at lag 0; below 0.01 otherwise (rule of thumb)",
        closer="above",
        then=_AS_ESS,
        titles=("Tokens beyond a factor of 2",),
        metric="ratio_above_2_share",
        high=0.01,
    ),
    Guide(
        look_at="`logprob_pearson`",
        healthy="above 0.99; with FP8 on one side above 0.85 (rule of thumb)",
        closer="below",
        then="engines compute otherwise: `evenkeel verify parity`",
        titles=("Correlation of the two sides",),
        metric="logprob_pearson",
        low=0.99,
        low_if_quantized=0.85,
    ),
    Guide(
        look_at="`clip_hits`",
        healthy="below 0.2 (rule of thumb); 0 at the first update on a batch where `objective.anchor` is `old` (in "
        "`staged`: of a stage)",
        closer="above",
        then="a lower learning rate, fewer `learner.updates_per_batch`; where the engine's mismatch is clipped, "
        "`objective.anchor: old`",
        titles=("Clipped tokens",),
        metric="clip_hits",
        high=0.2,
    ),
    Guide(
        look_at="`cap_hits`",
        healthy="most with P3O and P4O, whose cap is the ESS, just below 1; else below 0.1 (rule of thumb)",
        closer="far from that",
        then=_AS_ESS,
        titles=("Tokens over the cap",),
        metric="cap_hits",
    ),
    Guide(
        look_at="`weight`",
        healthy="near 1, below it under a cap",
        closer="below 0.8 (rule of thumb)",
        then="much of the gradient is taken away: as for `ess`",
        titles=("Mean weight",),
        metric="weight",
        low=0.8,
    ),
    Guide(
        look_at="`correction_factor`",
        healthy="near 1",
        closer="below 0.8 (rule of thumb)",
        then="the correction takes much of the gradient away: as for `ess`",
        titles=("Mean factor of the correction",),
        metric="correction_factor",
        low=0.8,
    ),
    Guide(
        look_at="`correction_…_positive`, `correction_…_negative`",
        healthy="below 0.05, both alike (rule of thumb)",
        closer="above",
        then=_AS_ESS,
        titles=("Tokens dropped by the correction", "Tokens over the correction's cap"),
    ),
    Guide(
        look_at="`veto_tokens`",
        healthy="below 0.05 (rule of thumb)",
        closer="above",
        then="fewer steps a stage (`schedule.updates_per_stage`), a lower learning rate",
        titles=("Vetoed",),
        metric="veto_tokens",
        high=0.05,
    ),
    Guide(
        look_at="`ratio_max_negative`",
        healthy="single tokens may be large",
        closer="grows from step to step",
        then="failed answers pull the policy away: fewer steps a stage, a lower learning rate",
        titles=("Largest ratio where A < 0",),
        metric="ratio_max_negative",
    ),
    Guide(
        look_at="`second_moment`, `square`",
        healthy="steady; its root is a typical log-ratio in nats",
        closer="above 0.01 at lag 0 (rule of thumb)",
        then=_AS_ESS,
        titles=("Second moment of log-ratios", "(log ratio)²"),
    ),
    Guide(
        look_at="`kl_loss`",
        healthy="small against `policy_loss`",
        closer="the larger of the two (rule of thumb)",
        then="the anchor outweighs the reward, since the ESS is low: as for `ess`",
        titles=("Parts of the loss",),
        metric="kl_loss",
    ),
    Guide(
        look_at="`kl_to_reference`",
        healthy="grows slowly, below 0.1 (rule of thumb)",
        closer="above",
        then="a larger `reference.coefficient`, fewer steps",
        titles=("KL to the reference, nats a token",),
        metric="kl_to_reference",
        high=0.1,
    ),
    Guide(
        look_at="`reverse_kl`",
        healthy="falls towards 0; its noise is of either sign",
        closer="rises",
        then="a lower learning rate; does the teacher take the same prompts ([distillation](distillation.md))?",
        titles=("Reverse KL to the teacher, nats a token",),
        metric="reverse_kl",
    ),
    Guide(
        look_at="`padding_share`",
        healthy="any: it costs time, not quality",
        closer="above 0.3 (rule of thumb)",
        then="a larger `learner.micro_batch_tokens`",
        titles=("Padding in micro-batches",),
        metric="padding_share",
        high=0.3,
    ),
    Guide(
        look_at="`lr`",
        healthy="as the recipe says; lower under the ESS controller",
        closer="otherwise",
        then="a resume may have changed it: see `recipe_changed` in the events",
        titles=("Learning rate",),
        metric="lr",
    ),
    Guide(
        look_at="MFU, in the report",
        healthy="0.3 to 0.5 in BF16 (rule of thumb)",
        closer="below 0.2",
        then="larger micro-batches, another layout: `evenkeel plan`",
        titles=("Model FLOPs utilization (MFU)",),
    ),
)
