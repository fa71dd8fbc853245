"""What the cluster is like: everything that a recipe does not say."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from pipeline.errors import RecipeError

_DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_NAME = rf"(?=.{{1,253}}$){_DOMAIN}"
"""Of an object."""
_PART = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY = rf"({_DOMAIN}/)?{_PART}"
"""Of a label, or of a resource of nodes."""
_NAMESPACE = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
_RDMA = re.compile(rf"({_KEY})=([1-9]\d*)")
_LABEL = re.compile(rf"{_KEY}=({_PART})?")
_RUN_AS = re.compile(r"([1-9]\d{0,8})(?::([1-9]\d{0,8}))?")
_WORDS = {
    _NAME: "lower-case letters, digits, dashes and dots",
    _KEY: "NAME or DOMAIN/NAME, of letters, digits, dashes, dots and underscores",
    _PART: "letters, digits, dashes, dots and underscores",
}


class ClusterOptions(BaseModel):
    """Options of `evenkeel launch kubernetes`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = Field("default", pattern=_NAMESPACE)
    queue: str | None = None
    """Kueue's LocalQueue: the whole run is admitted at once or not at all."""
    gpus_per_node: PositiveInt = 8
    gpu_gib: PositiveFloat = 80.0
    gpu_resource: str = "nvidia.com/gpu"
    disk_gb_s: PositiveFloat | None = None
    learner_image: str
    rollout_image: str
    allow_tags: bool = False
    """Images by tag: two pods of a run may then get different ones."""
    mount: str = Field("/evenkeel", pattern=r"^(/[A-Za-z0-9._-]+)+$")
    """Where every pod has the shared volume. Relative paths of the recipe lie below it."""
    pvc: str | None = None
    """A claim that exists; otherwise one is rendered."""
    storage_class: str | None = None
    pvc_size: str | None = Field(None, pattern=r"^[1-9]\d*[KMGTP]i?$")
    """Default: from the plan."""
    secret: str = "evenkeel-api-key"
    secret_key: str = "api-key"
    engines: Literal["jobset", "leaderworkerset"] = "jobset"
    rdma: str | None = None
    """RESOURCE=COUNT of a whole node, for example rdma/hca=8."""
    topology_key: str = "topology.kubernetes.io/zone"
    """Pods of a run are placed close to one another by this label of nodes."""
    monitoring_namespace: str = Field("monitoring", pattern=_NAMESPACE)
    monitors: bool = False
    """Write a ServiceMonitor and a PrometheusRule; a cluster without Prometheus' operator does not know those kinds."""
    monitor_labels: tuple[str, ...] = ()
    """KEY=VALUE of both, by which Prometheus' operator finds them."""
    run_as: str = "1000"
    """UID or UID:GID of all pods, and of what they write to the shared volume."""
    download: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+(@[\w./-]+)?$")
    """A model of huggingface.co, ORG/NAME or ORG/NAME@REVISION, that a Job of its own brings to model.path."""
    restart: Literal["job", "jobset"] = "job"
    """What starts again when a Job fails: that Job, for which JobSet has an alpha gate, or all of the run."""

    @model_validator(mode="after")
    def _names_are_allowed(self) -> Self:
        """By Kubernetes, which would refuse them once the files are applied, or never find what they name."""
        for field, pattern, value in (
            *(("queue", _NAME, self.queue), ("pvc", _NAME, self.pvc), ("storage_class", _NAME, self.storage_class)),
            *(("secret", _NAME, self.secret), ("secret_key", _PART, self.secret_key)),
            *(("gpu_resource", _KEY, self.gpu_resource), ("topology_key", _KEY, self.topology_key)),
        ):
            if value is not None and not re.fullmatch(pattern, value):
                option = field.replace("_", "-")
                raise ValueError(f"--{option} is {value!r}, expected {_WORDS[pattern]}; give it as the cluster has it")
        for label in self.monitor_labels:
            if not _LABEL.fullmatch(label):
                raise ValueError(
                    f"--monitor-label is {label!r}, expected KEY=VALUE, such as release=kube-prometheus-stack"
                )
        if self.monitor_labels and not self.monitors:
            raise ValueError("--monitor-label is of what --monitors writes; give that too")
        if not _RUN_AS.fullmatch(self.run_as):
            raise ValueError(
                f"--run-as is {self.run_as!r}, expected UID or UID:GID, such as 1000 or 5021:500, not root's"
            )
        return self

    @model_validator(mode="after")
    def _images_are_pinned(self) -> Self:
        for option, image in (("--learner-image", self.learner_image), ("--rollout-image", self.rollout_image)):
            if not re.fullmatch(r"[\w./:@-]+", image):
                raise ValueError(f"{option} is {image!r}, expected the name of an image, without spaces")
            if not self.allow_tags and not DIGEST.fullmatch(image):
                raise ValueError(
                    f"{option} is {image!r}, expected NAME@sha256:… so that every start runs the same code; "
                    "give the digest, or --allow-tags"
                )
        return self

    @model_validator(mode="after")
    def _one_claim(self) -> Self:
        if self.pvc and (self.storage_class or self.pvc_size):
            raise ValueError("--pvc names a claim that exists; leave out --storage-class and --pvc-size")
        return self

    @model_validator(mode="after")
    def _rdma_is_readable(self) -> Self:
        if self.rdma is not None and not _RDMA.fullmatch(self.rdma):
            raise ValueError(f"--rdma is {self.rdma!r}, expected RESOURCE=COUNT, for example rdma/hca=8")
        return self

    def rdma_of(self, gpus: int) -> tuple[str, str] | None:
        """The RDMA resource of a pod with so many GPUs: its share of a node, at least one."""
        if self.rdma is None or (found := _RDMA.fullmatch(self.rdma)) is None:
            return None
        return found[1], str(max(1, int(found[found.re.groups]) * gpus // self.gpus_per_node))

    @property
    def user_and_group(self) -> tuple[int, int]:
        user, _, group = self.run_as.partition(":")
        return int(user), int(group or user)


def cluster_options(**given: object) -> ClusterOptions:
    """Raises RecipeError instead of pydantic's error."""
    try:
        return ClusterOptions.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(
            f"{'--' + str(one['loc'][0]).replace('_', '-') + ': ' if one['loc'] else ''}"
            f"{one['msg'].removeprefix('Value error, ')}"
            for one in error.errors(include_url=False)
        )
        raise RecipeError(problems) from None
