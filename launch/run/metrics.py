"""`/metrics` of a role, for Prometheus: fed by the lines of its event log, and by what is looked up at each scrape.

    EventLog ──each line──▶ RunMetrics.observe ──▶ gauges and counters ─┐
    Fleet.state, policy/PUBLISHED, free space ──at each scrape──────────┴──▶ http://HOST:PORT/metrics

METRICS has every number with its name, its unit, its labels and the roles that show it; `make docs` makes a page
of them. Nothing here may end a run: a line that has other fields than expected changes what it can. There is no key:
what is shown are numbers, addresses of engines and the run's name.
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
from pipeline.data.run_directory import RunDirectory, announced
from pipeline.errors import EvenKeelError, PortInUseError, StoreError
from precision.mismatch.alarms import RULES, alarms
from rollout_sglang.engine_pool import EngineState

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True)
class MetricName:
    """One metric. A counter's name ends with `_total`, and it starts again at 0 with its process."""

    name: str
    roles: tuple[str, ...]
    help: str
    labels: tuple[str, ...] = ()
    """Beside `run`, which every metric has."""
    field: str = ""
    """Of a line of metrics, which the gauge shows or the counter adds up."""

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
    MetricName("evenkeel_phase_seconds", LEARNER, "Seconds of the step's phases.", ("phase",)),
    MetricName("evenkeel_publish_phase_seconds", LEARNER, "Seconds of the parts of the newest publish.", ("phase",)),
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

METRICS_PORT_VARIABLE = "EVENKEEL_METRICS_PORT"
"""Environment of a role's process: where it shows its metrics. Without it, it shows none."""
METRICS_HOST_VARIABLE = "EVENKEEL_METRICS_HOST"


OF_BUCKET = {
    "share": "evenkeel_bucket_token_ratio",
    "ess": "evenkeel_bucket_ess_ratio",
    "k3_kl": "evenkeel_bucket_k3_kl_nats",
}
"""Statistic of a bucket in a line's `mismatch` → gauge."""
SINCE_START = tuple(metric.name for metric in METRICS if metric.name.endswith("_timestamp_seconds"))
"""Before the run's first step or batch they show when the process started: one that never gets there has no other
sign."""
NEWEST: Mapping[str, tuple[Role, Literal["metrics", "events"], EventKind | None]] = {
    "evenkeel_last_step_timestamp_seconds": ("learner", "metrics", None),
    "evenkeel_last_batch_timestamp_seconds": ("collector", "events", "committed"),
}
"""Gauge → whose work it is, and where earlier starts have left its time. A role that dies before its first step or
batch, each time that it is started again, would otherwise look as if it had just begun."""
LONGEST_PAUSE_S = 1800.0
"""Between two starts; after a longer one the time begins anew. ops/alerts/evenkeel.yaml waits for as long."""
LEFT_OUT = {
    "dropped": "unfit",
    "zero_variance_dropped": "zero_variance",
    "filtered": "filtered",
    "solved_groups": "solved",
}
"""Field of a `committed` event → why groups were left out."""


