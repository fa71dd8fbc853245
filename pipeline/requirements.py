"""What has to be installed, by the requirements of our own package.

On PyPI the name `evenkeel` is another project's, so no message gives that name to pip.
"""

from __future__ import annotations

import shlex
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_OURS = "evenkeel"


def pip_install(*distributions: str) -> str:
    """`pip install 'torch>=2.11' mbridge==0.15.1`: each as the core or the first extra of pyproject.toml asks for it.
    By its name alone where none does, or where our package's metadata are not at hand."""
    known = _requirements()
    return " ".join(["pip install", *(shlex.quote(known.get(canonicalize_name(one), one)) for one in distributions)])


@cache
def _requirements() -> dict[str, str]:
    """Name → requirement, without what it says about extras of ours."""
    try:
        lines = metadata.requires(_OURS) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for one in map(Requirement, lines):
        extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
        found.setdefault(canonicalize_name(one.name), f"{one.name}{extras}{one.specifier}")
    return found
