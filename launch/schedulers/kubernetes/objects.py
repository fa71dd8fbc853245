"""Everything around the pods: configuration, storage, services, policies, monitors."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from launch.schedulers.kubernetes.base import KubernetesObject, Part
from launch.schedulers.kubernetes.pods import LabelSelector


class ConfigMap(KubernetesObject):
    api_version_: ClassVar[str] = "v1"
    kind_: ClassVar[str] = "ConfigMap"
    immutable: bool
    data: dict[str, str]


class ClaimResources(Part):
    requests: dict[str, str]


class ClaimSpec(Part):
    access_modes: tuple[Literal["ReadWriteMany"], ...] = ("ReadWriteMany",)
    storage_class_name: str | None = None
    resources: ClaimResources


class PersistentVolumeClaim(KubernetesObject):
    api_version_: ClassVar[str] = "v1"
    kind_: ClassVar[str] = "PersistentVolumeClaim"
    spec: ClaimSpec


class ServicePort(Part):
    name: str
    port: int
    target_port: str


class ServiceSpec(Part):
    selector: dict[str, str]
    ports: tuple[ServicePort, ...]


class Service(KubernetesObject):
    api_version_: ClassVar[str] = "v1"
    kind_: ClassVar[str] = "Service"
    spec: ServiceSpec


class Peer(Part):
    namespace_selector: LabelSelector | None = None
    pod_selector: LabelSelector | None = None


class PolicyPort(Part):
    port: int
    end_port: int | None = None


class IngressRule(Part):
    sources: tuple[Peer, ...] = Field(alias="from")
    ports: tuple[PolicyPort, ...]


class NetworkPolicySpec(Part):
    pod_selector: LabelSelector
    policy_types: tuple[Literal["Ingress"], ...] = ("Ingress",)
    ingress: tuple[IngressRule, ...]


class NetworkPolicy(KubernetesObject):
    api_version_: ClassVar[str] = "networking.k8s.io/v1"
    kind_: ClassVar[str] = "NetworkPolicy"
    spec: NetworkPolicySpec


class DisruptionBudgetSpec(Part):
    min_available: int
    selector: LabelSelector


class PodDisruptionBudget(KubernetesObject):
    api_version_: ClassVar[str] = "policy/v1"
    kind_: ClassVar[str] = "PodDisruptionBudget"
    spec: DisruptionBudgetSpec


class MonitorEndpoint(Part):
    port: str
    path: str
    interval: str = "15s"


class ServiceMonitorSpec(Part):
    selector: LabelSelector
    endpoints: tuple[MonitorEndpoint, ...]


class ServiceMonitor(KubernetesObject):
    api_version_: ClassVar[str] = "monitoring.coreos.com/v1"
    kind_: ClassVar[str] = "ServiceMonitor"
    spec: ServiceMonitorSpec


class PrometheusRule(KubernetesObject):
    api_version_: ClassVar[str] = "monitoring.coreos.com/v1"
    kind_: ClassVar[str] = "PrometheusRule"
    spec: dict[str, Any]
