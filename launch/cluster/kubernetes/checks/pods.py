"""Pods: arguments, volumes, secrets, resources, rights, probes, and the time to end in order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from launch.cluster.kubernetes.checks.pod_sets import Object, PodSet, of_kind
from launch.cluster.kubernetes.containers import COMMAND
from launch.cluster.kubernetes.job import RunOnKubernetes
from launch.cluster.kubernetes.options import DIGEST
from launch.cluster.kubernetes.probes import engine_start_s
from launch.plan.hosts import HostNeeds

_VARIABLE = re.compile(r"\$\((\w+)\)")
_SIZE = re.compile(r"(\d+)(Mi|Gi)?")
_LONGEST_PUBLISH_PAUSE_S = 60
"""A server that is silent for less is not started again."""


def needs_of(run: RunOnKubernetes, role: str) -> HostNeeds | None:
    known = dict(learner=run.needs.learner, engine=run.needs.engine, collector=run.needs.collector)
    return (known | dict(router=run.needs.router)).get(role)


def size_bytes(text: str) -> int:
    """Bytes of 512Mi or 64Gi."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return 0
    return int(found[1]) * {"Mi": 2**20, "Gi": 2**30}.get(found[2], 1)


def check_pods(objects: Sequence[Object], pods: Sequence[PodSet], run: RunOnKubernetes) -> Iterator[str]:
    """What concerns one pod alone."""
    for one in pods:
        if len(one.spec["containers"]) != 1:
            yield f"{one.owner}: {len(one.spec['containers'])} containers, expected one"
        for check in (
            _role,
            _command,
            _arguments,
            _images,
            _resources,
            _memory,
            _temporary_files,
            _rights,
            _ends,
            _probes,
        ):
            yield from (f"{one.owner}: {text}" for text in check(one, run))
        yield from (f"{one.owner}: {text}" for text in _hosts(one))
        yield from (f"{one.owner}: {text}" for text in _volumes(objects, one, run))