class RunMetrics:
    """The metrics of one role of the run in `run_dir`, in a registry of their own."""

    def __init__(self, role: str, run_dir: Path) -> None:
        self.role = role
        self.registry = CollectorRegistry()
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._old_notes = self._fatal_notes()
        """Of earlier starts: a run that was started again has not given up."""
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._recipe: Recipe | None = None
        self._fleet: Callable[[], Sequence[EngineState]] | None = None
        self._waiting: Callable[[], int] | None = None
        self._set("evenkeel_role_info", 1, role=role)
        for metric in METRICS:
            if role in metric.roles and metric.name in SINCE_START:
                self._set(metric.name, time.time())
                self._set(metric.name, self._time_before(metric.name))
            elif role in metric.roles and metric.kind == "counter" and not metric.labels:
                self._count(metric.name, 0)  # shown from the start, so that its first increase can be seen
        self.registry.register(_AtScrape(self))

    def _time_before(self, name: str) -> float | None:
        """Since when nothing was done: the first of the starts that have followed the newest step or batch, and one
        another within LONGEST_PAUSE_S, so that a pause of the run does not count. None where nothing was done yet, or
        nobody can tell."""
        if name in NEWEST:
            role, log, kind = NEWEST[name]
            with suppress(OSError, ValueError, EvenKeelError):
                if line := newest_line(self._run_dir, log, kind):
                    done = float(line["time"])
                    return first_start_after(epoch_folder(self._run_dir, role), done, LONGEST_PAUSE_S) or done
        return None

    def observe(self, which: LogName, line: Mapping[str, Any]) -> None:
        """Take in one line of the event log; an observer of pipeline.data.event_log.EventLog. Raises nothing."""
        with self._lock:
            self._set("evenkeel_heartbeat_timestamp_seconds", line.get("time"))
            if which == "metrics":
                self._observe_step(line)
            else:
                observe = getattr(self, f"_observe_{line.get('kind')}", None)
                if observe is not None:
                    observe(line)

    def watch_fleet(self, state: Callable[[], Sequence[EngineState]], waiting: Callable[[], int] | None = None) -> None:
        """Show the engines as `state` gives them and the prompts that wait, at each scrape, in another thread."""
        self._fleet, self._waiting = state, waiting

    def serve(self, port: int, host: str = LOOPBACK) -> int:
        """Answer on the port, in a thread that ends with the process; returns the port. Raises PortInUseError."""
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise PortInUseError(
                f"metrics of the {self.role} cannot be shown on {host}:{port} ({error.strerror}); give another "
                "--metrics-port, or none"
            ) from None
        return int(server.server_port)

    def at_scrape(self) -> Iterable[Metric]:
        """What is looked up when someone asks."""
        yield from self._engines()
        published = announced(self._run_dir / "policy" / "PUBLISHED")
        yield self._family("evenkeel_published_version", [((), float(published[-1]) if published else None)])
        if self.role not in BY_NAME["evenkeel_finished"].roles:
            return
        yield self._family("evenkeel_finished", [((), _is_finished(self._run_dir))])
        errors = {error for path in self._fatal_notes() - self._old_notes if (error := _error_in(path))}
        yield self._family("evenkeel_fatal", [((error,), 1.0) for error in sorted(errors)])
        with suppress(OSError):
            usage = shutil.disk_usage(self._run_dir)
            yield self._family("evenkeel_run_directory_free_bytes", [((), usage.free)])
            yield self._family("evenkeel_run_directory_size_bytes", [((), usage.total)])

    def _fatal_notes(self) -> set[Path]:
        return set((self._run_dir / "logs" / "fatal").glob("*.json"))

    def _engines(self) -> Iterable[Metric]:
        if self._waiting is not None:
            yield self._family("evenkeel_waiting_prompts", [((), self._waiting())])
        if self._fleet is None:
            return
        engines = self._fleet()
        label = {engine: (str(engine.index),) for engine in engines}
        yield self._family("evenkeel_engines", [((), len(engines))])
        yield self._family("evenkeel_engines_quarantined", [((), sum(engine.quarantined for engine in engines))])
        yield self._family("evenkeel_engine_quarantined", [(label[one], float(one.quarantined)) for one in engines])
        yield self._family("evenkeel_engine_served_version", [(label[one], one.version) for one in engines])
        yield self._family("evenkeel_engine_in_flight_requests", [(label[one], one.in_flight) for one in engines])

    def _observe_step(self, line: Mapping[str, Any]) -> None:
        for metric in METRICS:
            if metric.field:
                (self._count if metric.kind == "counter" else self._set)(metric.name, line.get(metric.field))
        self._count("evenkeel_steps_total")
        recipe = self._frozen_recipe()
        if isinstance(step := line.get("step"), int) and recipe is not None:
            self._set("evenkeel_steps_left", recipe.run.steps - 1 - step)
        self._set_buckets(line.get("mismatch"))
        self._set_alarms(line, quantized=recipe is not None and formats_differ(recipe))
        self._set_phases("evenkeel_phase_seconds", line.get("seconds"))
        self._set_phases("evenkeel_publish_phase_seconds", line.get("publish_seconds"))

    def _frozen_recipe(self) -> Recipe | None:
        """Read once; None where it cannot be read."""
        if self._recipe is None:
            with suppress(OSError, EvenKeelError):
                self._recipe = RunDirectory(self._run_dir).recipe()
        return self._recipe

    def _set_buckets(self, splits: Any) -> None:
        """Those of the newest step alone: a bucket without tokens shows nothing."""
        for name in OF_BUCKET.values():
            self._clear(name)
        for split, buckets in splits.items() if isinstance(splits, Mapping) else ():
            for bucket, statistics in buckets.items() if isinstance(buckets, Mapping) else ():
                for field, name in OF_BUCKET.items():
                    value = statistics.get(field) if isinstance(statistics, Mapping) else None
                    self._set(name, value, split=str(split), bucket=str(bucket))

    def _set_alarms(self, line: Mapping[str, Any], *, quantized: bool) -> None:
        self._clear("evenkeel_alarm_value")
        broken = {alarm.rule.name for alarm in alarms(line, quantized=quantized)}
        for rule in RULES:
            self._set("evenkeel_alarm", float(rule.name in broken), alarm=rule.name)
            self._set("evenkeel_alarm_bound", rule.bound_for(quantized=quantized), alarm=rule.name)
            self._set("evenkeel_alarm_value", rule.value(line), alarm=rule.name)

    def _observe_committed(self, event: Mapping[str, Any]) -> None:
        self._set("evenkeel_last_batch", event.get("batch"))
        self._set("evenkeel_last_batch_timestamp_seconds", event.get("time"))
        self._count("evenkeel_samples_total", event.get("samples"))
        self._count("evenkeel_interrupted_samples_total", event.get("interrupted"))
        for field, reason in LEFT_OUT.items():
            self._count("evenkeel_groups_left_out_total", event.get(field), reason=reason)
        self._set_phases("evenkeel_collect_phase_seconds", event.get("seconds"))

    def _observe_retried(self, _event: Mapping[str, Any]) -> None:
        self._count("evenkeel_retries_total")

    def _observe_bad_answer(self, event: Mapping[str, Any]) -> None:
        engine = event.get("engine")
        self._count("evenkeel_bad_answers_total", engine="behind the router" if engine is None else str(engine))

    def _observe_evaluated(self, event: Mapping[str, Any]) -> None:
        self._set("evenkeel_pass_at_1_ratio", event.get("pass_at_1"))
        self._set("evenkeel_evaluated_version", event.get("version"))

    def _observe_saved(self, event: Mapping[str, Any]) -> None:
        self._set("evenkeel_saved_step", event.get("step"))
        self._set("evenkeel_save_seconds", event.get("seconds"))

    def _observe_started(self, event: Mapping[str, Any]) -> None:
        process = str(event.get("process"))
        self._count("evenkeel_starts_total", process=process)
        self._count("evenkeel_restarts_total", 0, process=process)

    def _observe_restarted(self, event: Mapping[str, Any]) -> None:
        self._count("evenkeel_restarts_total", process=str(event.get("process")))

    def _set_phases(self, name: str, seconds: Any) -> None:
        for phase, value in seconds.items() if isinstance(seconds, Mapping) else ():
            self._set(name, value, phase=phase.removesuffix("_s"))

    def _set(self, name: str, value: Any, **labels: str) -> None:
        if not isinstance(value, int | float):
            return
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, BY_NAME[name].help, all_labels(name), registry=self.registry)
        self._gauges[name].labels(run=self._run_dir.name, **labels).set(value)

    def _clear(self, name: str) -> None:
        if name in self._gauges:
            self._gauges[name].clear()

    def _count(self, name: str, more: Any = 1, **labels: str) -> None:
        if not isinstance(more, int | float) or more < 0:
            return
        if name not in self._counters:
            self._counters[name] = Counter(name, BY_NAME[name].help, all_labels(name), registry=self.registry)
        self._counters[name].labels(run=self._run_dir.name, **labels).inc(more)

    def _family(self, name: str, values: Sequence[tuple[tuple[str, ...], float | None]]) -> Metric:
        family = GaugeMetricFamily(name, BY_NAME[name].help, labels=all_labels(name))
        for labels, value in values:
            if value is not None:
                family.add_metric((self._run_dir.name, *labels), value)
        return family


