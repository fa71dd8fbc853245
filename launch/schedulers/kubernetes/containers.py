"""The pod of a role: command, environment, volumes, resources and rights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launch.plan.hosts import HostNeeds
from launch.run.restarts import MAX_RESTARTS_VARIABLE
from launch.schedulers.kubernetes.base import Metadata
from launch.schedulers.kubernetes.job import (
    RECIPE_FILE,
    RECIPE_FOLDER,
    SECRET_FILE,
    SECRET_FOLDER,
    RunOnKubernetes,
)
from launch.schedulers.kubernetes.pods import (
    Affinity,
    ClaimVolume,
    ConfigMapVolume,
    Container,
    ContainerPort,
    EmptyDir,
    EnvVar,
    EnvVarSource,
    FieldRef,
    KeyToPath,
    PodSecurity,
    PodSpec,
    PodTemplate,
    Resources,
    SecretKeyRef,
    SecretVolume,
    SpreadConstraint,
    Toleration,
    Volume,
    VolumeMount,
)
from launch.schedulers.kubernetes.probes import NO_PROBES, Probes
from launch.schedulers.kubernetes.sets import Job, PlainJobSpec
from pipeline.errors import SUPERSEDED_EXIT_CODE

Restart = Literal["Never", "Always"]

COMMAND = ("tini", "-e", str(SUPERSEDED_EXIT_CODE), "--")
"""tini is PID 1: it reaps what roles leave behind and hands SIGTERM on. A role that was superseded is over, and the run
goes on elsewhere: to Kubernetes that is success, so that nothing is started again."""
RECIPE = f"--recipe {RECIPE_FOLDER}/{RECIPE_FILE}"
"""Of every role: the learner begins the run with it, or goes on with it, and the others wait until it has."""
KILL_MARGIN_S = 30
"""Between the end of a role's own grace and the kubelet's SIGKILL."""
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Pod:
    """What differs between roles."""

    role: str
    image: str
    arguments: str
    """After `evenkeel role ROLE RUN`, by spaces: none of them holds one."""
    indices: dict[str, str]
    """Environment variable → field of the pod that holds it."""
    host: str
    """Name by which other pods reach this one."""
    ports: dict[str, int]
    needs: HostNeeds
    resources: Resources
    probes: Probes = NO_PROBES
    restart: Restart = "Never"
    affinity: Affinity | None = None
    spread: tuple[SpreadConstraint, ...] | None = None


def _quantity(num_bytes: int) -> str:
    """In whole MiB, as Kubernetes writes them; no fewer bytes than these."""
    return f"{-(-num_bytes // _MIB)}Mi"


def resources(run: RunOnKubernetes, needs: HostNeeds, gpus: int = 0) -> Resources:
    """CPUs, and room on the node's disk, are asked for and not limited; memory and devices are both."""
    fixed = dict(memory=_quantity(needs.memory_bytes))
    if gpus:
        fixed[run.options.gpu_resource] = str(gpus)
        if rdma := run.options.rdma_of(gpus):
            fixed[rdma[0]] = rdma[1]
    asked = dict(cpu=str(needs.cpus))
    if needs.replica_bytes:
        asked["ephemeral-storage"] = _quantity(needs.replica_bytes)
    return Resources(requests=asked | fixed, limits=fixed)


def pod_template(run: RunOnKubernetes, pod: Pod) -> PodTemplate:
    """A pod of one container."""
    on_gpu = run.options.gpu_resource in pod.resources.limits
    return PodTemplate(
        metadata=Metadata(labels=run.labels(pod.role)),
        spec=PodSpec(
            restart_policy=pod.restart,
            termination_grace_period_seconds=pod.needs.stop_s + KILL_MARGIN_S,
            security_context=pod_security(run),
            affinity=pod.affinity,
            topology_spread_constraints=pod.spread,
            tolerations=(Toleration(key=run.options.gpu_resource),) if on_gpu else None,
            containers=(_container(run, pod),),
            volumes=tuple(volume for volume, _ in _volumes(run, pod)),
        ),
    )


def _container(run: RunOnKubernetes, pod: Pod) -> Container:
    return Container(
        name=pod.role,
        image=pod.image,
        command=COMMAND,
        args=("evenkeel", "role", pod.role, run.directory, *pod.arguments.split(" ")),
        env=_environment(run, pod),
        ports=tuple(ContainerPort(name=name, container_port=port) for name, port in pod.ports.items()),
        resources=pod.resources,
        startup_probe=pod.probes.startup,
        readiness_probe=pod.probes.readiness,
        liveness_probe=pod.probes.liveness,
        volume_mounts=tuple(mount for _, mount in _volumes(run, pod)),
    )