def _role(pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    if needs_of(run, pod.role) is None:
        yield f"no role is called {pod.role!r}"
    if pod.job not in ("", pod.role) or pod.container["name"] != pod.role:
        yield f"job {pod.job}, container {pod.container['name']} and role {pod.role} should have one name"
    for name, value in run.selector(pod.role).items():
        if pod.labels.get(name) != value:
            yield f"its label {name} is not {value}"


def _command(pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    if tuple(pod.container["command"]) != COMMAND:
        yield f"its command is {' '.join(pod.container['command'])}, expected {' '.join(COMMAND)}"
    arguments = pod.container["args"]
    if arguments[:4] != ["evenkeel", "role", pod.role, run.directory]:
        yield f"its arguments begin with {' '.join(arguments[:4])}, expected evenkeel role {pod.role} {run.directory}"


def _arguments(pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    """Options that exist, with values that agree with the rest."""
    arguments = pod.container["args"]
    options = dict(pairwise(arguments))
    yield from _unknown_options(pod.role, arguments)
    for option, port in (("--port", dict(learner="rendezvous").get(pod.role, "http")), ("--metrics-port", "metrics")):
        declared = pod.ports.get(port)
        if declared is not None and options.get(option) != str(declared):
            yield f"{option} is {options.get(option)}, but its port {port} is {declared}"
    if len(set(pod.ports.values())) < len(pod.ports):
        yield "two of its ports are the same"
    nodes = dict(learner=run.learner_nodes, engine=run.engine_nodes).get(pod.role, 1)
    if pod.role == "learner" and options.get("--nodes") != str(pod.nodes):
        yield f"--nodes is {options.get('--nodes')}, but there are {pod.nodes} pods"
    if (
        pod.role == "engine"
        and nodes > 1
        and (options.get("--nodes"), options.get("--node"))
        != (
            str(nodes),
            "$(EVENKEEL_NODE)",
        )
    ):
        yield f"an engine of {nodes} pods needs --nodes {nodes} --node $(EVENKEEL_NODE)"
    if options.get("--host") != "$(EVENKEEL_HOST)":
        yield f"--host is {options.get('--host')}, expected $(EVENKEEL_HOST)"


def _unknown_options(role: str, arguments: Sequence[str]) -> Iterator[str]:
    """As `evenkeel role ROLE` itself sees them."""
    import typer

    usage_error: Any = typer.BadParameter.__base__  # its module is private
    command = _role_commands().get(role)
    if command is None:
        yield f"there is no command `evenkeel role {role}`"
        return
    try:
        command.make_context(role, [_VARIABLE.sub("0", word) for word in arguments[3:]])
    except usage_error as error:
        yield f"`evenkeel role {role}` refuses its arguments: {error.format_message()}"


@lru_cache(maxsize=1)
def _role_commands() -> dict[str, Any]:
    import typer

    from launch.cluster.roles.commands import role_app

    command: Any = typer.main.get_command(role_app)
    found: dict[str, Any] = command.commands
    return found


def _hosts(pod: PodSet) -> Iterator[str]:
    """The name that a pod is told is the one by which it can be reached."""
    seen: set[str] = set()
    for name, variable in pod.environment.items():
        text = variable.get("value", "")
        for used in _VARIABLE.findall(text):
            if used not in seen:
                yield f"{name} uses $({used}), which is not set before it"
        seen.add(name)
    for word in pod.container["args"]:
        for used in _VARIABLE.findall(word):
            if used not in seen:
                yield f"its arguments use $({used}), which is not set"
    told = pod.environment.get("EVENKEEL_HOST", {}).get("value", "")
    for (unit, node), name in pod.names.items():
        values = dict(EVENKEEL_INDEX=str(unit), EVENKEEL_NODE=str(node))
        expanded = _VARIABLE.sub(lambda found, values=values: values.get(found[1], "?"), told)  # type: ignore[misc]
        if expanded != name:
            yield f"a pod is told that it is {expanded}, but it is reached as {name}"
            break


def _images(pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    wanted = run.options.learner_image if pod.role == "learner" else run.options.rollout_image
    if pod.container["image"] != wanted:
        yield f"its image is {pod.container['image']}, expected {wanted}"
    if not run.options.allow_tags and not DIGEST.fullmatch(pod.container["image"]):
        yield f"its image {pod.container['image']} is not pinned by a digest"


def _resources(pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    found = pod.container["resources"]
    requests, limits = found.get("requests", {}), found.get("limits", {})
    for name in sorted((requests.keys() | limits.keys()) - {"cpu", "ephemeral-storage"}):
        if requests.get(name) != limits.get(name):
            yield f"it asks for {requests.get(name)} of {name} and may have {limits.get(name)}; both must be the same"
    gpus = dict(learner=run.learner_gpus, engine=run.engine_gpus).get(pod.role, 0)
    if pod.limit(run.options.gpu_resource) != gpus:
        yield f"it has {pod.limit(run.options.gpu_resource)} GPUs, the plan says {gpus}"
    rdma = run.options.rdma_of(gpus) if gpus else None
    if rdma is not None and limits.get(rdma[0]) != rdma[1]:
        yield f"it has {limits.get(rdma[0])} of {rdma[0]}, expected {rdma[1]}"
    if (needs := needs_of(run, pod.role)) and int(requests.get("cpu", "0")) < needs.cpus:
        yield f"it asks for {requests.get('cpu')} CPUs, the plan says {needs.cpus}"


def _temporary_files(pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    names = {one["name"] for one in pod.container["volumeMounts"] if one["mountPath"] == "/tmp"}
    if not names:
        yield "nothing can be written to /tmp"
    needs = needs_of(run, pod.role)
    if needs is None:
        return
    for one in pod.spec["volumes"]:
        limit = one.get("emptyDir", {}).get("sizeLimit")
        if one["name"] in names and limit is not None and size_bytes(limit) < needs.tmp_bytes:
            yield f"/tmp has {limit}, the plan says {needs.tmp_bytes / 2**30:.0f} GiB; the kubelet ends what exceeds it"
    asked = size_bytes(pod.container["resources"].get("requests", {}).get("ephemeral-storage", "0"))
    if asked < needs.replica_bytes:
        yield (
            f"it asks for {asked / 2**30:.0f} GiB of its node's disk, the plan says {needs.replica_bytes / 2**30:.0f}: "
            "weights.channel delta keeps a replica there"
        )


def _memory(pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    needs = needs_of(run, pod.role)
    if needs is None:
        return
    limit = size_bytes(pod.container["resources"]["limits"].get("memory", "0"))
    if limit < needs.memory_bytes:
        yield f"its memory limit is {limit / 2**30:.0f} GiB, the plan says {needs.memory_bytes / 2**30:.0f}"
    if not needs.shm_bytes:
        return
    names = {one["name"] for one in pod.container["volumeMounts"] if one["mountPath"] == "/dev/shm"}
    shm = [one["emptyDir"] for one in pod.spec["volumes"] if one["name"] in names and "emptyDir" in one]
    if not shm or shm[0].get("medium") != "Memory":
        yield "/dev/shm is not in memory; a container's own has 64 MiB, which is too little for NCCL"
    elif size_bytes(shm[0].get("sizeLimit", "0")) < needs.shm_bytes:
        yield f"/dev/shm has {shm[0].get('sizeLimit')}, the plan says {needs.shm_bytes / 2**30:.0f} GiB"


def _volumes(objects: Sequence[Object], pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    sources = {one["name"]: one for one in pod.spec["volumes"]}
    mounts = {one["name"]: one["mountPath"] for one in pod.container["volumeMounts"]}
    for name in sorted(sources.keys() ^ mounts.keys()):
        yield f"volume {name} is {'mounted but not there' if name in mounts else 'there but not mounted'}"
    if len(set(mounts.values())) < len(pod.container["volumeMounts"]):
        yield "two volumes are mounted at one path"
    shared = [mounts.get(name) for name, one in sources.items() if "persistentVolumeClaim" in one]
    if shared != [run.options.mount]:
        yield f"the shared volume is at {shared}, expected {run.options.mount} in every pod"
    maps = {one["metadata"]["name"]: one for one in of_kind(objects, "ConfigMap")}
    claims = {one["metadata"]["name"] for one in of_kind(objects, "PersistentVolumeClaim")} | {run.options.pvc}
    files = set()
    for name, source in sources.items():
        place = mounts.get(name, "")
        if "configMap" in source and (found := maps.get(source["configMap"]["name"])) is not None:
            files |= {f"{place}/{key}" for key in found.get("data", {})}
        elif "configMap" in source:
            yield f"ConfigMap {source['configMap']['name']} is not there"
        if "persistentVolumeClaim" in source and source["persistentVolumeClaim"]["claimName"] not in claims:
            yield f"claim {source['persistentVolumeClaim']['claimName']} is not there"
        if "secret" in source:
            yield from _secret(source["secret"], run)
            files |= {f"{place}/{item['path']}" for item in source["secret"]["items"]}
    yield from _files_read(pod, files)


def _secret(source: Object, run: RunOnKubernetes) -> Iterator[str]:
    if source["secretName"] != run.options.secret or source["items"][0]["key"] != run.options.secret_key:
        yield f"the key is read from another Secret than {run.options.secret}, entry {run.options.secret_key}"
    if source["defaultMode"] & 0o377:
        yield f"the key's file has mode {source['defaultMode']:o}: others could read it; use 400"


def _files_read(pod: PodSet, files: set[str]) -> Iterator[str]:
    arguments = pod.container["args"]
    read = [arguments[place + 1] for place, word in enumerate(arguments[:-1]) if word == "--recipe"]
    if not read:
        yield "it is not given --recipe: it could begin with an older recipe of the run"
    for path in [*read, pod.environment.get("EVENKEEL_API_KEY_FILE", {}).get("value", "EVENKEEL_API_KEY_FILE")]:
        if path not in files:
            yield f"{path} is read, but no volume holds it"


def _rights(pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    spec, security = pod.spec, pod.spec.get("securityContext", {})
    own = pod.container.get("securityContext", {})
    if spec.get("automountServiceAccountToken") is not False or "serviceAccountName" in spec:
        yield "it gets a token of a service account, and needs none"
    if security.get("runAsNonRoot") is not True or not security.get("runAsUser") or own.get("runAsUser") == 0:
        yield "it may run as root"
    if not security.get("fsGroup"):
        yield "it has no fsGroup, so that it cannot write to the shared volume"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "it has no seccomp profile"
    if own.get("readOnlyRootFilesystem") is not True or own.get("allowPrivilegeEscalation") is not False:
        yield "its root file system can be written, or it may gain rights"
    capabilities = own.get("capabilities", {})
    allowed = ["IPC_LOCK"] if run.options.rdma else []
    if capabilities.get("drop") != ["ALL"] or any(one not in allowed for one in capabilities.get("add", [])):
        yield "it keeps capabilities that it does not need"
    if own.get("privileged") or any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "it shares namespaces of its host, or is privileged"


def _ends(pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    """Killed only after everything worth keeping is on the disk."""
    needs = needs_of(run, pod.role)
    own = int(pod.environment.get("EVENKEEL_GRACE_S", {}).get("value", "0"))
    if needs is not None and own < needs.stop_s:
        yield f"EVENKEEL_GRACE_S is {own}, the plan says {needs.stop_s}"
    if pod.spec["terminationGracePeriodSeconds"] <= own:
        yield f"it is killed {pod.spec['terminationGracePeriodSeconds']} s after it was asked to end, it takes {own}"
    if pod.role == "learner" and own < run.needs.save_s:
        yield f"a checkpoint takes {run.needs.save_s} s, it has {own}"


def _probes(pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    found = {name: pod.container.get(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    for name, probe in found.items():
        if probe is None:
            continue
        actions = [key for key in ("exec", "httpGet", "tcpSocket") if key in probe]
        if len(actions) != 1:
            yield f"{name} has {len(actions)} actions, expected one"
        port = probe.get("httpGet", probe.get("tcpSocket", {})).get("port")
        if port is not None and port not in pod.ports:
            yield f"{name} asks port {port}, which the container does not have"
        if probe.get("httpGet", {}).get("path") == "/health_generate":
            yield f"{name} samples a token: it fails while an engine takes weights"
        if "exec" in probe:
            yield from _asks_itself(name, probe["exec"]["command"], pod, run)
    if pod.role == "engine":
        yield from _engine_probes(found, run)
    if pod.role == "learner" and found["livenessProbe"]:
        yield "a liveness probe would kill the learner in the middle of a step; it has deadlines of its own"


def _asks_itself(name: str, command: Sequence[str], pod: PodSet, run: RunOnKubernetes) -> Iterator[str]:
    expected = ["python", "-P", "-m", "launch.cluster.probe", run.directory, "--port", str(pod.ports.get("http"))]
    if list(command[:7]) != expected:
        yield f"{name} runs {' '.join(command)}, expected {' '.join(expected)}"


def _engine_probes(found: dict[str, Object | None], run: RunOnKubernetes) -> Iterator[str]:
    for name, probe in found.items():
        if probe is None:
            yield f"an engine needs a {name}"
            return
    startup, readiness, liveness = (found[name] or {} for name in ("startupProbe", "readinessProbe", "livenessProbe"))
    if (given := startup["periodSeconds"] * startup["failureThreshold"]) < engine_start_s(run):
        yield f"its startupProbe gives up after {given} s, an engine may take {engine_start_s(run)}"
    if "exec" not in readiness:
        yield "its readinessProbe does not ask which version it serves"
    if liveness["periodSeconds"] * liveness["failureThreshold"] < _LONGEST_PUBLISH_PAUSE_S:
        yield f"its livenessProbe kills it after less than {_LONGEST_PUBLISH_PAUSE_S} s of silence"