class _AtScrape:
    """A collector of prometheus_client: asked at each scrape."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.at_scrape()


def metrics_of(role: str, run_dir: Path) -> RunMetrics | None:
    """What a role shows, on the port that its environment names; None when that names none."""
    port = os.environ.get(METRICS_PORT_VARIABLE, "")
    if not port:
        return None
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise EvenKeelError(
            f"{METRICS_PORT_VARIABLE} is {port!r}, expected a port from 0 to 65535; unset it to show no metrics"
        )
    return shown_metrics(role, run_dir, int(port), os.environ.get(METRICS_HOST_VARIABLE) or LOOPBACK)


def shown_metrics(role: str, run_dir: Path, port: int, host: str = LOOPBACK) -> RunMetrics | None:
    """Show a role's metrics at the port. None, with a warning, where that cannot be: a run never ends for its
    metrics."""
    metrics = RunMetrics(role, run_dir)
    try:
        metrics.serve(port, host)
    except PortInUseError as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)
        return None
    return metrics


def observers_of(metrics: RunMetrics | None) -> tuple[Observer, ...]:
    """For an EventLog."""
    return () if metrics is None else (metrics.observe,)


def all_labels(name: str) -> tuple[str, ...]:
    """Every metric names its run."""
    return ("run", *BY_NAME[name].labels)


def _is_finished(run_dir: Path) -> float | None:
    with suppress(OSError, EvenKeelError):
        return float(RunDirectory(run_dir).is_finished())
    return None


def _error_in(path: Path) -> str | None:
    try:
        return str(read_sealed_json(path, "it is only counted")["error"])
    except (OSError, StoreError, KeyError):
        return None


def markdown() -> str:
    """Return the table of all metrics as Markdown."""
    lines = ["| name | shown by | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {', '.join(metric.roles)} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"
