"""Build the pods of a run: a JobSet whose roles are admitted together and restart independently.

How the end of a pod is handled:

    exit 0    success. The JobSet succeeds when learner and collector do, which also ends router and engines
    exit 65   superseded by a later start: tini turns the status into 0
    exit 64   fatal: FailJob, and the JobSet fails
    exit 143  asked to stop, like an evicted pod: restarted, not counted
    other     counted. The learner restarts as a whole from its checkpoint; other roles restart alone, with backoff

The learner, and each engine of several pods, is a Job that fails as a whole. JobSet then recreates this Job alone, or
with `--restart jobset` the whole run, which every JobSet supports. The roles limit their restarts themselves
(launch.run.restarts): progress forgives earlier restarts, and a role that restarts too often without progress exits
with 64. Kubernetes' limits count over the whole life of a run, so they only catch pods that end before our program
runs.

Kubernetes does not notice the end of a pod whose node is lost: it replaces the pod only after the Node is deleted or
gets the taint node.kubernetes.io/out-of-service. A learner of several pods notices sooner, and the other pods exit 1.

An engine is up once /health answers: after version 0 was written and the weights were read. It is ready when it also
serves the published version. The kubelet has no API key to ask for that, so probe.py asks inside the container. An
engine is alive while /health answers. This route samples nothing, so it answers during a weight update and the longest
prefill, and a minute of refusals means that the server is gone. Learner and collector have no liveness probe: all their
waits have deadlines, and a restart costs the work since the last checkpoint.

Objects are plain dicts with Kubernetes' field names; None stands for an omitted field. The tests validate them against
the schemas of the API server.
"""

from __future__ import annotations

import math
from typing import Any

from launch.plan.hosts import HostNeeds
from launch.run.addresses import NAME_DEADLINE_S
from launch.run.restarts import MAX_RESTARTS_VARIABLE
from launch.run.waiting import RECIPE_DEADLINE_S
from launch.schedulers.kubernetes.run import (
    ENGINE_PORT,
    HEARTBEAT_PORT,
    METRICS_PORT,
    PROGRAM_LABEL,
    RDMA,
    RECIPE_FILE,
    RENDEZVOUS_PORT,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    Object,
    RunOnKubernetes,
)
from pipeline.child_process import KERNEL_CACHE_VARIABLE
from pipeline.errors import FATAL_EXIT_CODE, STOPPED_EXIT_CODE, SUPERSEDED_EXIT_CODE

COMMAND = ["tini", "-e", str(SUPERSEDED_EXIT_CODE), "--"]
"""tini, as PID 1, reaps orphans and forwards SIGTERM. It turns the status of a superseded role into 0: no restart."""
RECIPE_FOLDER = "/etc/evenkeel/recipe"
SECRET, SECRET_FILE, SECRET_FOLDER = "evenkeel-api-key", "api-key", "/etc/evenkeel/secret"
RECIPE = f"--recipe {RECIPE_FOLDER}/{RECIPE_FILE}"
"""The recipe option of every role: the learner starts or resumes the run with it, and the other roles wait for that."""
KILL_MARGIN_S = 30
"""Seconds between the end of a role's grace period and the kubelet's SIGKILL."""
MOST_RESTARTS = 1000
"""The limit on restarts in the whole life of a run: of all Jobs together, and of each pod replaced within its Job."""
NODE, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
_JOB_NODE = "metadata.labels['batch.kubernetes.io/job-completion-index']"
_JOB_INDICES = {"EVENKEEL_INDEX": "metadata.labels['jobset.sigs.k8s.io/job-index']", "EVENKEEL_NODE": _JOB_NODE}
_GROUP_INDICES = {
    "EVENKEEL_INDEX": "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']",
    "EVENKEEL_NODE": "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']",
}
_PERIOD_S = 10
_GONE_S = 60
"""Seconds of silence after which an engine is restarted."""
_EXEC_S = 20
"""Timeout and period of probes that run a program: a busy host takes seconds to start Python."""
_CONTAINER_SECURITY = dict(allowPrivilegeEscalation=False, readOnlyRootFilesystem=True, capabilities=dict(drop=["ALL"]))
_MIB = 2**20


