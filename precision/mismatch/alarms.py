"""Compare a step's statistics with bounds: the alarms of the live view, the report and Prometheus.

Each alarm names the statistic that is out of bounds, its meaning and the remedy. Alarms are a pure function of one line
of metrics, without torch. Bounds are those that others warn at or train within, each with its source. An alarm asks for
a look; it does not mean that the run is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A statistic with its bound."""

    name: str
    what: str
    """The statistic, as the subject of a sentence."""
    path: tuple[str, ...]
    """Keys of the statistic in a line of metrics."""
    wrong: Literal["above", "below"]
    bound: float
    bound_if_quantized: float | None = None
    """Bound where learner and engines do not compute in the same quantized format; None: the same."""
    distance_from: float | None = None
    """Number whose distance from the statistic is compared with the bound; None: the statistic is compared."""
    to_do: str
    source: str

    def bound_for(self, *, quantized: bool) -> float:
        return self.bound_if_quantized if quantized and self.bound_if_quantized is not None else self.bound

    def value(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the number to compare with the bound; None where the step lacks the statistic."""
        found: Any = metrics
        for key in self.path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            return None
        return float(found) if self.distance_from is None else abs(found - self.distance_from)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A rule that a step broke."""

    rule: Rule
    value: float
    bound: float

    value_text: str
    """The value with three digits, or as many more as tell it from the bound."""
    text: str


FRESH = ("mismatch", "age", "0")
"""Path of tokens that the trained version sampled: their mismatch does not come from age."""

RULES = (
    Rule(
        name="ess_low",
        what="the effective sample size",
        path=("ess",),
        wrong="below",
        bound=0.3,
        to_do="if fresh tokens have a high ESS, lower schedule.lag; else see what the engines compute otherwise "
        "(`evenkeel verify parity`), and sample in a higher rollout.precision",
        source="verl warns below 0.3 (rollout correction)",
    ),
    Rule(
        name="kl_high",
        what="|k1|, the KL from engine to learner in nats a token,",
        path=("k1_kl",),
        wrong="above",
        bound=0.1,
        distance_from=0.0,
        to_do="as for a low effective sample size: age first, then what the engines compute otherwise",
        source="verl warns above 0.1 (rollout correction)",
    ),
    Rule(
        name="fresh_kl_high",
        what="the KL (k3) of tokens that are not old, in nats a token,",
        path=(*FRESH, "k3_kl"),
        wrong="above",
        bound=1e-3,
        bound_if_quantized=5e-2,
        to_do="the engines compute otherwise than the learner: run `evenkeel verify parity`; sample in a higher "
        "rollout.precision, set model.fp32_lm_head, or learner.fp8_emulation with quantized rollouts",
        source="NeMo-RL calls gen_kl_error below 1e-3 acceptable (guides/grpo); where one side is quantized the bound "
        "is ours: single small steps under block FP8 reach 1.7e-2 here, whole steps of FP8 in practice 3e-2 (verl "
        "pull request 7519)",
    ),
    Rule(
        name="fresh_probability_error_high",
        what="the mean factor between the two sides' probabilities, on tokens that are not old,",
        path=(*FRESH, "probability_error"),
        wrong="above",
        bound=1.05,
        bound_if_quantized=1.25,
        to_do="if it rises from publish to publish, weights arrive wrong: see the weight checks of the fleet; else as "
        "for the KL of fresh tokens",
        source="NeMo-RL plots what is above 1.05 (token_mult_prob_error); single steps under block FP8 reach that, so "
        "the bound where one side is quantized is ours",
    ),
    Rule(
        name="ratio_mean_off",
        what="the distance of the mean ratio from 1",
        path=("ratio_mean",),
        wrong="above",
        bound=0.05,
        distance_from=1.0,
        to_do="the mean is 1 where the engine can sample whatever the learner gives a chance: see whether "
        "rollout.top_p or rollout.top_k cut its distribution; else as for the KL of fresh tokens",
        source="NeMo-RL: sampling_importance_ratio hovers around 1 (guides/grpo); the width is ours",
    ),
    Rule(
        name="truncated_high",
        what="the share of truncated responses",
        path=("truncated_share",),
        wrong="above",
        bound=0.1,
        to_do="raise rollout.max_new_tokens, or end long answers by rollout.interruption",
        source="ScaleRL (arXiv 2510.13786): 10 to 15 % went before instability",
    ),
    Rule(
        name="samples_repeated",
        what="the number of samples that repeat another of their group, which by their probabilities was no chance,",
        path=("repeated_samples",),
        wrong="above",
        bound=0.0,
        to_do="an engine gives one answer again and again, and the group says nothing: see which by `evenkeel "
        "trajectories show`, look whether rollout.extra_args fixes a seed, and start it again",
        source="a group of one sample has no contrast; the chance is below one in 10^13 (rollout.batch_builder)",
    ),
    Rule(
        name="episodes_given_up",
        what="the number of groups that a batch is without, because an episode's environment or agent failed twice,",
        path=("episodes", "given_up"),
        wrong="above",
        bound=0.0,
        to_do="the event episode_failed says why: mend the environment, agent or tool, or raise episode.step_s",
        source="a fault is no reward of 0, so what fails on hard tasks leaves the easy ones; the bound is ours",
    ),
    Rule(
        name="trained_shorter",
        what="the share of the tokens that moved to shorter answers, of those trained against those issued,",
        path=("trained_shorter",),
        wrong="above",
        bound=0.1,
        to_do="groups that finish first are trained first (rollout.composition: ready): take window or fifo; or "
        "prompts.group_filter leaves out long answers; the report draws both lengths",
        source="the one-sided statistic of Kolmogorov and Smirnov, 0 where chance exceeds it in one case of a hundred "
        "(pipeline.rollout.bias); the bound is ours",
    ),
    Rule(
        name="trained_easier",
        what="the share of the tokens that moved to higher rewards, of those trained against those issued,",
        path=("trained_easier",),
        wrong="above",
        bound=0.1,
        to_do="as for shorter answers: what is slow, or filtered out, is harder",
        source="as for shorter answers",
    ),
    Rule(
        name="lag_high",
        what="the age of the oldest token, in versions,",
        path=("lag_max",),
        wrong="above",
        bound=16.0,
        to_do="fewer prompts under way (rollout.concurrent_prompts), a lower schedule.lag, or rollout.interruption",
        source="twice the lag that ScaleRL trains with (PipelineRL-8)",
    ),
)


def alarms(metrics: Mapping[str, Any], *, quantized: bool) -> list[Alarm]:
    """Return the rules that a step broke, in the order of RULES; a statistic that the step lacks breaks none. `metrics`
    is the step's line of metrics, `quantized` whether learner and engines do not compute in the same quantized format
    (pipeline.analysis.summary.formats_differ)."""
    found = []
    for rule in RULES:
        value, bound = rule.value(metrics), rule.bound_for(quantized=quantized)
        if value is not None and (value > bound if rule.wrong == "above" else value < bound):
            texts = (f"{value:.{digits}g}" for digits in range(3, 18))
            shown = next((text for text in texts if float(text) != bound), repr(value))
            said = f"{rule.what} is {shown}, {rule.wrong} {bound:g}"
            found.append(Alarm(rule=rule, value=value, bound=bound, value_text=shown, text=said))
    return found
