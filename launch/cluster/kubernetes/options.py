"""What the cluster is like: everything that a recipe does not say."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from pipeline.errors import RecipeError

DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
_RDMA = re.compile(r"([a-z0-9.-]+/[A-Za-z0-9._-]+)=([1-9]\d*)")


class ClusterOptions(BaseModel):
    """Options of `evenkeel launch kubernetes`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = Field("default", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
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
    monitoring_namespace: str = "monitoring"
    monitors: bool = True
    """Write a ServiceMonitor; a cluster without Prometheus' operator does not know that kind."""

    @model_validator(mode="after")
    def _images_are_pinned(self) -> Self:
        for option, image in (("--learner-image", self.learner_image), ("--rollout-image", self.rollout_image)):
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
        return found[1], str(max(1, int(found[2]) * gpus // self.gpus_per_node))


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
