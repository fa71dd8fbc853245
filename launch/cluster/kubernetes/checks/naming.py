"""Names and labels: what Kubernetes and JobSet's webhook refuse, which no schema says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

from launch.cluster.kubernetes.checks.pod_sets import Object, named, of_kind
from launch.cluster.kubernetes.job import RECIPE_FILE, RunOnKubernetes

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_LONGEST = 63
_RANDOM = "-abcde"
"""What a pod's name ends with."""


def check_names(objects: Sequence[Object], run: RunOnKubernetes) -> Iterator[str]:
    """Names of objects and of the pods that they lead to, labels, namespaces."""
    for (kind, name), times in Counter((one["kind"], one["metadata"]["name"]) for one in objects).items():
        if times > 1:
            yield f"{kind} {name}: there are {times} of that name"
    for one in objects:
        yield from _bad_name(named(one), one["metadata"]["name"])
        if one["metadata"].get("namespace") != run.options.namespace:
            yield f"{named(one)}: its namespace is not {run.options.namespace}"
        yield from (f"{named(one)}: {text}" for text in _bad_labels(one))
    for one in of_kind(objects, "JobSet"):
        yield from _jobs(one)
    for one in of_kind(objects, "LeaderWorkerSet"):
        name, spec = one["metadata"]["name"], one["spec"]
        yield from _bad_name(
            f"{named(one)}: pod", f"{name}-{spec['replicas'] - 1}-{spec['leaderWorkerTemplate']['size'] - 1}"
        )
        yield from _bad_name(f"{named(one)}: revision label", f"{name}-0123456789")


def _bad_name(where: str, name: str) -> Iterator[str]:
    if len(name) > _LONGEST:
        yield f"{where}: the name {name} has {len(name)} characters, {_LONGEST} are allowed; shorten run.name"
    if not _DNS_1035.fullmatch(name):
        yield f"{where}: the name {name} must begin with a letter and hold letters, digits and dashes"


def _jobs(one: Object) -> Iterator[str]:
    """JobSet's webhook works out the longest names in the same way."""
    name, jobs = one["metadata"]["name"], one["spec"]["replicatedJobs"]
    for job, times in Counter(job["name"] for job in jobs).items():
        if times > 1:
            yield f"{named(one)}: {times} replicated jobs are called {job}"
    for job in jobs:
        longest = f"{name}-{job['name']}-{job['replicas'] - 1}"
        yield from _bad_name(f"{named(one)}: Job", longest)
        yield from _bad_name(f"{named(one)}: pod", f"{longest}-{job['template']['spec']['completions'] - 1}{_RANDOM}")
    subdomain = one["spec"].get("network", {}).get("subdomain")
    if subdomain is not None:
        yield from _bad_name(f"{named(one)}: subdomain", subdomain)


def _bad_labels(part: Any) -> Iterator[str]:
    """Labels and selectors, wherever they are."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key in ("labels", "matchLabels") and isinstance(value, dict):
                for name, text in value.items():
                    if not _LABEL_KEY.fullmatch(name) or not _LABEL_VALUE.fullmatch(text) or len(text) > _LONGEST:
                        yield f"label {name}={text} is not allowed"
            else:
                yield from _bad_labels(value)
    elif isinstance(part, list):
        for value in part:
            yield from _bad_labels(value)


def check_recipe(objects: Sequence[Object], run: RunOnKubernetes) -> Iterator[str]:
    """The ConfigMap holds the recipe, cannot change, and has its content's digest in its name."""
    maps = of_kind(objects, "ConfigMap")
    if len(maps) != 1:
        yield f"there are {len(maps)} ConfigMaps, expected one, with the recipe"
    for one in maps:
        text = one.get("data", {}).get(RECIPE_FILE)
        if text is None:
            yield f"{named(one)} lacks {RECIPE_FILE}"
            continue
        if not one.get("immutable"):
            yield f"{named(one)} is not immutable: pods that start later could read another recipe"
        if not one["metadata"]["name"].endswith(sha256(text.encode()).hexdigest()[:10]):
            yield f"{named(one)}: its name does not end with the digest of its content; render it again"
        if text != run.recipe.to_yaml():
            yield f"{named(one)}: its {RECIPE_FILE} is not the recipe that was planned; render it again"
