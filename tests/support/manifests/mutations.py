"""Mistakes that somebody could make in the objects of a run, and who notices each.

python -m tests.support.manifests.mutations        prints the table
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launch.cluster.kubernetes.checks.everything import check
from launch.cluster.kubernetes.job import RunOnKubernetes
from launch.cluster.kubernetes.render import render
from tests.support.manifests.cases import documents, run_of
from tests.support.manifests.schemas import problems

Object = dict[str, Any]
Objects = list[Object]
CATCHERS = ("schema", "CEL", "ours")


@dataclass(frozen=True)
class Mutation:
    """One mistake."""

    name: str
    mutate: Callable[[Objects], None]
    over_the_old: bool = False
    """The objects are applied over those of the same run, so that changes count."""
    says: str = ""
    """Part of what must be said, where something else is said as well."""


def get(objects: Objects, kind: str, suffix: str = "") -> Object:
    """The object of a kind whose name ends so."""
    return next(one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(suffix))


def job(objects: Objects, role: str) -> Object:
    found: Object = next(one for one in get(objects, "JobSet")["spec"]["replicatedJobs"] if one["name"] == role)
    return found


def pod(objects: Objects, role: str) -> Object:
    found: Object = job(objects, role)["template"]["spec"]["template"]["spec"]
    return found


def container(objects: Objects, role: str) -> Object:
    found: Object = pod(objects, role)["containers"][0]
    return found


def at(part: Any, path: str) -> tuple[Any, Any]:
    """(what holds the last step of a dotted path, that step)."""
    *steps, last = path.split(".")
    for step in steps:
        part = part[int(step)] if isinstance(part, list) else part[step]
    return part, int(last) if isinstance(part, list) else last


def put(part: Any, path: str, value: Any) -> None:
    holder, step = at(part, path)
    holder[step] = value


def drop(part: Any, path: str) -> None:
    holder, step = at(part, path)
    del holder[step]


def rename(part: Any, path: str, to: str) -> None:
    holder, step = at(part, path)
    holder[to] = holder.pop(step)


def swap_word(words: list[str], old: str, new: str) -> None:
    words[words.index(old)] = new


def long_name(objects: Objects) -> None:
    get(objects, "JobSet")["metadata"]["name"] = "q" * 50


def duplicate_mount(objects: Objects) -> None:
    mounts = container(objects, "engine")["volumeMounts"]
    mounts.append(dict(mounts[0]))


def cyclic_start(objects: Objects) -> None:
    get(objects, "JobSet")["spec"]["startupPolicy"] = dict(startupPolicyOrder="InOrder")
    job(objects, "engine")["dependsOn"] = [dict(name="learner", status="Ready")]


def open_engines(objects: Objects) -> None:
    rules = get(objects, "NetworkPolicy", "-engine")["spec"]["ingress"]
    rules[0]["from"].append(dict(namespaceSelector={}))


def monitoring_on_engines(objects: Objects) -> None:
    monitoring = get(objects, "NetworkPolicy", "-collector")["spec"]["ingress"][0]["from"]
    get(objects, "NetworkPolicy", "-engine")["spec"]["ingress"][0]["from"] += monitoring


def fatal_rule_last(objects: Objects) -> None:
    rules = get(objects, "JobSet")["spec"]["failurePolicy"]["rules"]
    rules.append(rules.pop(0))


def key_in_recipe(objects: Objects) -> None:
    data = get(objects, "ConfigMap")["data"]
    data["recipe.yaml"] += "api_key: sk-0123456789abcdef0123\n"


def less_memory(objects: Objects) -> None:
    for part in container(objects, "learner")["resources"].values():
        part["memory"] = "64Gi"


TYPOS = (
    Mutation("typo: replicaedJobs", lambda o: rename(get(o, "JobSet"), "spec.replicatedJobs", "replicaedJobs")),
    Mutation("typo: sucessPolicy", lambda o: rename(get(o, "JobSet"), "spec.successPolicy", "sucessPolicy")),
    Mutation(
        "typo: action RestartJobs", lambda o: put(get(o, "JobSet"), "spec.failurePolicy.rules.2.action", "RestartJobs")
    ),
    Mutation("typo: backofLimit", lambda o: rename(job(o, "router"), "template.spec.backoffLimit", "backofLimit")),
    Mutation("typo: volumeMount", lambda o: rename(container(o, "engine"), "volumeMounts", "volumeMount")),
    Mutation("typo: readinesProbe", lambda o: rename(container(o, "engine"), "readinessProbe", "readinesProbe")),
    Mutation(
        "typo: matchLabel",
        lambda o: rename(get(o, "NetworkPolicy", "-engine"), "spec.podSelector.matchLabels", "matchLabel"),
    ),
    Mutation(
        "typo: minAvailible",
        lambda o: rename(get(o, "PodDisruptionBudget", "-engine"), "spec.minAvailable", "minAvailible"),
    ),
    Mutation(
        "typo: targetport", lambda o: rename(get(o, "Service", "-router"), "spec.ports.0.targetPort", "targetport")
    ),
    Mutation("typo: accessMode", lambda o: rename(get(o, "PersistentVolumeClaim"), "spec.accessModes", "accessMode")),
    Mutation("typo: immutible", lambda o: rename(get(o, "ConfigMap"), "immutable", "immutible")),
    Mutation("typo: endpoint of the monitor", lambda o: rename(get(o, "ServiceMonitor"), "spec.endpoints", "endpoint")),
    Mutation("typo: label key in metadata", lambda o: rename(get(o, "JobSet"), "metadata.labels", "lables")),
    Mutation("typo: kind Servise", lambda o: put(get(o, "Service", "-router"), "kind", "Servise")),
    Mutation("typo: apiVersion of JobSet", lambda o: put(get(o, "JobSet"), "apiVersion", "jobset.x-k8s.io/v1alpha3")),
    Mutation("type: replicas is text", lambda o: put(job(o, "engine"), "replicas", "8")),
    Mutation("startup in order and dependsOn", cyclic_start),
)

LINKS = (
    Mutation("wrong port: container", lambda o: put(container(o, "engine"), "ports.0.containerPort", 30001)),
    Mutation("wrong port: argument", lambda o: swap_word(container(o, "engine")["args"], "30000", "30001")),
    Mutation(
        "wrong port: network policy",
        lambda o: put(get(o, "NetworkPolicy", "-engine"), "spec.ingress.0.ports.0.port", 3000),
    ),
    Mutation("wrong port: service", lambda o: put(get(o, "Service", "-router"), "spec.ports.0.port", 8001)),
    Mutation("wrong port: probe", lambda o: put(container(o, "router"), "livenessProbe.httpGet.port", "htpp")),
    Mutation(
        "wrong port: readiness program",
        lambda o: swap_word(container(o, "engine")["readinessProbe"]["exec"]["command"], "30000", "8000"),
    ),
    Mutation(
        "service picks no pod",
        lambda o: put(get(o, "Service", "-collector"), "spec.selector", {"evenkeel/role": "colector"}),
    ),
    Mutation(
        "policy for a role that is not there",
        lambda o: put(get(o, "NetworkPolicy", "-router"), "spec.podSelector.matchLabels", {"evenkeel/role": "gateway"}),
    ),
    Mutation(
        "budget picks no pod",
        lambda o: put(
            get(o, "PodDisruptionBudget", "-engine"), "spec.selector.matchLabels", {"evenkeel/role": "engines"}
        ),
    ),
    Mutation(
        "monitor picks no service",
        lambda o: put(get(o, "ServiceMonitor"), "spec.selector.matchLabels", {"evenkeel/run": "other"}),
    ),
    Mutation("weight routes open to all namespaces", open_engines),
    Mutation("weight routes open to monitoring", monitoring_on_engines),
    Mutation("default deny is gone", lambda o: o.remove(get(o, "NetworkPolicy", "-closed"))),
    Mutation(
        "engines cannot reach the learner", lambda o: drop(get(o, "NetworkPolicy", "-learner"), "spec.ingress.0.from.1")
    ),
    Mutation(
        "--host is another name",
        lambda o: put(container(o, "collector"), "env.0.value", "qwen3-32b-collector-1-0.qwen3-32b"),
    ),
    Mutation("subdomain is another one", lambda o: put(get(o, "JobSet"), "spec.network.subdomain", "qwen3")),
    Mutation("$(EVENKEEL_NODE) is not set", lambda o: drop(container(o, "learner"), "env.0")),
)

PODS = (
    Mutation("GPU sum off by one: engines", lambda o: put(job(o, "engine"), "replicas", 7)),
    Mutation(
        "GPU sum off by one: learner pod",
        lambda o: container(o, "learner")["resources"]["limits"].update({"nvidia.com/gpu": "7"}),
    ),
    Mutation(
        "learner pods off by one", lambda o: job(o, "learner")["template"]["spec"].update(completions=3, parallelism=3)
    ),
    Mutation("missing volume: the run", lambda o: drop(pod(o, "collector"), "volumes.0")),
    Mutation("missing mount: /dev/shm", lambda o: drop(container(o, "engine"), "volumeMounts.3")),
    Mutation("one path mounted twice", duplicate_mount),
    Mutation(
        "claim of another name", lambda o: put(pod(o, "engine"), "volumes.0.persistentVolumeClaim.claimName", "run")
    ),
    Mutation(
        "an engine that is not given the recipe",
        lambda o: container(o, "engine")["args"].remove("--recipe"),
        says="not given --recipe",
    ),
    Mutation("ConfigMap of another name", lambda o: put(pod(o, "learner"), "volumes.3.configMap.name", "recipe")),
    Mutation(
        "shared volume at another path", lambda o: put(container(o, "collector"), "volumeMounts.0.mountPath", "/data")
    ),
    Mutation("/dev/shm of 64 MiB", lambda o: put(pod(o, "engine"), "volumes.4.emptyDir.sizeLimit", "64Mi")),
    Mutation("/tmp of 1 GiB", lambda o: put(pod(o, "engine"), "volumes.2.emptyDir.sizeLimit", "1Gi")),
    Mutation("memory below the plan", less_memory),
    Mutation("grace shorter than a save", lambda o: put(pod(o, "learner"), "terminationGracePeriodSeconds", 30)),
    Mutation(
        "startup probe too short for 32B", lambda o: put(container(o, "engine"), "startupProbe.failureThreshold", 6)
    ),
    Mutation(
        "liveness samples a token",
        lambda o: put(container(o, "engine"), "livenessProbe.httpGet.path", "/health_generate"),
    ),
    Mutation(
        "liveness of the learner",
        lambda o: put(
            container(o, "learner"),
            "livenessProbe",
            dict(tcpSocket=dict(port="metrics"), periodSeconds=10, timeoutSeconds=5, failureThreshold=3),
        ),
    ),
    Mutation(
        "readiness does not ask for the version",
        lambda o: put(
            container(o, "engine"),
            "readinessProbe",
            dict(httpGet=dict(path="/health", port="http"), periodSeconds=10, timeoutSeconds=5, failureThreshold=3),
        ),
    ),
    Mutation("option that no role has", lambda o: swap_word(container(o, "learner")["args"], "--nodes", "--hosts")),
    Mutation(
        "image by tag", lambda o: put(container(o, "engine"), "image", "registry.example/evenkeel/rollout:latest")
    ),
    Mutation(
        "learner on the rollout image", lambda o: put(container(o, "learner"), "image", container(o, "engine")["image"])
    ),
    Mutation(
        "root file system is writable",
        lambda o: put(container(o, "router"), "securityContext.readOnlyRootFilesystem", False),
    ),
    Mutation("may run as root", lambda o: drop(pod(o, "engine"), "securityContext.runAsNonRoot")),
    Mutation("token of a service account", lambda o: put(pod(o, "learner"), "automountServiceAccountToken", True)),
    Mutation("no tini", lambda o: put(container(o, "collector"), "command", ["sh", "-c"])),
)

SECRETS = (
    Mutation(
        "secret in an argument",
        lambda o: container(o, "router")["args"].append("--api-key=sk-0123456789abcdef0123"),
        says="an argument looks like a secret",
    ),
    Mutation(
        "secret in an environment variable",
        lambda o: container(o, "engine")["env"].append(dict(name="EVENKEEL_API_KEY", value="opensesame")),
    ),
    Mutation("secret in the ConfigMap", key_in_recipe, says="looks as if it held a secret"),
    Mutation(
        "a Secret among the files",
        lambda o: o.append(
            dict(
                apiVersion="v1",
                kind="Secret",
                metadata=dict(name="qwen3-32b-key", namespace="default"),
                stringData={"api-key": "x"},
            )
        ),
    ),
    Mutation("the key's file is readable by all", lambda o: put(pod(o, "engine"), "volumes.1.secret.defaultMode", 420)),
)

JOBS = (
    Mutation("name too long for pods", long_name),
    Mutation("name begins with a digit", lambda o: put(get(o, "Service", "-router"), "metadata.name", "32b-router")),
    Mutation("two jobs of one name", lambda o: put(job(o, "router"), "name", "collector")),
    Mutation(
        "exit 64 is tried again",
        lambda o: put(get(o, "JobSet"), "spec.failurePolicy.rules.0.onJobFailureMessagePatterns", ["exit code 65"]),
    ),
    Mutation("the fatal rule comes last", fatal_rule_last),
    Mutation("eviction counts as failure", lambda o: drop(job(o, "learner"), "template.spec.podFailurePolicy.rules.1")),
    Mutation("pods are restarted in place", lambda o: put(pod(o, "learner"), "restartPolicy", "OnFailure")),
    Mutation(
        "the run waits for its engines to end",
        lambda o: get(o, "JobSet")["spec"]["successPolicy"]["targetReplicatedJobs"].append("engine"),
    ),
    Mutation("not in Kueue's queue", lambda o: put(get(o, "JobSet"), "metadata.labels", {"evenkeel/run": "qwen3-32b"})),
    Mutation(
        "a role binding appears",
        lambda o: o.append(
            dict(
                apiVersion="rbac.authorization.k8s.io/v1",
                kind="RoleBinding",
                metadata=dict(name="qwen3-32b-all", namespace="default"),
                roleRef=dict(apiGroup="rbac.authorization.k8s.io", kind="ClusterRole", name="admin"),
            )
        ),
    ),
    Mutation(
        "recipe edited under its old name",
        lambda o: put(
            get(o, "ConfigMap"),
            "data",
            {"recipe.yaml": get(o, "ConfigMap")["data"]["recipe.yaml"].replace("steps: 400", "steps: 401")},
        ),
    ),
    Mutation(
        "volume for one node only",
        lambda o: put(get(o, "PersistentVolumeClaim"), "spec.accessModes", ["ReadWriteOnce"]),
    ),
    Mutation(
        "budget that blocks every drain",
        lambda o: put(get(o, "PodDisruptionBudget", "-engine"), "spec.minAvailable", 8),
    ),
    Mutation(
        "budget that Jobs cannot have",
        lambda o: put(
            get(o, "PodDisruptionBudget", "-engine"),
            "spec",
            dict(maxUnavailable=1, selector=get(o, "PodDisruptionBudget", "-engine")["spec"]["selector"]),
        ),
    ),
)

CHANGES = (
    Mutation(
        "immutable: network", lambda o: put(get(o, "JobSet"), "spec.network.publishNotReadyAddresses", False), True
    ),
    Mutation("immutable: maxRestarts", lambda o: put(get(o, "JobSet"), "spec.failurePolicy.maxRestarts", 99), True),
    Mutation(
        "immutable: environment of a job",
        lambda o: container(o, "engine")["env"].append(dict(name="NCCL_DEBUG", value="INFO")),
        True,
    ),
    Mutation(
        "immutable: class of the volume",
        lambda o: put(get(o, "PersistentVolumeClaim"), "spec.storageClassName", "fast"),
        True,
    ),
)

MUTATIONS = (*TYPOS, *LINKS, *PODS, *SECRETS, *JOBS, *CHANGES)


def caught_by(mutation: Mutation, clean: Objects, run: RunOnKubernetes) -> dict[str, list[str]]:
    """Catcher → what it said. Schemas are asked about objects that were touched."""
    mutated = copy.deepcopy(clean)
    mutation.mutate(mutated)
    before = clean if mutation.over_the_old else []
    old = {(one["kind"], one["metadata"]["name"]): one for one in before}
    found: dict[str, list[str]] = {}
    for one in mutated:
        if one not in clean:
            for catcher, text in problems(one, old.get((one["kind"], one["metadata"]["name"]))):
                found.setdefault(catcher, []).append(text)
    try:
        ours = list(check(mutated, run, before))
    except (KeyError, TypeError, AttributeError, IndexError):
        ours = []  # objects of the wrong shape are the schema's part
    return found | (dict(ours=ours) if ours else {})


def table() -> Iterator[tuple[Mutation, dict[str, list[str]]]]:
    """Every mutation, and who caught it."""
    run = run_of(queue="train")
    clean = documents(render(run))
    for mutation in MUTATIONS:
        yield mutation, caught_by(mutation, clean, run)


def printed(rows: list[tuple[Mutation, dict[str, list[str]]]]) -> str:
    """As a table for people."""
    lines = [f"{'mistake':42} {'schema':7} {'CEL':4} {'ours':5} what was said"]
    for mutation, found in rows:
        marks = [("yes" if catcher in found else "-") for catcher in CATCHERS]
        said = [text for catcher in reversed(CATCHERS) for text in found.get(catcher, [])] or ["NOBODY NOTICED"]
        best = next((text for text in said if mutation.says in text), said[0])
        lines.append(f"{mutation.name:42} {marks[0]:7} {marks[1]:4} {marks[2]:5} {best[:110]}")
    totals = {catcher: sum(catcher in found for _, found in rows) for catcher in CATCHERS}
    alone = sum(set(found) == {"ours"} for _, found in rows)
    missed = sum(not found for _, found in rows)
    lines.append(
        f"{len(rows)} mistakes: schema {totals['schema']}, CEL {totals['CEL']}, ours {totals['ours']} "
        f"({alone} by ours alone), missed {missed}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(printed(list(table())))
