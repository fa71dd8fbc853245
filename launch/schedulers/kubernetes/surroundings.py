"""What pods need around them: the recipe, the shared volume, services and what Prometheus reads."""

from __future__ import annotations

import math
from importlib import resources

import yaml

from launch.schedulers.kubernetes.base import Metadata
from launch.schedulers.kubernetes.job import (
    METRICS_PORT,
    RECIPE_FILE,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    RUN_LABEL,
    RunOnKubernetes,
)
from launch.schedulers.kubernetes.objects import (
    ClaimResources,
    ClaimSpec,
    ConfigMap,
    MonitorEndpoint,
    PersistentVolumeClaim,
    PrometheusRule,
    Service,
    ServiceMonitor,
    ServiceMonitorSpec,
    ServicePort,
    ServiceSpec,
)
from launch.schedulers.kubernetes.pods import LabelSelector

_FIRST_POD = {"batch.kubernetes.io/job-completion-index": "0"}
_TRAJECTORY_BYTES = 16
"""Of a token in a batch: id, log-probability, version and what the learner keeps of it."""


def config_map(run: RunOnKubernetes) -> ConfigMap:
    """The recipe, resolved. The learner's first pod freezes it into the run directory."""
    metadata = run.metadata().model_copy(update=dict(name=run.config_map))
    return ConfigMap(metadata=metadata, immutable=True, data={RECIPE_FILE: run.recipe.to_yaml()})


def volume_claim(run: RunOnKubernetes) -> PersistentVolumeClaim:
    """The shared volume."""
    size = run.options.pvc_size or f"{math.ceil(_volume_bytes(run) / 2**30)}Gi"
    return PersistentVolumeClaim(
        metadata=run.metadata("run"),
        spec=ClaimSpec(
            storage_class_name=run.options.storage_class,
            resources=ClaimResources(requests=dict(storage=size)),
        ),
    )


def _volume_bytes(run: RunOnKubernetes) -> float:
    """What a run leaves, with one checkpoint and one policy being written, and the model twice. `weights.keep` are kept
    beside the published policy."""
    recipe, planner = run.recipe, run.planner
    samples = recipe.run.steps * recipe.rollout.prompts_per_batch * recipe.rollout.group_size
    return (
        (recipe.checkpoint.keep + 1) * run.needs.checkpoint_bytes
        + (recipe.weights.keep + 2) * planner.engine_model_bytes
        + 4.0 * planner.config.num_parameters
        + samples * recipe.rollout.context_tokens * _TRAJECTORY_BYTES
    )


def services(run: RunOnKubernetes) -> list[Service]:
    """The router, for people and other programs, and metrics. The pods of a run find one another by JobSet's names.

    Only the learner's first pod has metrics: rank 0 runs there.
    """
    metrics = ServicePort(name="metrics", port=METRICS_PORT, target_port="metrics")
    found = [
        _service(run, "learner", _FIRST_POD, metrics),
        _service(run, "collector", {}, metrics),
    ]
    if run.has_router:
        http = ServicePort(name="http", port=ROUTER_PORT, target_port="http")
        router_metrics = ServicePort(name="metrics", port=ROUTER_METRICS_PORT, target_port="metrics")
        found.append(_service(run, "router", {}, http, router_metrics))
    return found


def _service(run: RunOnKubernetes, role: str, further: dict[str, str], *ports: ServicePort) -> Service:
    return Service(metadata=run.metadata(role), spec=ServiceSpec(selector=run.selector(role) | further, ports=ports))


def _monitor_metadata(run: RunOnKubernetes) -> Metadata:
    """With the labels by which Prometheus' operator finds what is meant for it."""
    own = run.metadata()
    wanted = dict(label.split("=", 1) for label in run.options.monitor_labels)
    return own.model_copy(update=dict(labels={**(own.labels or {}), **wanted}))


def alerts(run: RunOnKubernetes) -> PrometheusRule:
    """The rules of all runs. Where several runs bring them, Prometheus' alerts are the same, and told once."""
    text = resources.files("launch.schedulers.kubernetes").joinpath("alerts.yaml").read_text(encoding="utf-8")
    return PrometheusRule(metadata=_monitor_metadata(run), spec=yaml.safe_load(text))


def service_monitor(run: RunOnKubernetes) -> ServiceMonitor:
    """Ours, and the engines' own through the router: their ports stay closed to everybody else."""
    engines = (MonitorEndpoint(port="http", path="/engine_metrics"),) if run.has_router else ()
    return ServiceMonitor(
        metadata=_monitor_metadata(run),
        spec=ServiceMonitorSpec(
            selector=LabelSelector(match_labels={RUN_LABEL: run.name}),
            endpoints=(MonitorEndpoint(port="metrics", path="/metrics"), *engines),
        ),
    )