def job_set(run: RunOnKubernetes) -> Object:
    """Build the JobSet of all pods except a LeaderWorkerSet's. Optional roles come last: overlays index the roles."""
    options, needs = run.options, run.needs
    meet = dict(rendezvous=RENDEZVOUS_PORT, heartbeat=HEARTBEAT_PORT) if run.learner_nodes > 1 else {}
    learner = _pod(
        run,
        "learner",
        image=options.learner_image,
        arguments=f"$(EVENKEEL_NODE) {RECIPE} --nodes {run.learner_nodes} --host $(EVENKEEL_HOST) "
        f"--port {RENDEZVOUS_PORT} --metrics-port {METRICS_PORT}",
        indices={"EVENKEEL_NODE": _JOB_NODE},
        host=f"{run.name}-learner-0-$(EVENKEEL_NODE).{run.name}",
        ports=meet | dict(metrics=METRICS_PORT),
        needs=needs.learner,
        gpus=run.learner_gpus,
        most_on_a_node=1,  # on one large node, two pods would be lost together
    )
    collector = _pod(
        run,
        "collector",
        image=options.rollout_image,
        arguments=f"{RECIPE} --host $(EVENKEEL_HOST) --metrics-port {METRICS_PORT}",
        host=f"{run.name}-collector-0-0.{run.name}",
        ports=dict(metrics=METRICS_PORT),
        needs=needs.collector,
        probes=dict(readinessProbe=_probe(3, tcpSocket=dict(port="metrics"))),  # ready once the collector has started
    )
    jobs = [_job("learner", learner, nodes=run.learner_nodes), _job("collector", collector)]
    if options.engines == "jobset":
        host = f"{run.name}-engine-$(EVENKEEL_INDEX)-$(EVENKEEL_NODE).{run.name}"
        engine = _engine(run, host, _JOB_INDICES, restart="Never")
        jobs.append(_job("engine", engine, nodes=run.engine_nodes, replicas=run.recipe.rollout.engines))
    if run.has_router:
        alive = dict(path="/liveness", port="http")
        router = _pod(
            run,
            "router",
            image=options.rollout_image,
            arguments=f"{RECIPE} --host $(EVENKEEL_HOST) --port {ROUTER_PORT} --metrics-port {ROUTER_METRICS_PORT}",
            host=f"{run.name}-router-0-0.{run.name}",
            ports=dict(http=ROUTER_PORT, metrics=ROUTER_METRICS_PORT),
            needs=needs.router,
            probes=dict(  # ready with an engine behind the router, alive without
                startupProbe=_probe(60, period_s=5, httpGet=alive),
                readinessProbe=_probe(3, httpGet=dict(path="/readiness", port="http")),
                livenessProbe=_probe(6, httpGet=alive),
            ),
        )
        jobs.append(_job("router", router))
    again = "RestartJob" if options.restart == "job" else "RestartJobSet"
    # Job failures by podFailurePolicy share one reason; the message tells them apart.
    reasons, fatal = ["PodFailurePolicy"], f".*failed with exit code {FATAL_EXIT_CODE} matching.*"
    rules = [
        dict(name="fatal", action="FailJobSet", onJobFailureReasons=reasons, onJobFailureMessagePatterns=[fatal]),
        dict(name="asked", action=f"{again}AndIgnoreMaxRestarts", onJobFailureReasons=reasons),
        dict(name="failed", action=again),
    ]
    spec = dict(
        network=dict(enableDNSHostnames=True, publishNotReadyAddresses=True, subdomain=run.name),
        startupPolicy=dict(startupPolicyOrder="AnyOrder"),
        successPolicy=dict(operator="All", targetReplicatedJobs=["learner", "collector"]),
        failurePolicy=dict(maxRestarts=MOST_RESTARTS, rules=rules),
        replicatedJobs=jobs,
    )
    return run.object("jobset.x-k8s.io/v1alpha2", "JobSet", queued=True, spec=spec)


