"""Sets of pods: JobSet (jobset.x-k8s.io/v1alpha2) and LeaderWorkerSet (leaderworkerset.x-k8s.io/v1)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from launch.schedulers.kubernetes.base import KubernetesObject, Metadata, Part
from launch.schedulers.kubernetes.pods import PodTemplate


class OnExitCodes(Part):
    container_name: str
    operator: Literal["In"] = "In"
    values: tuple[int, ...]


class OnPodCondition(Part):
    type: str
    status: Literal["True"] = "True"


class PodFailureRule(Part):
    action: Literal["FailJob", "Ignore"]
    on_exit_codes: OnExitCodes | None = None
    on_pod_conditions: tuple[OnPodCondition, ...] | None = None


class PodFailurePolicy(Part):
    rules: tuple[PodFailureRule, ...]


class JobSpec(Part):
    completion_mode: Literal["Indexed"] = "Indexed"
    completions: int
    parallelism: int
    backoff_limit: int
    pod_replacement_policy: Literal["Failed"] = "Failed"
    pod_failure_policy: PodFailurePolicy
    template: PodTemplate


class PlainJobSpec(Part):
    backoff_limit: int
    template: PodTemplate


class Job(KubernetesObject):
    api_version_: ClassVar[str] = "batch/v1"
    kind_: ClassVar[str] = "Job"
    spec: PlainJobSpec


class JobTemplate(Part):
    metadata: Metadata | None = None
    spec: JobSpec


class ReplicatedJob(Part):
    name: str
    replicas: int
    template: JobTemplate


class Network(Part):
    enable_dns_hostnames: bool = Field(True, alias="enableDNSHostnames")
    publish_not_ready_addresses: bool = True
    subdomain: str


FailureAction = Literal[
    "FailJobSet",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
]


class FailureRule(Part):
    name: str
    action: FailureAction
    on_job_failure_reasons: tuple[str, ...] | None = None
    on_job_failure_message_patterns: tuple[str, ...] | None = None


class FailurePolicy(Part):
    max_restarts: int
    rules: tuple[FailureRule, ...]


class SuccessPolicy(Part):
    operator: Literal["All"] = "All"
    target_replicated_jobs: tuple[str, ...]


class StartupPolicy(Part):
    startup_policy_order: Literal["AnyOrder"] = "AnyOrder"


class JobSetSpec(Part):
    network: Network
    startup_policy: StartupPolicy = StartupPolicy()
    success_policy: SuccessPolicy
    failure_policy: FailurePolicy
    replicated_jobs: tuple[ReplicatedJob, ...]


class JobSet(KubernetesObject):
    api_version_: ClassVar[str] = "jobset.x-k8s.io/v1alpha2"
    kind_: ClassVar[str] = "JobSet"
    spec: JobSetSpec


class LeaderWorkerTemplate(Part):
    size: int
    restart_policy: Literal["RecreateGroupOnPodRestart"] = "RecreateGroupOnPodRestart"
    leader_template: PodTemplate | None = None
    worker_template: PodTemplate


class LeaderWorkerNetwork(Part):
    subdomain_policy: Literal["Shared"] = "Shared"


class RollingUpdate(Part):
    max_unavailable: int = 1
    max_surge: int = 0


class RolloutStrategy(Part):
    type: Literal["RollingUpdate"] = "RollingUpdate"
    rolling_update_configuration: RollingUpdate = RollingUpdate()


class LeaderWorkerSetSpec(Part):
    replicas: int
    startup_policy: Literal["LeaderCreated"] = "LeaderCreated"
    network_config: LeaderWorkerNetwork = LeaderWorkerNetwork()
    rollout_strategy: RolloutStrategy = RolloutStrategy()
    leader_worker_template: LeaderWorkerTemplate


class LeaderWorkerSet(KubernetesObject):
    api_version_: ClassVar[str] = "leaderworkerset.x-k8s.io/v1"
    kind_: ClassVar[str] = "LeaderWorkerSet"
    spec: LeaderWorkerSetSpec
