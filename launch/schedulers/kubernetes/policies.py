"""Who may talk to whom, and how many pods may be taken away at once.

collector ──▶ router ──▶ engine          requests
collector, learner ──▶ router            which engines there are
collector, learner ──▶ engine            weights and admin routes: the engine's port, which needs the key too
learner ◀──▶ learner, engine             NCCL, which picks its ports
monitoring ──▶ learner, collector, router
"""

from __future__ import annotations

from launch.schedulers.kubernetes.job import (
    ENGINE_PORT,
    METRICS_PORT,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    RunOnKubernetes,
)
from launch.schedulers.kubernetes.objects import (
    DisruptionBudgetSpec,
    IngressRule,
    NetworkPolicy,
    NetworkPolicySpec,
    Peer,
    PodDisruptionBudget,
    PolicyPort,
)
from launch.schedulers.kubernetes.pods import LabelSelector

_ANY_PORT = (PolicyPort(port=1024, end_port=65535),)
_NAMESPACE = "kubernetes.io/metadata.name"


def network_policies(run: RunOnKubernetes) -> list[NetworkPolicy]:
    """Nothing may come in but what is listed."""
    broadcast = run.recipe.weights.channel == "broadcast"
    monitoring = Peer(
        namespace_selector=LabelSelector(match_labels={_NAMESPACE: run.options.monitoring_namespace}),
    )
    learner, collector, router, engine = (_peer(run, role) for role in ("learner", "collector", "router", "engine"))
    callers = (learner, collector, router) if run.has_router else (learner, collector)
    to_learner = [_allow((learner, engine) if broadcast else (learner,), *_ANY_PORT)]
    to_engine = [_allow(callers, PolicyPort(port=ENGINE_PORT))]
    if broadcast:
        to_engine.append(_allow((learner,), *_ANY_PORT))
    if run.engine_nodes > 1:
        to_engine.append(_allow((engine,), *_ANY_PORT))
    found = [
        _policy(run, None),
        _policy(run, "learner", *to_learner, _allow((monitoring,), PolicyPort(port=METRICS_PORT))),
        _policy(run, "collector", _allow((monitoring,), PolicyPort(port=METRICS_PORT))),
        _policy(run, "engine", *to_engine),
    ]
    if run.has_router:
        scraped = PolicyPort(port=ROUTER_PORT), PolicyPort(port=ROUTER_METRICS_PORT)
        found.insert(
            3, _policy(run, "router", _allow((learner, collector), scraped[0]), _allow((monitoring,), *scraped))
        )
    return found


def _peer(run: RunOnKubernetes, role: str) -> Peer:
    return Peer(pod_selector=LabelSelector(match_labels=run.selector(role)))


def _allow(sources: tuple[Peer, ...], *ports: PolicyPort) -> IngressRule:
    return IngressRule(sources=sources, ports=ports)


def _policy(run: RunOnKubernetes, role: str | None, *rules: IngressRule) -> NetworkPolicy:
    return NetworkPolicy(
        metadata=run.metadata(role or "closed"),
        spec=NetworkPolicySpec(pod_selector=LabelSelector(match_labels=run.selector(role)), ingress=rules),
    )


def disruption_budgets(run: RunOnKubernetes) -> list[PodDisruptionBudget]:
    """A drain takes one engine pod at a time, and one learner pod, after which the learner saves and starts elsewhere.

    Collector and router are single pods that lose nothing: they need no budget. Pods of a Job have no scale, so that
    Kubernetes takes a whole number of pods that stay, and nothing else.
    """
    pods = dict(learner=run.learner_nodes, engine=run.recipe.rollout.engines * run.engine_nodes)
    return [
        PodDisruptionBudget(
            metadata=run.metadata(role),
            spec=DisruptionBudgetSpec(
                min_available=count - 1,
                selector=LabelSelector(match_labels=run.selector(role)),
            ),
        )
        for role, count in pods.items()
    ]
