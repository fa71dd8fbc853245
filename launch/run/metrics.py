"""Serve a role's `/metrics` to Prometheus, from the lines of its event log and from lookups at each scrape.

    EventLog ──each line──▶ RunMetrics.observe ──▶ gauges and counters ─┐
    Fleet.state, policy/PUBLISHED, free space ──at each scrape──────────┴──▶ http://HOST:PORT/metrics

`make docs` makes a page of METRICS. Metrics never end a run: a line with unexpected fields is used as far as possible.
Requests need no key, since the page holds only numbers, indexes of engines and the run's name.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from launch.run.addresses import LOOPBACK
from pipeline.analysis.summary import formats_differ
from pipeline.config.recipe import Recipe
from pipeline.data.checksums import read_sealed_json
from pipeline.data.epochs import Role, epoch_folder, first_start_after
from pipeline.data.event_log import EventKind, LogName, Observer, newest_line
from pipeline.data.run_directory import RunDirectory, numbered_files
from pipeline.errors import EvenKeelError, PortInUseError, StoreError
from pipeline.rollout.slots import Slots
from precision.mismatch.alarms import RULES, alarms
from rollout_sglang.engine_pool import EngineState


@dataclass(frozen=True)
class MetricName:
    """A metric. A counter's name ends with `_total`; the counter restarts at 0 with its process."""

    name: str
    roles: tuple[str, ...]
    help: str
    labels: tuple[str, ...] = ()
    """Labels besides `run`, which every metric has."""
    field: str = ""
    """Field of a metrics line that the gauge shows or the counter adds up; a mapping if the label is `phase`."""


LEARNER, COLLECTOR, SUPERVISOR = ("learner",), ("collector",), ("supervisor",)
ALL = (*LEARNER, *COLLECTOR, *SUPERVISOR)
WATCHERS = (*COLLECTOR, *SUPERVISOR)
"""Roles that go on while the learner is being restarted."""

