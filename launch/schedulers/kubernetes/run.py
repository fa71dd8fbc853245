"""Describe a run on a Kubernetes cluster: the cluster's options, the recipe as pods see it, names, sizes and ports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from launch.build.engines import gives_secret
from launch.plan.hosts import ClusterNeeds, cluster_needs, planner_that_fits
from launch.plan.planner import Planner
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError

Object = dict[str, Any]

ENGINE_PORT, ROUTER_PORT, ROUTER_METRICS_PORT = 30000, 8000, 29000
RENDEZVOUS_PORT, HEARTBEAT_PORT, METRICS_PORT = 29500, 29501, 9400
RECIPE_FILE = "recipe.yaml"
_LONGEST_NAME = 63
_RANDOM = "-abcde"
"""A random suffix, as long as the one that Kubernetes appends to a pod's name."""
_SECRET_NAME = re.compile(r"(?i)(^|_)(api_?key|token|password|secret|credentials?)$")
_LOOKS_LIKE_ONE = re.compile(r"\b(sk-[A-Za-z0-9_-]{12,}|hf_[A-Za-z0-9]{12,}|ghp_[A-Za-z0-9]{12,}|AKIA[0-9A-Z]{12,})")

ROLE_LABEL, RUN_LABEL = "evenkeel/role", "evenkeel/run"
PROGRAM_LABEL = {"app.kubernetes.io/name": "evenkeel"}
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

_DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_NAME = rf"(?=.{{1,253}}$){_DOMAIN}"
_PART = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY = rf"({_DOMAIN}/)?{_PART}"
_NAMESPACE = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
RDMA = re.compile(rf"({_KEY})=([1-9]\d*)")
_RUN_AS = re.compile(r"([1-9]\d{0,8})(?::([1-9]\d{0,8}))?")
_WORDS = {
    _NAME: "lower-case letters, digits, dashes and dots",
    _KEY: "NAME or DOMAIN/NAME, of letters, digits, dashes, dots and underscores",
}


class ClusterOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = Field("default", pattern=_NAMESPACE)
    queue: str | None = None
    """Kueue's LocalQueue, which admits the run as a whole."""
    gpus_per_node: PositiveInt = 8
    gpu_gib: PositiveFloat = 80.0
    gpu_resource: str = "nvidia.com/gpu"
    disk_gb_s: PositiveFloat | None = None
    learner_image: str
    rollout_image: str
    allow_tags: bool = False
    """Accept images by tag, which may resolve differently for two pods of a run."""
    mount: str = Field("/evenkeel", pattern=r"^(/[A-Za-z0-9._-]+)+$")
    """The mount path of the shared volume in every pod. Relative paths of the recipe start here."""
    pvc: str | None = None
    """An existing claim; None: render one."""
    storage_class: str | None = None
    engines: Literal["jobset", "leaderworkerset"] = "jobset"
    rdma: str | None = None
    """RESOURCE=COUNT of a whole node, for example rdma/hca=8."""
    monitors: bool = False
    """Write a ServiceMonitor and a PrometheusRule, kinds that only a cluster with Prometheus' operator knows."""
    run_as: str = "1000"
    """UID or UID:GID of all pods and of the files that they write to the shared volume."""
    download: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+(@[\w./-]+)?$")
    """A model on huggingface.co, ORG/NAME or ORG/NAME@REVISION, that a separate Job downloads to model.path."""
    restart: Literal["job", "jobset"] = "job"
    """The unit that restarts when a Job fails: the Job, by an alpha feature gate of JobSet, or the whole run."""

    @model_validator(mode="after")
    def _are_allowed(self) -> Self:
        """Refuse options that Kubernetes would refuse when the files are applied."""
        for field, pattern, value in (
            *(("queue", _NAME, self.queue), ("pvc", _NAME, self.pvc), ("storage_class", _NAME, self.storage_class)),
            ("gpu_resource", _KEY, self.gpu_resource),
        ):
            if value is not None and not re.fullmatch(pattern, value):
                option = field.replace("_", "-")
                raise ValueError(f"--{option} is {value!r}, expected {_WORDS[pattern]}; give it as the cluster has it")
        if not _RUN_AS.fullmatch(self.run_as):
            raise ValueError(
                f"--run-as is {self.run_as!r}, expected UID or UID:GID, such as 1000 or 5021:500, not root's"
            )
        for option, image in (("--learner-image", self.learner_image), ("--rollout-image", self.rollout_image)):
            if not re.fullmatch(r"[\w./:@-]+", image):
                raise ValueError(f"{option} is {image!r}, expected the name of an image, without spaces")
            if not self.allow_tags and not DIGEST.fullmatch(image):
                raise ValueError(
                    f"{option} is {image!r}, expected NAME@sha256:… so that every start runs the same code; "
                    "give the digest, or --allow-tags"
                )
        if self.pvc and self.storage_class:
            raise ValueError("--pvc names a claim that exists; leave out --storage-class")
        if self.rdma is not None and not RDMA.fullmatch(self.rdma):
            raise ValueError(f"--rdma is {self.rdma!r}, expected RESOURCE=COUNT, for example rdma/hca=8")
        return self


