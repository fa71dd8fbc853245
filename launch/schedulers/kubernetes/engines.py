"""Engines: one Job an engine inside the run's JobSet, or a LeaderWorkerSet beside it."""

from __future__ import annotations

from launch.schedulers.kubernetes.containers import RECIPE, Pod, Restart, pod_template, resources
from launch.schedulers.kubernetes.job import ENGINE_PORT, RunOnKubernetes
from launch.schedulers.kubernetes.pods import (
    Affinity,
    AffinityTerm,
    LabelSelector,
    PodAffinity,
    PodTemplate,
    SpreadConstraint,
    WeightedAffinityTerm,
)
from launch.schedulers.kubernetes.probes import engine_probes
from launch.schedulers.kubernetes.sets import LeaderWorkerSet, LeaderWorkerSetSpec, LeaderWorkerTemplate

_JOB_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"
_JOB_NODE = "metadata.labels['batch.kubernetes.io/job-completion-index']"
_GROUP_INDEX = "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"
_GROUP_NODE = "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"

NODE = "kubernetes.io/hostname"
"""Label that every node has for itself."""


def engine_job_pod(run: RunOnKubernetes) -> PodTemplate:
    """A pod of an engine's Job."""
    host = f"{run.name}-engine-$(EVENKEEL_INDEX)-$(EVENKEEL_NODE).{run.name}"
    return _engine_pod(run, host, dict(EVENKEEL_INDEX=_JOB_INDEX, EVENKEEL_NODE=_JOB_NODE), restart="Never")


def leader_worker_set(run: RunOnKubernetes) -> LeaderWorkerSet:
    """All engines. It is admitted apart from the JobSet: two runs may each wait for what the other one holds."""
    name = f"{run.name}-engine"
    indices = dict(EVENKEEL_INDEX=_GROUP_INDEX, EVENKEEL_NODE=_GROUP_NODE)
    leader = _engine_pod(run, f"{name}-$(EVENKEEL_INDEX).{name}", indices, restart="Always")
    worker = _engine_pod(run, f"{name}-$(EVENKEEL_INDEX)-$(EVENKEEL_NODE).{name}", indices, restart="Always")
    several = run.engine_nodes > 1
    return LeaderWorkerSet(
        metadata=run.metadata("engine", queued=True),
        spec=LeaderWorkerSetSpec(
            replicas=run.recipe.rollout.engines,
            leader_worker_template=LeaderWorkerTemplate(
                size=run.engine_nodes,
                leader_template=leader if several else None,
                worker_template=worker if several else leader,
            ),
        ),
    )


def _engine_pod(run: RunOnKubernetes, host: str, indices: dict[str, str], *, restart: Restart) -> PodTemplate:
    nodes = f" --nodes {run.engine_nodes} --node $(EVENKEEL_NODE)" if run.engine_nodes > 1 else ""
    return pod_template(
        run,
        Pod(
            role="engine",
            image=run.options.rollout_image,
            arguments=f"$(EVENKEEL_INDEX) {RECIPE} --host $(EVENKEEL_HOST) --port {ENGINE_PORT} --metrics{nodes}",
            indices=indices,
            host=host,
            ports=dict(http=ENGINE_PORT),
            needs=run.needs.engine,
            resources=resources(run, run.needs.engine, run.engine_gpus),
            probes=engine_probes(run),
            restart=restart,
            affinity=_close_together(run),
            # No more than a node of the described size holds, however large the node is.
            spread=(at_most_on_a_node(run, "engine", run.options.gpus_per_node // run.engine_gpus),),
        ),
    )


def _close_together(run: RunOnKubernetes) -> Affinity:
    """Engines fill nodes: half-empty ones would leave no whole node for a learner pod. All near the run's others."""
    same_node = WeightedAffinityTerm(weight=100, pod_affinity_term=near(run, "engine", NODE))
    same_zone = WeightedAffinityTerm(weight=50, pod_affinity_term=near(run, None, run.options.topology_key))
    fills_a_node = run.engine_gpus == run.options.gpus_per_node
    return Affinity(pod_affinity=PodAffinity(preferred=(same_zone,) if fills_a_node else (same_node, same_zone)))


def at_most_on_a_node(run: RunOnKubernetes, role: str, pods: int) -> SpreadConstraint:
    """No more than so many pods of a role on one node."""
    return SpreadConstraint(
        max_skew=pods,
        topology_key=NODE,
        when_unsatisfiable="DoNotSchedule",
        label_selector=LabelSelector(match_labels=run.selector(role)),
    )


def near(run: RunOnKubernetes, role: str | None, topology_key: str) -> AffinityTerm:
    """Close to the pods of a role, or of the run."""
    return AffinityTerm(
        label_selector=LabelSelector(match_labels=run.selector(role)),
        topology_key=topology_key,
    )
