"""Every number that `/metrics` of a role shows: its name, its unit, its labels, and which role shows it.

docs/metrics.md holds this table, and a test keeps the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True)
class MetricName:
    """One metric. A counter's name ends with `_total`, and it starts again at 0 with its process."""

    name: str
    roles: tuple[str, ...]
    help: str
    labels: tuple[str, ...] = ()
    """Beside `run`, which every metric has."""

    @property
    def kind(self) -> Kind:
        return "counter" if self.name.endswith("_total") else "gauge"


LEARNER, COLLECTOR, SUPERVISOR = ("learner",), ("collector",), ("supervisor",)
ALL = (*LEARNER, *COLLECTOR, *SUPERVISOR)
WATCHERS = (*COLLECTOR, *SUPERVISOR)
"""Roles that go on while the learner is being restarted."""

METRICS: tuple[MetricName, ...] = (
    MetricName("evenkeel_role_info", ALL, "Always 1; names the role.", ("role",)),
    MetricName("evenkeel_heartbeat_timestamp_seconds", ALL, "When the role last logged something (UTC, since 1970)."),
    MetricName("evenkeel_last_step", LEARNER, "Index of the newest trained step."),
    MetricName(
        "evenkeel_last_step_timestamp_seconds",
        LEARNER,
        "When that step ended; before the next, when the first start after it began.",
    ),
    MetricName("evenkeel_steps_total", LEARNER, "Steps that this process has trained."),
    MetricName("evenkeel_steps_left", LEARNER, "Steps of the recipe after the newest one; 0 after the last."),
    MetricName("evenkeel_tokens_total", LEARNER, "Response tokens that this process has trained on."),
    MetricName("evenkeel_ess_ratio", LEARNER, "Effective sample size of the step, as a share of its tokens."),
    MetricName("evenkeel_sequence_ess_ratio", LEARNER, "The same of whole sequences, as a share of them."),
    MetricName("evenkeel_k1_kl_nats", LEARNER, "KL from engine to learner, a token: plain estimate, of either sign."),
    MetricName("evenkeel_k3_kl_nats", LEARNER, "KL from engine to learner, a token: estimate k3."),
    MetricName("evenkeel_log_ratio_abs_nats_mean", LEARNER, "Mean gap between the two sides' log-probabilities."),
    MetricName("evenkeel_ratio_mean", LEARNER, "Mean of learner's over engine's probability, 1 in expectation."),
    MetricName("evenkeel_bucket_ess_ratio", LEARNER, "ESS of a part of the step's tokens.", ("split", "bucket")),
    MetricName("evenkeel_bucket_k3_kl_nats", LEARNER, "k3 of a part of the step's tokens.", ("split", "bucket")),
    MetricName("evenkeel_bucket_token_ratio", LEARNER, "Share of the step's tokens.", ("split", "bucket")),
    MetricName("evenkeel_alarm", LEARNER, "1 while the newest step's statistic is out of bounds.", ("alarm",)),
    MetricName("evenkeel_alarm_value", LEARNER, "What the alarm watches, as it is compared.", ("alarm",)),
    MetricName("evenkeel_alarm_bound", LEARNER, "The bound that it is compared with, in this run.", ("alarm",)),
    MetricName("evenkeel_reward_mean", LEARNER, "Mean reward of the step's samples."),
    MetricName("evenkeel_solved_ratio", LEARNER, "Share of the step's samples that were solved."),
    MetricName("evenkeel_lag_versions_mean", LEARNER, "Mean age of the step's tokens."),
    MetricName("evenkeel_lag_versions_max", LEARNER, "Age of the step's oldest token."),
    MetricName("evenkeel_truncated_ratio", LEARNER, "Share of samples that were cut at the longest length."),
    MetricName("evenkeel_response_tokens_mean", LEARNER, "Mean length of a response."),
    MetricName(
        "evenkeel_entropy_nats",
        LEARNER,
        "Mean entropy of the policy, a token; under top_p or top_k, of what they kept.",
    ),
    MetricName("evenkeel_gradient_norm", LEARNER, "Global gradient norm before it was clipped."),
    MetricName("evenkeel_phase_seconds", LEARNER, "Seconds of the step's phases.", ("phase",)),
    MetricName("evenkeel_publish_phase_seconds", LEARNER, "Seconds of the parts of the newest publish.", ("phase",)),
    MetricName("evenkeel_verifier_failures_total", LEARNER, "Samples whose verifier failed or was killed."),
    MetricName("evenkeel_teacher_failures_total", LEARNER, "Samples that the teacher of a distillation did not score."),
    MetricName("evenkeel_saved_step", LEARNER, "Step of the newest checkpoint."),
    MetricName("evenkeel_save_seconds", LEARNER, "Seconds that the newest checkpoint took."),
    MetricName("evenkeel_last_batch", COLLECTOR, "Index of the newest committed batch."),
    MetricName(
        "evenkeel_last_batch_timestamp_seconds",
        COLLECTOR,
        "When it was committed; before the next, when the first start after it began.",
    ),
    MetricName("evenkeel_samples_total", COLLECTOR, "Samples that this process has committed."),
    MetricName("evenkeel_collect_phase_seconds", COLLECTOR, "Seconds of the newest batch's phases.", ("phase",)),
    MetricName(
        "evenkeel_groups_left_out_total",
        COLLECTOR,
        "Groups that were not kept: unfit, zero_variance, filtered or solved.",
        ("reason",),
    ),
    MetricName(
        "evenkeel_retries_total",
        COLLECTOR,
        "Groups of which samples were asked again: an engine failed, was paused for a publish, or was too old.",
    ),
    MetricName(
        "evenkeel_bad_answers_total",
        COLLECTOR,
        "Answers that were thrown away because they cannot be, or were errors (500, 503) of an engine that is well; "
        "behind a router nobody knows whose.",
        ("engine",),
    ),
    MetricName("evenkeel_interrupted_samples_total", COLLECTOR, "Samples that were told to give their answer."),
    MetricName("evenkeel_waiting_prompts", COLLECTOR, "Prompts that wait for a free place at the engines."),
    MetricName("evenkeel_pass_at_1_ratio", COLLECTOR, "Held-out pass@1 of the newest evaluation."),
    MetricName("evenkeel_evaluated_version", COLLECTOR, "Version of the newest evaluation."),
    MetricName("evenkeel_engines", COLLECTOR, "Engines that the run has now."),
    MetricName("evenkeel_engines_quarantined", COLLECTOR, "Engines that get no requests until they are verified."),
    MetricName("evenkeel_engine_quarantined", COLLECTOR, "1 while the engine gets no requests.", ("engine",)),
    MetricName(
        "evenkeel_engine_served_version", COLLECTOR, "Version that the engine was verified to hold.", ("engine",)
    ),
    MetricName("evenkeel_engine_in_flight_requests", COLLECTOR, "Requests that the engine works on.", ("engine",)),
    MetricName("evenkeel_published_version", ALL, "Version that the engines are to serve (policy/PUBLISHED)."),
    MetricName("evenkeel_run_directory_free_bytes", WATCHERS, "Free space of the run directory's file system."),
    MetricName("evenkeel_run_directory_size_bytes", WATCHERS, "Size of the run directory's file system."),
    MetricName("evenkeel_fatal", WATCHERS, "1 once a role has given up for good (logs/fatal).", ("error",)),
    MetricName("evenkeel_finished", WATCHERS, "1 once the run has reached its last step."),
    MetricName("evenkeel_starts_total", SUPERVISOR, "Starts of a role.", ("process",)),
    MetricName("evenkeel_restarts_total", SUPERVISOR, "Starts of a role after it had died.", ("process",)),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def markdown() -> str:
    """The table of docs/metrics.md."""
    lines = ["| name | shown by | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {', '.join(metric.roles)} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
