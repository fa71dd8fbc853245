"""Make what the pods of a run need around them: the recipe, the shared volume, services, rules of traffic and drains,
and what Prometheus reads.

collector ──▶ router ──▶ engine          requests
collector, learner ──▶ router            which engines there are
collector, learner ──▶ engine            weights and admin routes: the engine's port, which needs the key too
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
"""Of a token in a batch: id, log-probability, version and what the learner keeps of it."""
_ANY_PORT = dict(port=1024, endPort=65535)


def config_map(run: RunOnKubernetes) -> Object:
    """Hold the recipe, resolved. The learner's first pod freezes it into the run directory."""
    found = run.object("v1", "ConfigMap", immutable=True, data={RECIPE_FILE: run.recipe.to_yaml()})
    found["metadata"]["name"] = run.config_map
    return found


def volume_claim(run: RunOnKubernetes) -> Object:
    """Claim the shared volume: room for what a run leaves, with one checkpoint and one policy being written, and the
    model twice. `weights.keep` are kept beside the published policy."""
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
    """Show the router to people and other programs, and metrics. The pods of a run find one another by JobSet's names.

    Only the learner's first pod has metrics: rank 0 runs there.
    """

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
    """Let nothing come in but what is listed."""

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
    """Let a drain take one engine pod at a time, and one learner pod, after which the learner saves and starts
    elsewhere.

    Collector and router are single pods that lose nothing: they need no budget. Pods of a Job have no scale, so that
    Kubernetes takes a whole number of pods that stay, and nothing else.
    """
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
    """Make Prometheus' operator read our metrics, and the engines' own through the router, whose ports stay closed to
    everybody else; and give it the alerts of all runs. Where several runs bring them, they are the same, and told once.
    """
    endpoints = [dict(port="metrics", path="/metrics", interval="15s")]
    if run.has_router:
        endpoints.append(dict(port="http", path="/engine_metrics", interval="15s"))
    text = resources.files("launch.schedulers.kubernetes").joinpath("alerts.yaml").read_text(encoding="utf-8")
    spec = dict(selector=dict(matchLabels={RUN_LABEL: run.name}), endpoints=endpoints)
    return [
        run.object("monitoring.coreos.com/v1", "ServiceMonitor", spec=spec),
        run.object("monitoring.coreos.com/v1", "PrometheusRule", spec=yaml.safe_load(text)),
    ]
