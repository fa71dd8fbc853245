"""Jobs: how many GPUs they have together, and what happens when a pod ends, worked out as Kubernetes and JobSet do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from launch.cluster.kubernetes.checks.pod_sets import Object, PodSet, named, of_kind
from launch.cluster.kubernetes.job import RunOnKubernetes
from pipeline.errors import FATAL_EXIT_CODE, STOPPED_EXIT_CODE

Outcome = Literal["the run fails", "started again, not counted", "started again, counted"]
Cause = int | Literal["DisruptionTarget"]
"""A pod's exit status, or the condition that it got first."""

EXPECTED: Mapping[Cause, Outcome] = {
    FATAL_EXIT_CODE: "the run fails",
    STOPPED_EXIT_CODE: "started again, not counted",
    "DisruptionTarget": "started again, not counted",
    1: "started again, counted",
    137: "started again, counted",
}


def check_gpus(pods: Sequence[PodSet], run: RunOnKubernetes) -> Iterator[str]:
    """All roles are there as often as the recipe says, and their GPUs add up."""
    recipe, resource = run.recipe, run.options.gpu_resource
    wanted = dict(
        learner=recipe.learner.num_processes,
        engine=recipe.rollout.engines * recipe.rollout.tensor_parallel,
    )
    for role, gpus in wanted.items():
        found = sum(one.count * one.nodes * one.limit(resource) for one in pods if one.role == role)
        if found != gpus:
            yield f"pods of role {role} have {found} GPUs together, the recipe asks for {gpus}"
    units = dict(learner=1, collector=1, engine=recipe.rollout.engines) | (dict(router=1) if run.has_router else {})
    for role, count in units.items():
        found = max((one.count for one in pods if one.role == role), default=0)
        if found != count:
            yield f"there are {found} of role {role}, expected {count}"
    others = sum(one.limit(resource) for one in pods if one.role not in wanted)
    if others:
        yield f"roles without a model have {others} GPUs"


def check_sets(objects: Sequence[Object], run: RunOnKubernetes) -> Iterator[str]:
    """Gang admission, names that resolve, success, and every way in which a pod can end."""
    queue = run.options.queue
    for kind in ("JobSet", "LeaderWorkerSet"):
        for one in of_kind(objects, kind):
            if one["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name") != queue:
                yield f"{named(one)}: its queue is not {queue}"
    sets = of_kind(objects, "JobSet")
    if len(sets) != 1:
        yield f"there are {len(sets)} JobSets, expected one"
    for one in sets:
        yield from (f"{named(one)}: {text}" for text in _job_set(one))
    for one in of_kind(objects, "LeaderWorkerSet"):
        template = one["spec"]["leaderWorkerTemplate"]
        parts = [template[name] for name in ("leaderTemplate", "workerTemplate") if name in template]
        if any(part["spec"].get("restartPolicy") != "Always" for part in parts):
            yield f"{named(one)}: pods of a StatefulSet need restartPolicy Always"


def _job_set(one: Object) -> Iterator[str]:
    spec = one["spec"]
    network = spec.get("network", {})
    if not network.get("enableDNSHostnames") or network.get("publishNotReadyAddresses") is False:
        yield "its pods have no names before they are ready; engines wait for one another then"
    done = spec.get("successPolicy", {})
    if sorted(done.get("targetReplicatedJobs", [])) != ["collector", "learner"] or done.get("operator") != "All":
        yield "it must be done when learner and collector are; engines and router never end by themselves"
    if spec.get("failurePolicy", {}).get("maxRestarts", 0) < 1:
        yield "maxRestarts is 0: the first failure ends the run"
    for rule in spec.get("failurePolicy", {}).get("rules", []):
        if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]):
            yield f"failure rule {rule['name']!r}: JobSet does not allow that name"
    if spec.get("startupPolicy", {}).get("startupPolicyOrder", "AnyOrder") != "AnyOrder":
        yield "roles wait for one another: started in order, the first would wait for ever"
    for job in spec["replicatedJobs"]:
        yield from (f"{job['name']}: {text}" for text in _job(job, spec))


def _job(job: Object, job_set: Object) -> Iterator[str]:
    spec, template = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    if "dependsOn" in job:
        yield "roles wait for one another; dependsOn would keep some from starting again"
    if template.get("restartPolicy") != "Never":
        yield "restartPolicy must be Never: podFailurePolicy does not work otherwise"
    if spec.get("completionMode") != "Indexed" or spec.get("completions") != spec.get("parallelism"):
        yield "its pods must be Indexed and all run at once"
    if spec.get("podReplacementPolicy") != "Failed":
        yield "a pod must be gone before it is replaced (podReplacementPolicy Failed)"
    if job["name"] == "learner" and spec.get("backoffLimit") != 0:
        yield "the learner starts again as a whole: its backoffLimit must be 0"
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        name = rule.get("onExitCodes", {}).get("containerName")
        if name is not None and name not in {one["name"] for one in template["containers"]}:
            yield f"podFailurePolicy speaks of container {name}, which is not there"
        values = rule.get("onExitCodes", {}).get("values", [1])
        if 0 in values or values != sorted(set(values)):
            yield f"exit codes {values} must be sorted, different, and not 0"
    for cause, expected in EXPECTED.items():
        if (found := outcome(job, job_set, cause)) != expected:
            ended = f"a pod ends with {cause}" if isinstance(cause, int) else "a pod is evicted"
            yield f"when {ended}: {found}, expected: {expected}"


def outcome(job: Object, job_set: Object, cause: Cause) -> Outcome:
    """What becomes of a pod's end: podFailurePolicy of its Job first, then failurePolicy of the JobSet."""
    spec = job["template"]["spec"]
    for index, rule in enumerate(spec.get("podFailurePolicy", {}).get("rules", [])):
        message = _matched(rule, job["name"], cause, index)
        if message is None:
            continue
        if rule["action"] == "Ignore":
            return "started again, not counted"
        if rule["action"] == "FailJob":
            return _of_failed_job(job["name"], job_set, "PodFailurePolicy", message)
        break
    return _of_failed_job(job["name"], job_set, "BackoffLimitExceeded", "Job has reached the specified backoff limit")


def _matched(rule: Object, container: str, cause: Cause, index: int) -> str | None:
    """The message with which Kubernetes fails a Job by such a rule; None when the rule does not match."""
    ending = f"matching {rule['action']} rule at index {index}"
    codes = rule.get("onExitCodes")
    if codes is not None and isinstance(cause, int):
        found = cause in codes["values"]
        if found == (codes["operator"] == "In") and codes.get("containerName", container) == container:
            return f"Container {container} for pod default/pod failed with exit code {cause} {ending}"
    types = [one["type"] for one in rule.get("onPodConditions", []) if one.get("status", "True") == "True"]
    return f"Pod default/pod has condition {cause} {ending}" if cause in types else None


def _of_failed_job(job: str, job_set: Object, reason: str, message: str) -> Outcome:
    policy = job_set.get("failurePolicy", {})
    for rule in policy.get("rules", []):
        targets, reasons = rule.get("targetReplicatedJobs", []), rule.get("onJobFailureReasons", [])
        patterns = rule.get("onJobFailureMessagePatterns", [])
        if (targets and job not in targets) or (reasons and reason not in reasons):
            continue
        if patterns and not any(re.search(pattern, message) for pattern in patterns):
            continue
        if rule["action"] == "FailJobSet":
            return "the run fails"
        return "started again, not counted" if "IgnoreMaxRestarts" in rule["action"] else "started again, counted"
    return "started again, counted"