METRICS: tuple[MetricName, ...] = (
    MetricName("evenkeel_role_info", ALL, "Always 1; names the role.", ("role",)),
    MetricName("evenkeel_heartbeat_timestamp_seconds", ALL, "When the role last logged something (UTC, since 1970)."),
    MetricName("evenkeel_last_step", LEARNER, "Index of the newest trained step.", field="step"),
    MetricName(
        "evenkeel_last_step_timestamp_seconds",
        LEARNER,
        "When that step ended; before the next, when the first start after it began.",
        field="time",
    ),
    MetricName("evenkeel_steps_total", LEARNER, "Steps that this process has trained."),
    MetricName("evenkeel_steps_left", LEARNER, "Steps of the recipe after the newest one; 0 after the last."),
    MetricName(
        "evenkeel_tokens_total", LEARNER, "Response tokens that this process has trained on.", field="num_tokens"
    ),
    MetricName(
        "evenkeel_ess_ratio", LEARNER, "Effective sample size of the step, as a share of its tokens.", field="ess"
    ),
    MetricName(
        "evenkeel_sequence_ess_ratio", LEARNER, "The same of whole sequences, as a share of them.", field="sequence_ess"
    ),
    MetricName(
        "evenkeel_k1_kl_nats",
        LEARNER,
        "KL from engine to learner, a token: plain estimate, of either sign.",
        field="k1_kl",
    ),
    MetricName("evenkeel_k3_kl_nats", LEARNER, "KL from engine to learner, a token: estimate k3.", field="k3_kl"),
    MetricName(
        "evenkeel_log_ratio_abs_nats_mean",
        LEARNER,
        "Mean gap between the two sides' log-probabilities.",
        field="log_ratio_abs_mean",
    ),
    MetricName(
        "evenkeel_ratio_mean",
        LEARNER,
        "Mean of learner's over engine's probability, 1 in expectation.",
        field="ratio_mean",
    ),
    MetricName("evenkeel_bucket_ess_ratio", LEARNER, "ESS of a part of the step's tokens.", ("split", "bucket")),
    MetricName("evenkeel_bucket_k3_kl_nats", LEARNER, "k3 of a part of the step's tokens.", ("split", "bucket")),
    MetricName("evenkeel_bucket_token_ratio", LEARNER, "Share of the step's tokens.", ("split", "bucket")),
    MetricName("evenkeel_alarm", LEARNER, "1 while the newest step's statistic is out of bounds.", ("alarm",)),
    MetricName("evenkeel_alarm_value", LEARNER, "What the alarm watches, as it is compared.", ("alarm",)),
    MetricName("evenkeel_alarm_bound", LEARNER, "The bound that it is compared with, in this run.", ("alarm",)),
    MetricName("evenkeel_reward_mean", LEARNER, "Mean reward of the step's samples.", field="reward_mean"),
    MetricName("evenkeel_solved_ratio", LEARNER, "Share of the step's samples that were solved.", field="solve_rate"),
    MetricName("evenkeel_lag_versions_mean", LEARNER, "Mean age of the step's tokens.", field="lag_mean"),
    MetricName("evenkeel_lag_versions_max", LEARNER, "Age of the step's oldest token.", field="lag_max"),
    MetricName(
        "evenkeel_truncated_ratio",
        LEARNER,
        "Share of samples that were cut at the longest length.",
        field="truncated_share",
    ),
    MetricName("evenkeel_response_tokens_mean", LEARNER, "Mean length of a response.", field="response_tokens_mean"),
    MetricName(
        "evenkeel_entropy_nats",
        LEARNER,
        "Mean entropy of the policy, a token; under top_p or top_k, of what they kept.",
        field="entropy",
    ),
    MetricName("evenkeel_gradient_norm", LEARNER, "Global gradient norm before it was clipped.", field="grad_norm"),
    MetricName("evenkeel_phase_seconds", LEARNER, "Seconds of the step's phases.", ("phase",), "seconds"),
    MetricName(
        "evenkeel_publish_phase_seconds",
        LEARNER,
        "Seconds of the parts of the newest publish.",
        ("phase",),
        "publish_seconds",
    ),
    MetricName(
        "evenkeel_verifier_failures_total",
        LEARNER,
        "Samples whose verifier failed or was killed.",
        field="verifier_failures",
    ),
    MetricName(
        "evenkeel_teacher_failures_total",
        LEARNER,
        "Samples that the teacher of a distillation did not score.",
        field="teacher_failures",
    ),
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
    MetricName(
        "evenkeel_retractions_total",
        COLLECTOR,
        "How often samples lost their keys and values to others and were prefilled again; updates of weights apart.",
    ),
    MetricName("evenkeel_waiting_prompts", COLLECTOR, "Prompts that wait for a free place at the engines."),
    MetricName("evenkeel_prompts_in_flight", COLLECTOR, "Prompts at the engines."),
    MetricName(
        "evenkeel_concurrent_prompts",
        COLLECTOR,
        "Prompts that may be at the engines now: as many as their keys and values have room for.",
    ),
    MetricName("evenkeel_pass_at_1_ratio", COLLECTOR, "Held-out pass@1 of the newest evaluation."),
    MetricName("evenkeel_evaluated_version", COLLECTOR, "Version of the newest evaluation."),
    MetricName("evenkeel_engines", COLLECTOR, "Engines that the run has now."),
    MetricName("evenkeel_engines_quarantined", COLLECTOR, "Engines that get no requests until they are verified."),
    MetricName("evenkeel_engine_quarantined", COLLECTOR, "1 while the engine gets no requests.", ("engine",)),
    MetricName(
        "evenkeel_engine_served_version", COLLECTOR, "Version that the engine was verified to hold.", ("engine",)
    ),
    MetricName("evenkeel_engine_in_flight_requests", COLLECTOR, "Requests that the engine works on.", ("engine",)),
    MetricName("evenkeel_engine_kv_use_ratio", COLLECTOR, "Share of its keys and values in use.", ("engine",)),
    MetricName("evenkeel_engine_live_tokens", COLLECTOR, "Tokens whose keys and values it holds.", ("engine",)),
    MetricName("evenkeel_published_version", ALL, "Version that the engines are to serve (policy/PUBLISHED)."),
    MetricName("evenkeel_run_directory_free_bytes", WATCHERS, "Free space of the run directory's file system."),
    MetricName("evenkeel_run_directory_size_bytes", WATCHERS, "Size of the run directory's file system."),
    MetricName("evenkeel_fatal", WATCHERS, "1 once a role has given up for good (logs/fatal).", ("error",)),
    MetricName("evenkeel_finished", WATCHERS, "1 once the run has reached its last step."),
    MetricName("evenkeel_starts_total", SUPERVISOR, "Starts of a role.", ("process",)),
    MetricName("evenkeel_restarts_total", SUPERVISOR, "Starts of a role after it had died.", ("process",)),
)
BY_NAME = {metric.name: metric for metric in METRICS}