def cluster_options(**given: object) -> ClusterOptions:
    try:
        return ClusterOptions.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(
            f"{'--' + str(one['loc'][0]).replace('_', '-') + ': ' if one['loc'] else ''}"
            f"{one['msg'].removeprefix('Value error, ')}"
            for one in error.errors(include_url=False)
        )
        raise RecipeError(problems) from None


@dataclass(kw_only=True)
class RunOnKubernetes:
    """A recipe checked to fit the cluster, with everything needed to build its objects."""

    recipe: Recipe
    """The recipe, with absolute paths."""
    options: ClusterOptions
    planner: Planner
    name: str
    """The JobSet's name, which starts all other names."""
    learner_nodes: int
    learner_gpus: int
    """Per pod."""
    engine_nodes: int
    """Per engine."""
    engine_gpus: int
    """Per pod."""
    needs: ClusterNeeds

    def __post_init__(self) -> None:
        self.directory = str(self.recipe.directory)
        self.has_router = self.recipe.rollout.starts_router
        self.claim = self.options.pvc or f"{self.name}-run"
        # Another recipe gets another name: a ConfigMap that pods have mounted never changes.
        self.config_map = f"{self.name}-recipe-{sha256(self.recipe.to_yaml().encode()).hexdigest()[:10]}"

    def selector(self, role: str | None = None) -> dict[str, str]:
        """Return the labels that select a role's pods, or all pods of the run."""
        return {RUN_LABEL: self.name} | ({} if role is None else {ROLE_LABEL: role})

    def object(self, api_version: str, kind: str, suffix: str = "", *, queued: bool = False, **fields: Any) -> Object:
        """Build an object NAME or NAME-SUFFIX; with `queued`, Kueue admits it."""
        queue = {"kueue.x-k8s.io/queue-name": self.options.queue} if queued and self.options.queue else {}
        name = f"{self.name}-{suffix}" if suffix else self.name
        metadata = dict(name=name, namespace=self.options.namespace, labels=PROGRAM_LABEL | self.selector() | queue)
        return dict(apiVersion=api_version, kind=kind, metadata=metadata, **fields)


