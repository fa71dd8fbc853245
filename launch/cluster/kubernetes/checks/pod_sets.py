"""Objects as checks see them: plain data, as it is in the files, and the pods that it leads to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.cluster.kubernetes.job import ROLE_LABEL

Object = dict[str, Any]

JOB_INDEX, JOB_NODE = "jobset.sigs.k8s.io/job-index", "batch.kubernetes.io/job-completion-index"
GROUP_INDEX, GROUP_NODE = "leaderworkerset.sigs.k8s.io/group-index", "leaderworkerset.sigs.k8s.io/worker-index"


@dataclass(frozen=True, kw_only=True)
class PodSet:
    """Pods of one template: `count` units (Jobs, or groups) of `nodes` pods each."""

    owner: str
    """For messages."""
    role: str
    """By the label."""
    job: str
    """Name of the replicated job; "" in a LeaderWorkerSet."""
    count: int
    nodes: int
    template: Object
    names: Mapping[tuple[int, int], str]
    """(unit, node) → the name by which other pods reach that pod."""

    @property
    def spec(self) -> Object:
        found: Object = self.template["spec"]
        return found

    @property
    def container(self) -> Object:
        """The first; that there is only one is checked elsewhere."""
        found: Object = self.spec["containers"][0]
        return found

    @property
    def labels(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.template.get("metadata", {}).get("labels", {})
        return found

    @property
    def ports(self) -> Mapping[str, int]:
        return {one["name"]: one["containerPort"] for one in self.container.get("ports", [])}

    @property
    def environment(self) -> Mapping[str, Object]:
        return {one["name"]: one for one in self.container.get("env", [])}

    def limit(self, resource: str) -> int:
        """Of one pod; 0 when it has none."""
        return int(self.container["resources"].get("limits", {}).get(resource, 0))

    def is_picked_by(self, labels: Mapping[str, str] | None) -> bool:
        """Whether a selector takes some of these pods. An empty one takes all, none takes nothing."""
        if labels is None:
            return False
        indices = {JOB_INDEX: self.count, GROUP_INDEX: self.count, JOB_NODE: self.nodes, GROUP_NODE: self.nodes}
        return all(
            value.isdecimal() and int(value) < indices[name] if name in indices else self.labels.get(name) == value
            for name, value in labels.items()
        )


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def named(one: Object) -> str:
    """For messages."""
    return f"{one['kind']} {one['metadata']['name']}"


def pod_sets(objects: Sequence[Object]) -> list[PodSet]:
    """All that the objects lead to."""
    return [*_of_job_sets(objects), *_of_leader_worker_sets(objects)]


def _of_job_sets(objects: Sequence[Object]) -> Iterator[PodSet]:
    for one in of_kind(objects, "JobSet"):
        name, subdomain = one["metadata"]["name"], one["spec"].get("network", {}).get("subdomain")
        for job in one["spec"]["replicatedJobs"]:
            spec = job["template"]["spec"]
            count, nodes = job["replicas"], spec["completions"]
            yield PodSet(
                owner=f"{named(one)}, {job['name']}",
                role=spec["template"].get("metadata", {}).get("labels", {}).get(ROLE_LABEL, ""),
                job=job["name"],
                count=count,
                nodes=nodes,
                template=spec["template"],
                names={
                    (unit, node): f"{name}-{job['name']}-{unit}-{node}.{subdomain or name}"
                    for unit in range(count)
                    for node in range(nodes)
                },
            )


def _of_leader_worker_sets(objects: Sequence[Object]) -> Iterator[PodSet]:
    for one in of_kind(objects, "LeaderWorkerSet"):
        name, spec = one["metadata"]["name"], one["spec"]
        template, size = spec["leaderWorkerTemplate"], spec["leaderWorkerTemplate"]["size"]
        worker = template["workerTemplate"]
        leader = template.get("leaderTemplate", worker)
        parts = [(leader, range(1))] if size == 1 else [(leader, range(1)), (worker, range(1, size))]
        for part, nodes in parts:
            yield PodSet(
                owner=named(one),
                role=part.get("metadata", {}).get("labels", {}).get(ROLE_LABEL, ""),
                job="",
                count=spec["replicas"],
                nodes=len(nodes),
                template=part,
                names={
                    (group, node): f"{name}-{group}{f'-{node}' if node else ''}.{name}"
                    for group in range(spec["replicas"])
                    for node in nodes
                },
            )