METRICS_PORT_VARIABLE = "EVENKEEL_METRICS_PORT"
"""Environment variable with the port of a role's metrics; without it, the role shows none."""
METRICS_HOST_VARIABLE = "EVENKEEL_METRICS_HOST"

OF_BUCKET = {
    "share": "evenkeel_bucket_token_ratio",
    "ess": "evenkeel_bucket_ess_ratio",
    "k3_kl": "evenkeel_bucket_k3_kl_nats",
}
"""Statistic of a bucket in a line's `mismatch` → gauge."""
SINCE_START = tuple(metric.name for metric in METRICS if metric.name.endswith("_timestamp_seconds"))
"""Gauges that show the process's start until its first step or batch, so that a lack of both is noticed."""
NEWEST: Mapping[str, tuple[Role, Literal["metrics", "events"], EventKind | None]] = {
    "evenkeel_last_step_timestamp_seconds": ("learner", "metrics", None),
    "evenkeel_last_batch_timestamp_seconds": ("collector", "events", "committed"),
}
"""Gauge → the role, log and event kind with its time from earlier starts. Otherwise a role that always dies before its
first step or batch would look as if it had just begun."""
LONGEST_PAUSE_S = 1800.0
"""Longest pause between two starts that counts as one stall. ops/alerts/evenkeel.yaml waits as long."""
LEFT_OUT = {
    "dropped": "unfit",
    "zero_variance_dropped": "zero_variance",
    "filtered": "filtered",
    "solved_groups": "solved",
}
"""Field of a `committed` event → reason for leaving out groups."""


