"""One run on one cluster: the recipe as its pods see it, names, sizes and ports. The other modules read it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from launch.build.engine_arguments import gives_secret
from launch.plan.hosts import ClusterNeeds, cluster_needs, planner_that_fits
from launch.plan.planner import Planner
from launch.schedulers.kubernetes.base import Metadata
from launch.schedulers.kubernetes.options import ClusterOptions
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError

ENGINE_PORT, ROUTER_PORT, ROUTER_METRICS_PORT = 30000, 8000, 29000
RENDEZVOUS_PORT, HEARTBEAT_PORT, METRICS_PORT = 29500, 29501, 9400
RECIPE_FOLDER, RECIPE_FILE = "/etc/evenkeel/recipe", "recipe.yaml"
SECRET_FOLDER, SECRET_FILE = "/etc/evenkeel/secret", "api-key"
_LONGEST_NAME = 63
_RANDOM = "-abcde"
"""What a pod's name ends with."""
_SECRET_NAME = re.compile(r"(?i)(^|_)(api_?key|token|password|secret|credentials?)$")
_LOOKS_LIKE_ONE = re.compile(r"\b(sk-[A-Za-z0-9_-]{12,}|hf_[A-Za-z0-9]{12,}|ghp_[A-Za-z0-9]{12,}|AKIA[0-9A-Z]{12,})")

ROLE_LABEL, RUN_LABEL = "evenkeel/role", "evenkeel/run"
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class RunOnKubernetes:
    """A recipe that was checked to fit, with everything that its objects are made from."""

    recipe: Recipe
    """With absolute paths."""
    options: ClusterOptions
    planner: Planner
    name: str
    """Of the JobSet; other names begin with it."""
    learner_nodes: int
    learner_gpus: int
    """Of each learner pod."""
    engine_nodes: int
    """Of each engine."""
    engine_gpus: int
    """Of each engine pod."""
    needs: ClusterNeeds

    @property
    def directory(self) -> str:
        """The run directory, the same in every pod."""
        return str(self.recipe.directory)

    @property
    def has_router(self) -> bool:
        return self.recipe.rollout.starts_router

    @property
    def claim(self) -> str:
        return self.options.pvc or f"{self.name}-run"

    @property
    def config_map(self) -> str:
        """Another recipe has another name: a ConfigMap that pods have mounted never changes."""
        digest = sha256(self.recipe.to_yaml().encode()).hexdigest()
        return f"{self.name}-recipe-{digest[:10]}"

    @property
    def longest_names(self) -> tuple[str, ...]:
        """Of pods, of the recipe, and of what a LeaderWorkerSet makes, as Kubernetes builds them."""
        engine = f"{self.name}-engine-{self.recipe.rollout.engines - 1}-{self.engine_nodes - 1}"
        return (
            *(f"{self.name}-learner-0-{self.learner_nodes - 1}{_RANDOM}", f"{engine}{_RANDOM}"),
            *(f"{self.name}-collector-0-0{_RANDOM}", self.config_map, f"{self.name}-engine-0123456789"),
        )

    def labels(self, role: str | None = None) -> dict[str, str]:
        """Of every object, or of the pods of a role."""
        own = {"app.kubernetes.io/name": "evenkeel", RUN_LABEL: self.name}
        return own if role is None else own | {ROLE_LABEL: role}

    def selector(self, role: str | None = None) -> dict[str, str]:
        """Picks the pods of a role, or all of the run."""
        return {RUN_LABEL: self.name} | ({} if role is None else {ROLE_LABEL: role})

    def metadata(self, suffix: str = "", *, queued: bool = False) -> Metadata:
        """Of an object NAME or NAME-SUFFIX; `queued`: admitted by Kueue."""
        queue = {"kueue.x-k8s.io/queue-name": self.options.queue} if queued and self.options.queue else {}
        name = f"{self.name}-{suffix}" if suffix else self.name
        return Metadata(name=name, namespace=self.options.namespace, labels=self.labels() | queue)


def run_on_kubernetes(
    recipe_path: Path, recipe: Recipe, options: ClusterOptions, sizes: Path | None = None
) -> RunOnKubernetes:
    """Work out names and sizes; `sizes`: a folder whose config.json is read instead of the model's.

    Raises RecipeError when the recipe does not fit the cluster that was described.
    """
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
    run = RunOnKubernetes(
        recipe=_with_absolute_paths(recipe, PurePosixPath(options.mount)),
        options=options,
        planner=planner,
        name=_name(recipe.run.name),
        learner_nodes=learner_nodes,
        learner_gpus=learner_gpus,
        engine_nodes=engine_nodes,
        engine_gpus=engine_gpus,
        needs=cluster_needs(planner, gpus_per_learner_host=learner_gpus, gpus_per_engine_host=engine_gpus),
    )
    longest = max(run.longest_names, key=len)
    if len(longest) > _LONGEST_NAME:
        raise RecipeError(
            f"run.name gives the name {longest}, which has {len(longest)} characters, and {_LONGEST_NAME} are allowed; "
            "shorten run.name"
        )
    return run


def _split(gpus: int, options: ClusterOptions, what: str) -> tuple[int, int]:
    """(GPUs of a pod, pods)."""
    each = min(gpus, options.gpus_per_node)
    if gpus % each:
        raise RecipeError(
            f"{what} need {gpus} GPUs, which is no multiple of --gpus-per-node {options.gpus_per_node}; "
            "pods of a role are alike: change one of them"
        )
    return each, gpus // each


def _with_absolute_paths(recipe: Recipe, mount: PurePosixPath) -> Recipe:
    """Paths that are relative in the recipe lie on the shared volume."""
    return Recipe.model_validate(_below(mount, recipe.model_dump(), recipe.model_dump(mode="json")))


def _below(mount: PurePosixPath, value: Any, plain: Any) -> Any:
    """`plain`, the JSON form of `value`, with each path that is relative below `mount`."""
    if isinstance(value, PurePath):
        return str(mount / value)
    if isinstance(value, dict):
        return {key: _below(mount, value[key], plain[key]) for key in value}
    if isinstance(value, list | tuple):
        return [_below(mount, one, other) for one, other in zip(value, plain, strict=True)]
    return plain


def _secret_in(value: Any, name: str = "") -> str | None:
    """The key of a value that has a name that secrets have, looks like one, or is an argument that gives one. Prose may
    speak of them."""
    if isinstance(value, dict):
        return next((found for key, one in value.items() if (found := _secret_in(one, str(key)))), None)
    if isinstance(value, list):
        return next((found for one in value if (found := _secret_in(one, name))), None)
    if not isinstance(value, str) or not value:
        return None
    return name if _SECRET_NAME.search(name) or _LOOKS_LIKE_ONE.search(value) or gives_secret(value) else None


def _name(run: str) -> str:
    """The run's name as Kubernetes allows it. Raises RecipeError."""
    name = re.sub(r"[._]+", "-", run.lower())
    if not _DNS_1035.fullmatch(name):
        raise RecipeError(
            f"run.name is {run!r}, which gives the object name {name!r}; Kubernetes wants a letter first, then "
            "letters, digits and dashes: use --set run.name=…"
        )
    return name
