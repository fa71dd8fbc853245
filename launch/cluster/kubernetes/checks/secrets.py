"""No key in any file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from launch.build.engine_arguments import gives_secret
from launch.cluster.kubernetes.checks.pod_sets import Object, PodSet, named, of_kind

_SECRET_NAME = re.compile(r"(?i)(^|_)(api_?key|token|password|secret|credentials?)$")
_ASSIGNED = re.compile(r"(?i)(api[-_]?key|password|secret|access[-_]?token)['\"]?\s*[:= ]\s*\S")
_LOOKS_LIKE_ONE = re.compile(r"\b(sk-[A-Za-z0-9_-]{12,}|hf_[A-Za-z0-9]{12,}|ghp_[A-Za-z0-9]{12,}|AKIA[0-9A-Z]{12,})")


def check_secrets(objects: Sequence[Object], pods: Sequence[PodSet]) -> Iterator[str]:
    """Keys come from a Secret that is made apart: not from files that are kept in a repository, or arguments that every
    user of a node can read."""
    for one in of_kind(objects, "Secret"):
        yield f"{named(one)}: Secrets are made apart, and never written to a file"
    for pod in pods:
        for text in (*pod.container["command"], *pod.container["args"]):
            if _LOOKS_LIKE_ONE.search(text) or _ASSIGNED.search(text) or gives_secret(text):
                yield f"{pod.owner}: an argument looks like a secret"
        for name, variable in pod.environment.items():
            value = variable.get("value", "")
            if (_SECRET_NAME.search(name) and value) or _LOOKS_LIKE_ONE.search(value):
                yield f"{pod.owner}: environment variable {name} holds a secret; use EVENKEEL_API_KEY_FILE"
    for one in of_kind(objects, "ConfigMap"):
        for name, text in one.get("data", {}).items():
            if _LOOKS_LIKE_ONE.search(text) or _holds_secret(yaml.safe_load(text)):
                yield f"{named(one)}: {name} looks as if it held a secret"


def _holds_secret(value: Any, name: str = "") -> bool:
    """Whether a value of a recipe has a name that secrets have, or is an argument that gives one. Prose may speak of
    them."""
    if isinstance(value, dict):
        return any(_holds_secret(one, str(key)) for key, one in value.items())
    if isinstance(value, list):
        return any(_holds_secret(one, name) for one in value)
    if not isinstance(value, str):
        return False
    return gives_secret(value) or (value != "" and _SECRET_NAME.search(name) is not None)