class RunMetrics:
    def __init__(self, role: str, run_dir: Path) -> None:
        self.role = role
        self.registry = CollectorRegistry()
        self.fleet: Callable[[], Sequence[EngineState]] | None = None
        """Function that returns a collector's engines, called at each scrape in another thread."""
        self.slots: Slots | None = None
        """A collector's slots, read likewise."""
        self._run_dir, self._fatal = run_dir, run_dir / "logs" / "fatal"
        self._lock = threading.Lock()
        self._old_notes = set(self._fatal.glob("*.json"))
        """Fatal notes of earlier starts, which say nothing of this one."""
        self._shown: dict[str, Gauge | Counter] = {}
        self._recipe: Recipe | None = None
        self._show("evenkeel_role_info", 1, role=role)
        for metric in METRICS:
            if role not in metric.roles:
                continue
            if metric.name in SINCE_START:
                self._show(metric.name, time.time())
            elif metric.name.endswith("_total") and not metric.labels:
                self._show(metric.name, 0)  # shown from the start, so that its first increase can be seen
            if metric.name in NEWEST:
                # The first start after the newest step or batch, of those that follow each other within
                # LONGEST_PAUSE_S, so that a pause of the run does not count.
                of, log, kind = NEWEST[metric.name]
                with suppress(OSError, ValueError, EvenKeelError):
                    if line := newest_line(run_dir, log, kind):
                        done = float(line["time"])
                        began = first_start_after(epoch_folder(run_dir, of), done, LONGEST_PAUSE_S)
                        self._show(metric.name, began or done)
        self.registry.register(self)

    def observe(self, which: LogName, line: Mapping[str, Any]) -> None:
        """Update the metrics by one line of the event log (pipeline.data.event_log.Observer). Raises nothing."""
        with self._lock:
            self._show("evenkeel_heartbeat_timestamp_seconds", line.get("time"))
            if which == "metrics":
                for metric in METRICS:
                    if metric.field:
                        self._show(metric.name, line.get(metric.field))
                self._show("evenkeel_steps_total", 1)
                if self._recipe is None:
                    with suppress(OSError, EvenKeelError):
                        self._recipe = RunDirectory(self._run_dir).recipe()
                recipe = self._recipe
                if isinstance(step := line.get("step"), int) and recipe is not None:
                    self._show("evenkeel_steps_left", recipe.run.steps - 1 - step)
                for name in (*OF_BUCKET.values(), "evenkeel_alarm_value"):
                    if name in self._shown:
                        self._shown[name].clear()  # buckets and values that this step lacks are hidden
                splits = line.get("mismatch")
                for split, buckets in splits.items() if isinstance(splits, Mapping) else ():
                    for bucket, statistics in buckets.items() if isinstance(buckets, Mapping) else ():
                        for field, name in OF_BUCKET.items() if isinstance(statistics, Mapping) else ():
                            self._show(name, statistics.get(field), split=str(split), bucket=str(bucket))
                quantized = recipe is not None and formats_differ(recipe)
                broken = {alarm.rule.name for alarm in alarms(line, quantized=quantized)}
                for rule in RULES:
                    self._show("evenkeel_alarm", float(rule.name in broken), alarm=rule.name)
                    self._show("evenkeel_alarm_bound", rule.bound_for(quantized=quantized), alarm=rule.name)
                    self._show("evenkeel_alarm_value", rule.value(line), alarm=rule.name)
                return
            process = str(line.get("process"))
            match line.get("kind"):
                case "committed":
                    self._show("evenkeel_last_batch", line.get("batch"))
                    self._show("evenkeel_last_batch_timestamp_seconds", line.get("time"))
                    self._show("evenkeel_samples_total", line.get("samples"))
                    self._show("evenkeel_interrupted_samples_total", line.get("interrupted"))
                    self._show("evenkeel_retractions_total", line.get("retractions"))
                    for field, reason in LEFT_OUT.items():
                        self._show("evenkeel_groups_left_out_total", line.get(field), reason=reason)
                    self._show("evenkeel_collect_phase_seconds", line.get("seconds"))
                case "retried":
                    self._show("evenkeel_retries_total", 1)
                case "bad_answer":
                    engine = "behind the router" if line.get("engine") is None else str(line["engine"])
                    self._show("evenkeel_bad_answers_total", 1, engine=engine)
                case "evaluated":
                    self._show("evenkeel_pass_at_1_ratio", line.get("pass_at_1"))
                    self._show("evenkeel_evaluated_version", line.get("version"))
                case "saved":
                    self._show("evenkeel_saved_step", line.get("step"))
                    self._show("evenkeel_save_seconds", line.get("seconds"))
                case "started":
                    self._show("evenkeel_starts_total", 1, process=process)
                    self._show("evenkeel_restarts_total", 0, process=process)
                case "restarted":
                    self._show("evenkeel_restarts_total", 1, process=process)

    def serve(self, port: int, host: str = LOOPBACK) -> int:
        """Answer scrapes in a thread that ends with the process; return the port. Raises PortInUseError."""
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise PortInUseError(
                f"metrics of the {self.role} cannot be shown on {host}:{port} ({error.strerror}); give another "
                "--metrics-port, or none"
            ) from None
        return int(server.server_port)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics that are looked up at each scrape, for prometheus_client's registry."""
        if self.slots is not None:
            yield self._family("evenkeel_waiting_prompts", [((), self.slots.num_waiting)])
            yield self._family("evenkeel_prompts_in_flight", [((), self.slots.held)])
            yield self._family("evenkeel_concurrent_prompts", [((), self.slots.number)])
        if self.fleet is not None:
            engines = self.fleet()
            label = {engine: (str(engine.index),) for engine in engines}
            yield self._family("evenkeel_engines", [((), len(engines))])
            yield self._family("evenkeel_engines_quarantined", [((), sum(one.quarantined for one in engines))])
            yield self._family("evenkeel_engine_quarantined", [(label[one], float(one.quarantined)) for one in engines])
            yield self._family("evenkeel_engine_served_version", [(label[one], one.version) for one in engines])
            yield self._family("evenkeel_engine_in_flight_requests", [(label[one], one.in_flight) for one in engines])
            loads = [(label[one], one.load) for one in engines if one.load is not None]
            yield self._family("evenkeel_engine_kv_use_ratio", [(name, load.kv_use) for name, load in loads])
            yield self._family("evenkeel_engine_live_tokens", [(name, load.live_tokens) for name, load in loads])
        published = [*numbered_files(self._run_dir / "policy" / "PUBLISHED", "")]
        yield self._family("evenkeel_published_version", [((), float(published[-1]) if published else None)])
        if self.role not in WATCHERS:
            return
        finished, errors = None, set[str]()
        with suppress(OSError, EvenKeelError):
            finished = float(RunDirectory(self._run_dir).is_finished())
        yield self._family("evenkeel_finished", [((), finished)])
        for path in set(self._fatal.glob("*.json")) - self._old_notes:
            with suppress(OSError, StoreError, KeyError):
                errors.add(str(read_sealed_json(path, "it is only counted")["error"]))
        yield self._family("evenkeel_fatal", [((error,), 1.0) for error in sorted(errors)])
        with suppress(OSError):
            usage = shutil.disk_usage(self._run_dir)
            yield self._family("evenkeel_run_directory_free_bytes", [((), usage.free)])
            yield self._family("evenkeel_run_directory_size_bytes", [((), usage.total)])

    def _family(self, name: str, values: Sequence[tuple[tuple[str, ...], float | None]]) -> Metric:
        family = GaugeMetricFamily(name, BY_NAME[name].help, labels=("run", *BY_NAME[name].labels))
        for labels, value in values:
            if value is not None:
                family.add_metric((self._run_dir.name, *labels), value)
        return family

    def _show(self, name: str, value: Any, **labels: str) -> None:
        """Set a gauge or add to a counter; ignore values that are not numbers, and negative ones for a counter."""
        metric = BY_NAME[name]
        if isinstance(value, Mapping) and metric.labels == ("phase",):
            for phase, seconds in value.items():
                self._show(name, seconds, phase=str(phase).removesuffix("_s"))
        if not isinstance(value, int | float) or labels.keys() != set(metric.labels):
            return
        counts = name.endswith("_total")
        if name not in self._shown:
            kind = Counter if counts else Gauge
            self._shown[name] = kind(name, metric.help, ("run", *metric.labels), registry=self.registry)
        shown = self._shown[name].labels(run=self._run_dir.name, **labels)
        if isinstance(shown, Gauge):
            shown.set(value)
        elif value >= 0:
            shown.inc(value)


def metrics_of(role: str, run_dir: Path) -> RunMetrics | None:
    """Return a role's metrics, served at the port that its environment names; None without a port."""
    port = os.environ.get(METRICS_PORT_VARIABLE, "")
    if not port:
        return None
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise EvenKeelError(
            f"{METRICS_PORT_VARIABLE} is {port!r}, expected a port from 0 to 65535; unset it to show no metrics"
        )
    return shown_metrics(role, run_dir, int(port), os.environ.get(METRICS_HOST_VARIABLE) or LOOPBACK)


def shown_metrics(role: str, run_dir: Path, port: int, host: str = LOOPBACK) -> RunMetrics | None:
    """Return a role's metrics, served at the port; None with a warning if that fails, since metrics never end a run."""
    metrics = RunMetrics(role, run_dir)
    try:
        metrics.serve(port, host)
    except PortInUseError as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)
        return None
    return metrics


def observers_of(metrics: RunMetrics | None) -> tuple[Observer, ...]:
    return () if metrics is None else (metrics.observe,)


def markdown() -> str:
    lines = ["| name | shown by | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {', '.join(metric.roles)} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"
