"""Who reaches whom: services, network policies, monitors, and pods that budgets and placement rules pick."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launch.cluster.kubernetes.checks.pod_sets import Object, PodSet, named, of_kind
from launch.cluster.kubernetes.job import (
    ENGINE_PORT,
    HEARTBEAT_PORT,
    METRICS_PORT,
    RENDEZVOUS_PORT,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    RunOnKubernetes,
)

_CHOSEN_BY_NCCL = 40123
"""Stands for any port that a program picks."""
_MONITORING = "monitoring"
_STRANGER = "a pod that is no part of the run"


@dataclass(frozen=True)
class Call:
    """From a role, monitoring or a stranger to a role's port."""

    source: str
    target: str
    port: int


def needed_calls(run: RunOnKubernetes) -> set[Call]:
    """Without these a run does not work."""
    engine, router = ("engine", ENGINE_PORT), ("router", ROUTER_PORT)
    calls = {Call(source, *engine) for source in ("learner", "collector")}
    calls |= {Call(_MONITORING, role, METRICS_PORT) for role in ("learner", "collector")}
    if run.has_router:
        calls |= {Call("router", *engine), Call("learner", *router), Call("collector", *router)}
        calls |= {Call(_MONITORING, *router), Call(_MONITORING, "router", ROUTER_METRICS_PORT)}
    if run.learner_nodes > 1:
        ports = (RENDEZVOUS_PORT, HEARTBEAT_PORT, _CHOSEN_BY_NCCL)
        calls |= {Call("learner", "learner", port) for port in ports}
    if run.recipe.weights.channel == "broadcast":
        calls |= {Call("learner", "engine", _CHOSEN_BY_NCCL), Call("engine", "learner", _CHOSEN_BY_NCCL)}
    if run.engine_nodes > 1:
        calls.add(Call("engine", "engine", _CHOSEN_BY_NCCL))
    return calls


def forbidden_calls(run: RunOnKubernetes) -> set[Call]:
    """Weight and admin routes are the engine's port; nothing else is open to strangers either."""
    targets = dict(engine=ENGINE_PORT, router=ROUTER_PORT, learner=RENDEZVOUS_PORT, collector=METRICS_PORT)
    calls = {Call(_STRANGER, target, port) for target, port in targets.items()}
    calls |= {Call(_STRANGER, target, _CHOSEN_BY_NCCL) for target in targets}
    calls |= {Call(_MONITORING, "engine", ENGINE_PORT), Call(_MONITORING, "learner", RENDEZVOUS_PORT)}
    calls |= {Call("router", "learner", _CHOSEN_BY_NCCL), Call("router", "engine", _CHOSEN_BY_NCCL)}
    calls |= {Call("collector", "engine", _CHOSEN_BY_NCCL), Call("engine", "router", ROUTER_PORT)}
    if run.engine_nodes == 1:
        calls.add(Call("engine", "engine", ENGINE_PORT))
    return calls


def check_policies(objects: Sequence[Object], pods: Sequence[PodSet], run: RunOnKubernetes) -> Iterator[str]:
    """What the policies allow, worked out, against what the run needs."""
    policies = of_kind(objects, "NetworkPolicy")
    for one in pods:
        closed = (policy for policy in policies if not policy["spec"].get("ingress"))
        if not any(one.is_picked_by(_labels(policy["spec"]["podSelector"])) for policy in closed):
            yield f"{one.owner}: no NetworkPolicy closes it to the rest of the cluster"
    for policy in policies:
        yield from _policy_hits_pods(policy, pods)
    for call in sorted(needed_calls(run), key=str):
        if not _allowed(call, policies, pods, run):
            yield f"no NetworkPolicy lets {call.source} call {call.target} on port {call.port}, which a run needs"
    for call in sorted(forbidden_calls(run), key=str):
        if _allowed(call, policies, pods, run):
            yield f"NetworkPolicies let {call.source} call {call.target} on port {call.port}; they must not"


def _policy_hits_pods(policy: Object, pods: Sequence[PodSet]) -> Iterator[str]:
    picked = [one for one in pods if one.is_picked_by(_labels(policy["spec"]["podSelector"]))]
    if not picked:
        yield f"{named(policy)} picks no pod"
    ports = {port for one in picked for port in one.ports.values()}
    for rule in policy["spec"].get("ingress") or []:
        for peer in rule.get("from", []):
            labels = _labels(peer.get("podSelector"))
            if labels is not None and not any(one.is_picked_by(labels) for one in pods):
                yield f"{named(policy)} lets pods in that do not exist: {labels}"
        for port in rule.get("ports", []):
            if "endPort" not in port and port["port"] not in ports:
                yield f"{named(policy)} opens port {port['port']}, which its pods do not have"


