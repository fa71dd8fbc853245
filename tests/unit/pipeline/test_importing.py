"""What messages tell to install: requirements of ours, never the name that is another project's on PyPI."""

from __future__ import annotations

import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline import importing
from pipeline.importing import DISTRIBUTIONS, EXTRA_OF, pip_install

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
STRANGER = ("pip install evenkeel", 'pip install "evenkeel', "pip install 'evenkeel", "evenkeel[")


def test_requirements_are_those_of_our_package() -> None:
    assert pip_install("sglang", "torch") == "pip install sglang==0.5.23 'torch>=2.11'"
    assert pip_install("transformer_engine").startswith("pip install 'transformer-engine[pytorch]")
    assert pip_install("no-such-package") == "pip install no-such-package"


def test_without_our_metadata_a_name_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", none)
    importing._requirements.cache_clear()
    try:
        assert pip_install("sglang") == "pip install sglang"
    finally:
        importing._requirements.cache_clear()


def test_each_package_is_in_the_extra_that_is_said() -> None:
    for package, extra in EXTRA_OF.items():
        named = {canonicalize_name(Requirement(line).name) for line in EXTRAS[extra]}
        assert {canonicalize_name(one) for one in DISTRIBUTIONS.get(package, (package,))} <= named, package


def test_nothing_tells_pip_the_name_of_another_project() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [
        name
        for name in listed.split("\0")
        if name.endswith((".py", ".md", ".sh", ".yaml")) and not name.startswith("tests/") and (ROOT / name).is_file()
        if any(one in (ROOT / name).read_text() for one in STRANGER)
    ]
    assert found == []
