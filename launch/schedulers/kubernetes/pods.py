"""Pods: the fields of core/v1 that are used here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from launch.schedulers.kubernetes.base import Metadata, Part


class FieldRef(Part):
    field_path: str


class SecretKeyRef(Part):
    name: str
    key: str
    optional: bool


class EnvVarSource(Part):
    """One of the two."""

    field_ref: FieldRef | None = None
    secret_key_ref: SecretKeyRef | None = None


class EnvVar(Part):
    name: str
    value: str | None = None
    value_from: EnvVarSource | None = None


class ContainerPort(Part):
    name: str
    container_port: int


class ExecAction(Part):
    command: tuple[str, ...]


class HttpGetAction(Part):
    path: str
    port: str


class TcpSocketAction(Part):
    port: str


class Probe(Part):
    """Exactly one of the three actions."""

    exec: ExecAction | None = None
    http_get: HttpGetAction | None = None
    tcp_socket: TcpSocketAction | None = None
    period_seconds: int
    timeout_seconds: int
    failure_threshold: int


class Resources(Part):
    requests: dict[str, str]
    limits: dict[str, str]


class Capabilities(Part):
    drop: tuple[str, ...] = ("ALL",)


class ContainerSecurity(Part):
    allow_privilege_escalation: bool = False
    read_only_root_filesystem: bool = True
    capabilities: Capabilities = Capabilities()


class VolumeMount(Part):
    name: str
    mount_path: str
    read_only: bool | None = None


class Container(Part):
    name: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: tuple[EnvVar, ...]
    ports: tuple[ContainerPort, ...] | None = None
    resources: Resources
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    security_context: ContainerSecurity = ContainerSecurity()
    volume_mounts: tuple[VolumeMount, ...]


class KeyToPath(Part):
    key: str
    path: str


class ConfigMapVolume(Part):
    name: str


class SecretVolume(Part):
    secret_name: str
    default_mode: int
    items: tuple[KeyToPath, ...]


class ClaimVolume(Part):
    claim_name: str


class EmptyDir(Part):
    medium: Literal["Memory"] | None = None
    size_limit: str


class Volume(Part):
    """A name and one source."""

    name: str
    config_map: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    empty_dir: EmptyDir | None = None


class LabelSelector(Part):
    match_labels: dict[str, str]


class AffinityTerm(Part):
    label_selector: LabelSelector
    topology_key: str


class WeightedAffinityTerm(Part):
    weight: int
    pod_affinity_term: AffinityTerm


class PodAffinity(Part):
    preferred: tuple[WeightedAffinityTerm, ...] = Field(alias="preferredDuringSchedulingIgnoredDuringExecution")


class Affinity(Part):
    pod_affinity: PodAffinity


class SpreadConstraint(Part):
    max_skew: int
    topology_key: str
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    label_selector: LabelSelector


class Seccomp(Part):
    type: Literal["RuntimeDefault"] = "RuntimeDefault"


class PodSecurity(Part):
    run_as_non_root: bool = True
    run_as_user: int
    run_as_group: int
    fs_group: int
    fs_group_change_policy: Literal["OnRootMismatch"] = "OnRootMismatch"
    seccomp_profile: Seccomp = Seccomp()


class Toleration(Part):
    key: str
    operator: Literal["Exists"] = "Exists"
    effect: Literal["NoSchedule"] = "NoSchedule"


class PodSpec(Part):
    restart_policy: Literal["Never", "Always", "OnFailure"]
    termination_grace_period_seconds: int
    automount_service_account_token: bool = False
    enable_service_links: bool = False
    security_context: PodSecurity
    affinity: Affinity | None = None
    topology_spread_constraints: tuple[SpreadConstraint, ...] | None = None
    tolerations: tuple[Toleration, ...] | None = None
    containers: tuple[Container, ...]
    volumes: tuple[Volume, ...]


class PodTemplate(Part):
    metadata: Metadata
    spec: PodSpec