def run_on_kubernetes(
    recipe_path: Path, recipe: Recipe, options: ClusterOptions, sizes: Path | None = None
) -> RunOnKubernetes:
    """Choose names and sizes; `sizes` is a folder whose config.json replaces the model's. Raises RecipeError."""
    if recipe.weights.channel == "ipc":
        raise RecipeError(
            "weights.channel is ipc, which needs learner and engines in one place; on Kubernetes they have pods of "
            "their own: use --set weights.channel=broadcast"
        )
    if recipe.rollout.urls:
        raise RecipeError(
            "rollout.urls names engines that exist, and these files would start others; leave it out, or start "
            "learner and collector by `evenkeel role`"
        )
    if options.download and recipe.model.path.is_absolute() and not recipe.model.path.is_relative_to(options.mount):
        raise RecipeError(
            f"--download brings the model to model.path, {recipe.model.path}, which is not below the shared volume "
            f"({options.mount}); use --set model.path=models/…"
        )
    planner = planner_that_fits(recipe_path, recipe, gpu_gib=options.gpu_gib, disk_gb_s=options.disk_gb_s, sizes=sizes)
    learner_gpus, learner_nodes = _split(recipe.learner.num_processes, options, "the learner's processes")
    engine_gpus, engine_nodes = _split(recipe.rollout.tensor_parallel, options, "rollout.tensor_parallel")
    if gives := _secret_in(recipe.model_dump(mode="json")):
        raise RecipeError(
            f"{gives} of the recipe looks as if it held a secret, which everybody could read in a ConfigMap; take it "
            "out, and give it by a Secret of the cluster"
        )
    name = re.sub(r"[._]+", "-", recipe.run.name.lower())
    if not _DNS_1035.fullmatch(name):
        raise RecipeError(
            f"run.name is {recipe.run.name!r}, which gives the object name {name!r}; Kubernetes wants a letter first, "
            "then letters, digits and dashes: use --set run.name=…"
        )
    # Relative paths of the recipe lie on the shared volume.
    below = _below(PurePosixPath(options.mount), recipe.model_dump(), recipe.model_dump(mode="json"))
    run = RunOnKubernetes(
        recipe=Recipe.model_validate(below),
        options=options,
        planner=planner,
        name=name,
        learner_nodes=learner_nodes,
        learner_gpus=learner_gpus,
        engine_nodes=engine_nodes,
        engine_gpus=engine_gpus,
        needs=cluster_needs(planner, gpus_per_learner_host=learner_gpus, gpus_per_engine_host=engine_gpus),
    )
    # Names of pods, of the recipe, and of the objects that a LeaderWorkerSet creates, as Kubernetes builds them.
    engine = f"{name}-engine-{recipe.rollout.engines - 1}-{engine_nodes - 1}"
    pods = (f"{name}-learner-0-{learner_nodes - 1}", engine, f"{name}-collector-0-0")
    longest = max(*(f"{pod}{_RANDOM}" for pod in pods), run.config_map, f"{name}-engine-0123456789", key=len)
    if len(longest) > _LONGEST_NAME:
        raise RecipeError(
            f"run.name gives the name {longest}, which has {len(longest)} characters, and {_LONGEST_NAME} are allowed; "
            "shorten run.name"
        )
    return run


def _split(gpus: int, options: ClusterOptions, what: str) -> tuple[int, int]:
    """Return (GPUs of a pod, pods)."""
    each = min(gpus, options.gpus_per_node)
    if gpus % each:
        raise RecipeError(
            f"{what} need {gpus} GPUs, which is no multiple of --gpus-per-node {options.gpus_per_node}; "
            "pods of a role are alike: change one of them"
        )
    return each, gpus // each


def _below(mount: PurePosixPath, value: Any, plain: Any) -> Any:
    """Return `plain`, the JSON form of `value`, with each relative path placed below `mount`."""
    if isinstance(value, PurePath):
        return str(mount / value)
    if isinstance(value, dict):
        return {key: _below(mount, value[key], plain[key]) for key in value}
    if isinstance(value, list | tuple):
        return [_below(mount, one, other) for one, other in zip(value, plain, strict=True)]
    return plain


def _secret_in(value: Any, name: str = "") -> str | None:
    """Return the key of a value that seems to hold a secret, by its key, its form or an argument in it."""
    if isinstance(value, dict):
        return next((found for key, one in value.items() if (found := _secret_in(one, str(key)))), None)
    if isinstance(value, list):
        return next((found for one in value if (found := _secret_in(one, name))), None)
    if not isinstance(value, str) or not value:
        return None
    return name if _SECRET_NAME.search(name) or _LOOKS_LIKE_ONE.search(value) or gives_secret(value) else None
