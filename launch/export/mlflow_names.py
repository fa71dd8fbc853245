"""MLflow refuses names that Even Keel allows, such as those of reward parts: `pass@1`, `f1+bonus`, `a//b`."""

from __future__ import annotations

import hashlib
import re

_REFUSED = re.compile(r"[^\w.\- :]")
"""In a part between slashes."""
_NO_PLACE = ("", ".", "..")
"""Parts that a path does without: MLflow takes names for paths, of which no two may be one place."""


def mlflow_name(name: str) -> str:
    """The name itself where MLflow takes it. Else one in which `_` stands for what it refuses, and whose end tells it
    from another that would look the same; a name has the same one in every export."""
    parts = ["_" if part in _NO_PLACE else _REFUSED.sub("_", part) for part in name.split("/")]
    allowed = "/".join(parts)
    return name if allowed == name else f"{allowed}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
