"""All checks of ours: what no schema knows. `evenkeel launch kubernetes` runs them before it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launch.cluster.kubernetes.checks.changes import check_changes
from launch.cluster.kubernetes.checks.jobs import check_gpus, check_sets
from launch.cluster.kubernetes.checks.naming import check_names, check_recipe
from launch.cluster.kubernetes.checks.network import check_policies, check_selectors, check_services
from launch.cluster.kubernetes.checks.pod_sets import Object, named, of_kind, pod_sets
from launch.cluster.kubernetes.checks.pods import check_pods
from launch.cluster.kubernetes.checks.secrets import check_secrets
from launch.cluster.kubernetes.job import RunOnKubernetes

_KNOWN = (
    *("ConfigMap", "PersistentVolumeClaim", "Service", "NetworkPolicy", "PodDisruptionBudget"),
    *("JobSet", "LeaderWorkerSet", "ServiceMonitor"),
)


def check(objects: Sequence[Object], run: RunOnKubernetes, before: Sequence[Object] = ()) -> Iterator[str]:
    """What is wrong, one line each; `before`: objects of the same run that may be in the cluster."""
    for one in objects:
        if one["kind"] not in _KNOWN:
            yield f"{named(one)}: nothing here needs that kind; pods have no rights in the cluster"
    pods = pod_sets(objects)
    yield from check_names(objects, run)
    yield from check_recipe(objects, run)
    yield from check_gpus(pods, run)
    yield from check_sets(objects, run)
    yield from check_pods(objects, pods, run)
    yield from check_secrets(objects, pods)
    yield from check_services(objects, pods, run)
    yield from check_policies(objects, pods, run)
    yield from check_selectors(objects, pods)
    yield from _storage(objects)
    yield from check_changes(before, objects)


def _storage(objects: Sequence[Object]) -> Iterator[str]:
    for one in of_kind(objects, "PersistentVolumeClaim"):
        if one["spec"].get("accessModes") != ["ReadWriteMany"]:
            yield f"{named(one)}: pods on several nodes write to it, so that it must be ReadWriteMany"