def _job(role: str, template: Object, *, nodes: int = 1, replicas: int = 1) -> Object:
    """Build a role's Job. Pods on several nodes end and start together; a single pod is replaced within its Job."""
    together = nodes > 1 or role == "learner"
    again = "FailJob" if together else "Ignore"

    exits = dict(containerName=role, operator="In")
    rules = [
        dict(action="FailJob", onExitCodes=exits | dict(values=[FATAL_EXIT_CODE])),
        dict(action=again, onPodConditions=[dict(type="DisruptionTarget", status="True")]),
        dict(action=again, onExitCodes=exits | dict(values=[STOPPED_EXIT_CODE])),
    ]
    spec = dict(
        completionMode="Indexed",
        completions=nodes,
        parallelism=nodes,
        backoffLimit=0 if together else MOST_RESTARTS,
        podReplacementPolicy="Failed",
        podFailurePolicy=dict(rules=rules),
        template=template,
    )
    return dict(name=role, replicas=replicas, template=dict(spec=spec))


def leader_worker_set(run: RunOnKubernetes) -> Object:
    """Build the LeaderWorkerSet of all engines. Kueue admits it apart from the JobSet, so two runs can deadlock."""
    name = f"{run.name}-engine"
    leader = _engine(run, f"{name}-$(EVENKEEL_INDEX).{name}", _GROUP_INDICES, restart="Always")
    worker = _engine(run, f"{name}-$(EVENKEEL_INDEX)-$(EVENKEEL_NODE).{name}", _GROUP_INDICES, restart="Always")
    several = run.engine_nodes > 1
    spec = dict(
        replicas=run.recipe.rollout.engines,
        startupPolicy="LeaderCreated",
        networkConfig=dict(subdomainPolicy="Shared"),
        rolloutStrategy=dict(type="RollingUpdate", rollingUpdateConfiguration=dict(maxUnavailable=1, maxSurge=0)),
        leaderWorkerTemplate=dict(
            size=run.engine_nodes,
            restartPolicy="RecreateGroupOnPodRestart",
            leaderTemplate=leader if several else None,
            workerTemplate=worker if several else leader,
        ),
    )
    return run.object("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "engine", queued=True, spec=spec)


def _engine(run: RunOnKubernetes, host: str, indices: dict[str, str], *, restart: str) -> Object:
    nodes = f" --nodes {run.engine_nodes} --node $(EVENKEEL_NODE)" if run.engine_nodes > 1 else ""

    def ask(failures: int, *options: str) -> Object:
        program = ["python", "-P", "-m", "launch.schedulers.kubernetes.probe", run.directory]
        command = [*program, "--port", str(ENGINE_PORT), *options]
        return _probe(failures, period_s=_EXEC_S, timeout_s=_EXEC_S, exec=dict(command=command))

    def alive(for_s: int) -> Object:
        """Build a probe that fails after `for_s` seconds without an answer. Only an engine's first node answers."""
        if run.engine_nodes > 1:
            return ask(math.ceil(for_s / _EXEC_S), "--alive")
        return _probe(math.ceil(for_s / _PERIOD_S), httpGet=dict(path="/health", port="http"))

    # An engine ends by itself: it waits for its host name and the recipe, and start_deadline_s bounds first the wait
    # for version 0 and then reading the weights.
    waits_s = NAME_DEADLINE_S + RECIPE_DEADLINE_S + 2 * run.recipe.rollout.start_deadline_s
    return _pod(
        run,
        "engine",
        image=run.options.rollout_image,
        arguments=f"$(EVENKEEL_INDEX) {RECIPE} --host $(EVENKEEL_HOST) --port {ENGINE_PORT} --metrics{nodes}",
        indices=indices,
        host=host,
        ports=dict(http=ENGINE_PORT),
        needs=run.needs.engine,
        gpus=run.engine_gpus,
        probes=dict(
            startupProbe=alive(run.needs.first_policy_s + math.ceil(waits_s)),
            readinessProbe=ask(2),
            livenessProbe=alive(_GONE_S),
        ),
        restart=restart,
        # Engines fill nodes: half-empty nodes would leave no whole node for a learner pod.
        near_its_own=run.engine_gpus != run.options.gpus_per_node,
        # No more than a node of the described size holds, even on a larger node.
        most_on_a_node=run.options.gpus_per_node // run.engine_gpus,
    )


def _probe(failures: int, *, period_s: int = _PERIOD_S, timeout_s: int = 5, **action: Object) -> Object:
    return dict(**action, periodSeconds=period_s, timeoutSeconds=timeout_s, failureThreshold=failures)


def _pod(
    run: RunOnKubernetes,
    role: str,
    *,
    image: str,
    arguments: str,
    host: str,
    ports: dict[str, int],
    needs: HostNeeds,
    gpus: int = 0,
    indices: dict[str, str] | None = None,
    probes: Object | None = None,
    restart: str = "Never",
    near_its_own: bool = False,
    most_on_a_node: int = 0,
) -> Object:
    """Build a role's pod template, with one container. `arguments` follow `evenkeel role ROLE RUN`, separated by
    spaces; `host` is the pod's name for other pods. Pods prefer to be near the run's others and, with `near_its_own`,
    near those of their role. `most_on_a_node` 0 sets no limit."""
    options = run.options
    # CPUs and disk are requested without a limit; memory and devices have both.
    fixed = dict(memory=_quantity(needs.memory_bytes))
    if gpus:
        fixed[options.gpu_resource] = str(gpus)
        if options.rdma is not None and (found := RDMA.fullmatch(options.rdma)):  # the pod's share, at least one
            fixed[found[1]] = str(max(1, int(found[found.re.groups]) * gpus // options.gpus_per_node))
    asked = dict(cpu=str(needs.cpus))
    if needs.replica_bytes:
        asked["ephemeral-storage"] = _quantity(needs.replica_bytes)
    fields = indices or {}
    values = {
        "EVENKEEL_HOST": host,
        "EVENKEEL_API_KEY_FILE": f"{SECRET_FOLDER}/{SECRET_FILE}",
        "EVENKEEL_GRACE_S": str(needs.stop_s),
        MAX_RESTARTS_VARIABLE: str(run.recipe.run.max_restarts),
        KERNEL_CACHE_VARIABLE: f"{options.mount}/.cache/evenkeel/kernels",  # /tmp ends with the pod
        "HOME": "/tmp",
        "USER": "evenkeel",  # an image need not know the user's number
    }
    volumes = _volumes(run, needs)
    container = dict(
        name=role,
        image=image,
        command=COMMAND,
        args=["evenkeel", "role", role, run.directory, *arguments.split(" ")],
        # Fields first: the kubelet expands $(NAME) in later values and in arguments.
        env=[
            *(dict(name=name, valueFrom=dict(fieldRef=dict(fieldPath=path))) for name, path in fields.items()),
            *(dict(name=name, value=value) for name, value in values.items()),
        ],
        ports=[dict(name=name, containerPort=port) for name, port in ports.items()],
        resources=dict(requests=asked | fixed, limits=fixed),
        **(probes or {}),
        securityContext=_CONTAINER_SECURITY,
        volumeMounts=[mount for _, mount in volumes],
    )
    near: list[tuple[int, str | None, str]] = [(50, None, ZONE)]
    if near_its_own:
        near.insert(0, (100, role, NODE))
    preferred = [
        dict(weight=weight, podAffinityTerm=dict(labelSelector=dict(matchLabels=run.selector(whose)), topologyKey=key))
        for weight, whose, key in near
    ]
    spread = dict(
        maxSkew=most_on_a_node,
        topologyKey=NODE,
        whenUnsatisfiable="DoNotSchedule",
        labelSelector=dict(matchLabels=run.selector(role)),
    )
    return _template(
        run,
        PROGRAM_LABEL | run.selector(role),
        restartPolicy=restart,
        terminationGracePeriodSeconds=needs.stop_s + KILL_MARGIN_S,
        affinity=dict(podAffinity=dict(preferredDuringSchedulingIgnoredDuringExecution=preferred)),
        topologySpreadConstraints=[spread] if most_on_a_node else None,
        tolerations=[dict(key=options.gpu_resource, operator="Exists", effect="NoSchedule")] if gpus else None,
        containers=[container],
        volumes=[volume for volume, _ in volumes],
    )


def _template(run: RunOnKubernetes, labels: dict[str, str], **fields: Any) -> Object:
    """Build a pod template that fits hardened namespaces and runs as the chosen user."""
    user, _, group = run.options.run_as.partition(":")
    security = dict(
        runAsNonRoot=True,
        runAsUser=int(user),
        runAsGroup=int(group or user),
        fsGroup=int(group or user),
        fsGroupChangePolicy="OnRootMismatch",
        seccompProfile=dict(type="RuntimeDefault"),
    )
    closed = dict(automountServiceAccountToken=False, enableServiceLinks=False, securityContext=security)
    return dict(metadata=dict(labels=labels), spec=dict(**closed, **fields))


def _volumes(run: RunOnKubernetes, needs: HostNeeds) -> list[tuple[Object, Object]]:
    # 256 is 0400; the kubelet adds read access for the group, since root owns the file.
    key = dict(secretName=SECRET, defaultMode=256, items=[dict(key=SECRET_FILE, path=SECRET_FILE)])
    sources: dict[str, tuple[str, Object]] = {
        "run": (run.options.mount, dict(persistentVolumeClaim=dict(claimName=run.claim))),
        "api-key": (SECRET_FOLDER, dict(secret=key)),
        "tmp": ("/tmp", dict(emptyDir=dict(sizeLimit=_quantity(needs.tmp_bytes)))),
        "recipe": (RECIPE_FOLDER, dict(configMap=dict(name=run.config_map))),
    }
    if needs.shm_bytes:
        sources["shm"] = "/dev/shm", dict(emptyDir=dict(medium="Memory", sizeLimit=_quantity(needs.shm_bytes)))
    read_only = ("api-key", "recipe")
    return [
        (dict(name=name, **source), dict(name=name, mountPath=path, readOnly=True if name in read_only else None))
        for name, (path, source) in sources.items()
    ]


def _quantity(num_bytes: int) -> str:
    """Format a size in whole MiB for Kubernetes, rounded up."""
    return f"{-(-num_bytes // _MIB)}Mi"


def download_job(run: RunOnKubernetes) -> Object:
    """Build the Job that downloads a model from huggingface.co to model.path. A restart resumes the download."""
    name, _, revision = str(run.options.download).partition("@")
    arguments = ["download", name, *(("--revision", revision) if revision else ())]
    token = dict(secretKeyRef=dict(name="huggingface", key="token", optional=True))
    container = dict(
        name="model",
        image=run.options.rollout_image,
        command=["hf"],
        args=[*arguments, "--local-dir", str(run.recipe.model.path)],
        env=[
            dict(name="HF_TOKEN", valueFrom=token),
            dict(name="HF_HUB_OFFLINE", value="0"),
            dict(name="HOME", value="/tmp"),
        ],
        resources=dict(requests=dict(cpu="2", memory="4096Mi"), limits=dict(memory="4096Mi")),
        securityContext=_CONTAINER_SECURITY,
        volumeMounts=[dict(name="run", mountPath=run.options.mount), dict(name="tmp", mountPath="/tmp")],
    )
    template = _template(
        run,
        PROGRAM_LABEL,
        restartPolicy="OnFailure",
        terminationGracePeriodSeconds=KILL_MARGIN_S,
        containers=[container],
        volumes=[
            dict(name="run", persistentVolumeClaim=dict(claimName=run.claim)),
            dict(name="tmp", emptyDir=dict(sizeLimit="2048Mi")),
        ],
    )
    return run.object("batch/v1", "Job", "model", spec=dict(backoffLimit=6, template=template))