def pod_security(run: RunOnKubernetes) -> PodSecurity:
    """Of every pod."""
    user, group = run.options.user_and_group
    return PodSecurity(run_as_user=user, run_as_group=group, fs_group=group)


def _environment(run: RunOnKubernetes, pod: Pod) -> tuple[EnvVar, ...]:
    """Names first: $(NAME) in later values and in arguments is replaced by the kubelet."""
    return (
        *(
            EnvVar(name=name, value_from=EnvVarSource(field_ref=FieldRef(field_path=path)))
            for name, path in pod.indices.items()
        ),
        EnvVar(name="EVENKEEL_HOST", value=pod.host),
        EnvVar(name="EVENKEEL_API_KEY_FILE", value=f"{SECRET_FOLDER}/{SECRET_FILE}"),
        EnvVar(name="EVENKEEL_GRACE_S", value=str(pod.needs.stop_s)),
        EnvVar(name=MAX_RESTARTS_VARIABLE, value=str(run.recipe.run.max_restarts)),
        EnvVar(name="HOME", value="/tmp"),
        EnvVar(name="USER", value="evenkeel"),  # no image need know the user's number
    )


def _volumes(run: RunOnKubernetes, pod: Pod) -> list[tuple[Volume, VolumeMount]]:
    """Each volume with the place where the pod has it. The root file system is read-only."""
    options = run.options
    key = KeyToPath(key=options.secret_key, path=SECRET_FILE)
    # 256 is 0400; the kubelet adds reading by the group, since the file belongs to root.
    secret = SecretVolume(secret_name=options.secret, default_mode=256, items=(key,))
    volumes = [
        (Volume(name="run", persistent_volume_claim=ClaimVolume(claim_name=run.claim)), options.mount),
        (Volume(name="api-key", secret=secret), SECRET_FOLDER),
        (Volume(name="tmp", empty_dir=EmptyDir(size_limit=_quantity(pod.needs.tmp_bytes))), "/tmp"),
        (Volume(name="recipe", config_map=ConfigMapVolume(name=run.config_map)), RECIPE_FOLDER),
    ]
    if pod.needs.shm_bytes:
        shm = EmptyDir(medium="Memory", size_limit=_quantity(pod.needs.shm_bytes))
        volumes.append((Volume(name="shm", empty_dir=shm), "/dev/shm"))
    read_only = ("api-key", "recipe")
    return [
        (volume, VolumeMount(name=volume.name, mount_path=path, read_only=True if volume.name in read_only else None))
        for volume, path in volumes
    ]


def download_job(run: RunOnKubernetes) -> Job:
    """Brings a model from huggingface.co to model.path. Started again, it goes on with what is there."""
    name, _, revision = str(run.options.download).partition("@")
    arguments = ("download", name, *(("--revision", revision) if revision else ()))
    token = SecretKeyRef(name="huggingface", key="token", optional=True)
    container = Container(
        name="model",
        image=run.options.rollout_image,
        command=("hf",),
        args=(*arguments, "--local-dir", str(run.recipe.model.path)),
        env=(
            EnvVar(name="HF_TOKEN", value_from=EnvVarSource(secret_key_ref=token)),
            EnvVar(name="HF_HUB_OFFLINE", value="0"),
            EnvVar(name="HOME", value="/tmp"),
        ),
        resources=Resources(requests=dict(cpu="2", memory="4096Mi"), limits=dict(memory="4096Mi")),
        volume_mounts=(
            VolumeMount(name="run", mount_path=run.options.mount),
            VolumeMount(name="tmp", mount_path="/tmp"),
        ),
    )
    claim = Volume(name="run", persistent_volume_claim=ClaimVolume(claim_name=run.claim))
    template = PodTemplate(
        metadata=Metadata(labels={"app.kubernetes.io/name": "evenkeel"}),
        spec=PodSpec(
            restart_policy="OnFailure",
            termination_grace_period_seconds=KILL_MARGIN_S,
            security_context=pod_security(run),
            containers=(container,),
            volumes=(claim, Volume(name="tmp", empty_dir=EmptyDir(size_limit="2048Mi"))),
        ),
    )
    return Job(metadata=run.metadata("model"), spec=PlainJobSpec(backoff_limit=6, template=template))
