"""Build the objects around the pods of a run: recipe, shared volume, services, network policies, disruption budgets and
Prometheus monitors.

Allowed traffic:

collector ──▶ router ──▶ engine          requests
collector, learner ──▶ router            the list of engines
collector, learner ──▶ engine            weights and admin routes: the engine's port, which also needs the API key
learner ◀──▶ learner, engine             NCCL, which picks its ports
monitoring ──▶ learner, collector, router
"""

from __future__ import annotations

import math
from importlib import resources

import yaml

from launch.schedulers.kubernetes.run import (
    ENGINE_PORT,
    METRICS_PORT,
    RECIPE_FILE,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    RUN_LABEL,
    Object,
    RunOnKubernetes,
)

_FIRST_POD = {"batch.kubernetes.io/job-completion-index": "0"}
_TRAJECTORY_BYTES = 16
"""Bytes of one token in a batch: id, log-probability, version and the learner's files."""
_ANY_PORT = dict(port=1024, endPort=65535)


def config_map(run: RunOnKubernetes) -> Object:
    """Build the ConfigMap of the resolved recipe. The learner's first pod freezes it into the run directory."""
    found = run.object("v1", "ConfigMap", immutable=True, data={RECIPE_FILE: run.recipe.to_yaml()})
    found["metadata"]["name"] = run.config_map
    return found


def volume_claim(run: RunOnKubernetes) -> Object:
    """Claim the shared volume: room for the run's files, an unfinished checkpoint and policy, and the model twice."""
    recipe, planner = run.recipe, run.planner
    samples = recipe.run.steps * recipe.rollout.prompts_per_batch * recipe.rollout.group_size
    needed = (
        (recipe.checkpoint.keep + 1) * run.needs.checkpoint_bytes
        + (recipe.weights.keep + 2) * planner.engine_model_bytes
        + 4.0 * planner.config.num_parameters
        + samples * recipe.rollout.context_tokens * _TRAJECTORY_BYTES
    )
    spec = dict(
        accessModes=["ReadWriteMany"],
        storageClassName=run.options.storage_class,
        resources=dict(requests=dict(storage=f"{math.ceil(needed / 2**30)}Gi")),
    )
    return run.object("v1", "PersistentVolumeClaim", "run", spec=spec)


def services(run: RunOnKubernetes) -> list[Object]:
    """Build the services of router and metrics; the run's pods find each other by JobSet's host names. Only the
    learner's first pod, which runs rank 0, serves metrics."""

    def service(role: str, further: dict[str, str], **ports: int) -> Object:
        shown = [dict(name=name, port=port, targetPort=name) for name, port in ports.items()]
        return run.object("v1", "Service", role, spec=dict(selector=run.selector(role) | further, ports=shown))

    found = [
        service("learner", _FIRST_POD, metrics=METRICS_PORT),
        service("collector", {}, metrics=METRICS_PORT),
    ]
    if run.has_router:
        found.append(service("router", {}, http=ROUTER_PORT, metrics=ROUTER_METRICS_PORT))
    return found


def network_policies(run: RunOnKubernetes) -> list[Object]:
    """Build the policies that refuse all incoming traffic except the listed."""

    def policy(role: str | None, *rules: Object) -> Object:
        selector = dict(matchLabels=run.selector(role))
        spec = dict(podSelector=selector, policyTypes=["Ingress"], ingress=list(rules))
        return run.object("networking.k8s.io/v1", "NetworkPolicy", role or "closed", spec=spec)

    def allow(roles: tuple[str, ...], port: Object) -> Object:
        sources = [dict(podSelector=dict(matchLabels=run.selector(role))) for role in roles]
        return {"from": sources, "ports": [port]}

    def scraped(*ports: int) -> Object:
        source = dict(namespaceSelector=dict(matchLabels={"kubernetes.io/metadata.name": "monitoring"}))
        return {"from": [source], "ports": [dict(port=port) for port in ports]}

    broadcast = run.recipe.weights.channel == "broadcast"
    nccl = ("learner", "engine") if broadcast else ("learner",)
    callers = ("learner", "collector", "router") if run.has_router else ("learner", "collector")
    to_engine = [allow(callers, dict(port=ENGINE_PORT))]
    if broadcast:
        to_engine.append(allow(("learner",), _ANY_PORT))
    if run.engine_nodes > 1:
        to_engine.append(allow(("engine",), _ANY_PORT))
    to_router = [
        allow(("learner", "collector"), dict(port=ROUTER_PORT)),
        scraped(ROUTER_PORT, ROUTER_METRICS_PORT),
    ]
    return [
        policy(None),
        policy("learner", allow(nccl, _ANY_PORT), scraped(METRICS_PORT)),
        policy("collector", scraped(METRICS_PORT)),
        *([policy("router", *to_router)] if run.has_router else []),
        policy("engine", *to_engine),
    ]


def disruption_budgets(run: RunOnKubernetes) -> list[Object]:
    """Build the budgets that let a drain take one learner pod (the learner then saves and restarts elsewhere) and one
    engine pod at a time. Collector and router lose nothing. For a Job's pods, minAvailable must be a number."""
    pods = dict(learner=run.learner_nodes, engine=run.recipe.rollout.engines * run.engine_nodes)
    return [
        run.object(
            "policy/v1",
            "PodDisruptionBudget",
            role,
            spec=dict(minAvailable=count - 1, selector=dict(matchLabels=run.selector(role))),
        )
        for role, count in pods.items()
    ]


def monitors(run: RunOnKubernetes) -> list[Object]:
    """Let Prometheus' operator scrape our metrics, and the engines' through the router, and add the alert rules. Rules
    of several runs are identical, so each alert fires once."""
    endpoints = [dict(port="metrics", path="/metrics", interval="15s")]
    if run.has_router:
        endpoints.append(dict(port="http", path="/engine_metrics", interval="15s"))
    text = resources.files("launch.schedulers.kubernetes").joinpath("alerts.yaml").read_text(encoding="utf-8")
    spec = dict(selector=dict(matchLabels={RUN_LABEL: run.name}), endpoints=endpoints)
    return [
        run.object("monitoring.coreos.com/v1", "ServiceMonitor", spec=spec),
        run.object("monitoring.coreos.com/v1", "PrometheusRule", spec=yaml.safe_load(text)),
    ]
