"""What becomes of a pod's end, worked out as Kubernetes and JobSet do."""

from __future__ import annotations

import re
from typing import Any

from pipeline.errors import FATAL_EXIT_CODE, STOPPED_EXIT_CODE

Object = dict[str, Any]
EXPECTED: dict[int | str, str] = {
    FATAL_EXIT_CODE: "the run fails",
    STOPPED_EXIT_CODE: "started again, not counted",
    "DisruptionTarget": "started again, not counted",
    1: "started again, counted",
    137: "started again, counted",
}
"""By a pod's exit status, or the condition that it got first."""


def outcome(job: Object, job_set: Object, cause: int | str) -> str:
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


def _matched(rule: Object, container: str, cause: int | str, index: int) -> str | None:
    """The message with which Kubernetes fails a Job by such a rule; None when the rule does not match."""
    ending = f"matching {rule['action']} rule at index {index}"
    codes = rule.get("onExitCodes")
    if codes is not None and isinstance(cause, int):
        found = cause in codes["values"]
        if found == (codes["operator"] == "In") and codes.get("containerName", container) == container:
            return f"Container {container} for pod default/pod failed with exit code {cause} {ending}"
    types = [one["type"] for one in rule.get("onPodConditions", []) if one.get("status", "True") == "True"]
    return f"Pod default/pod has condition {cause} {ending}" if cause in types else None


def _of_failed_job(job: str, job_set: Object, reason: str, message: str) -> str:
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
        whole = ", with all others" if "JobSet" in rule["action"] else ""
        return f"started again, {'not ' if 'IgnoreMaxRestarts' in rule['action'] else ''}counted{whole}"
    return "started again, counted"