def _allowed(call: Call, policies: Sequence[Object], pods: Sequence[PodSet], run: RunOnKubernetes) -> bool:
    target = next((one for one in pods if one.role == call.target), None)
    if target is None:
        return False
    own = [policy for policy in policies if target.is_picked_by(_labels(policy["spec"]["podSelector"]))]
    if not own:
        return True  # no policy, nothing is closed
    rules = [rule for policy in own for rule in policy["spec"].get("ingress") or []]
    return any(_has_port(rule, call.port) and _lets_in(rule, call.source, pods, run) for rule in rules)


def _has_port(rule: Object, port: int) -> bool:
    ranges = [(one["port"], one.get("endPort", one["port"])) for one in rule.get("ports", [])]
    return not ranges or any(first <= port <= last for first, last in ranges)


def _lets_in(rule: Object, source: str, pods: Sequence[PodSet], run: RunOnKubernetes) -> bool:
    peers = rule.get("from")
    if not peers:
        return True
    namespace = {"kubernetes.io/metadata.name": run.options.monitoring_namespace}
    for peer in peers:
        spaces, labels = _labels(peer.get("namespaceSelector")), _labels(peer.get("podSelector"))
        if spaces is not None and (not spaces or (spaces == namespace and source == _MONITORING)):
            return True
        if spaces is None and labels is not None:
            picked = [one for one in pods if one.is_picked_by(labels)]
            if not labels or source in {one.role for one in picked}:
                return True
    return False


def _labels(selector: Object | None) -> Mapping[str, str] | None:
    return None if selector is None else selector.get("matchLabels", {})


def check_services(objects: Sequence[Object], pods: Sequence[PodSet], run: RunOnKubernetes) -> Iterator[str]:
    """Services lead to ports that exist, and Prometheus reads every one of them that has metrics."""
    services = of_kind(objects, "Service")
    for service in services:
        picked = [one for one in pods if one.is_picked_by(service["spec"]["selector"])]
        if not picked:
            yield f"{named(service)} picks no pod"
        for port in service["spec"]["ports"]:
            for one in picked:
                if one.ports.get(port["targetPort"]) != port["port"]:
                    leads = f"port {port['name']} leads to {port['targetPort']}"
                    yield f"{named(service)}: {leads}, which {one.owner} does not have at {port['port']}"
    for monitor in of_kind(objects, "ServiceMonitor"):
        labels = _labels(monitor["spec"]["selector"]) or {}
        watched = [one for one in services if labels.items() <= one["metadata"].get("labels", {}).items()]
        if len(watched) < len(services) or not labels:
            yield f"{named(monitor)} picks {len(watched)} of {len(services)} services"
        ports = {port["name"] for one in watched for port in one["spec"]["ports"]}
        paths = {(end["port"], end["path"]) for end in monitor["spec"]["endpoints"]}
        for port, _ in sorted(paths):
            if port not in ports:
                yield f"{named(monitor)} reads port {port}, which no service has"
        expected = {("metrics", "/metrics")} | ({("http", "/engine_metrics")} if run.has_router else set())
        if paths != expected:
            yield f"{named(monitor)} reads {sorted(paths)}, expected {sorted(expected)}"


def check_selectors(objects: Sequence[Object], pods: Sequence[PodSet]) -> Iterator[str]:
    """Budgets, affinity and spreading pick pods that exist."""
    for budget in of_kind(objects, "PodDisruptionBudget"):
        picked = [one for one in pods if one.is_picked_by(_labels(budget["spec"]["selector"]))]
        count = sum(one.count * one.nodes for one in picked)
        least = budget["spec"].get("minAvailable")
        if not isinstance(least, int) or "maxUnavailable" in budget["spec"]:
            yield f"{named(budget)}: pods of a Job have no scale, only minAvailable as a whole number works"
        elif not picked:
            yield f"{named(budget)} picks no pod"
        elif least != count - 1:
            yield f"{named(budget)}: {least} of {count} pods must stay, expected {count - 1}: drains take one"
    for one in pods:
        terms = one.spec.get("affinity", {}).get("podAffinity", {})
        for term in terms.get("preferredDuringSchedulingIgnoredDuringExecution", []):
            labels = _labels(term["podAffinityTerm"]["labelSelector"])
            if not any(other.is_picked_by(labels) for other in pods):
                yield f"{one.owner}: affinity to pods that do not exist: {labels}"
        for rule in one.spec.get("topologySpreadConstraints", []):
            if not one.is_picked_by(_labels(rule["labelSelector"])):
                yield f"{one.owner}: spreading counts other pods than its own: {rule['labelSelector']}"
