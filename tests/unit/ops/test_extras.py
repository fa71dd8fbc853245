"""The extras of pyproject.toml: what they name can be installed together, and is what the tests run with."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rollout_sglang.server.rollout_python import BESIDE_CPU_EXTRA

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = {
    canonicalize_name(name): version
    for name, _, version in (line.partition("==") for line in (ROOT / "ops/locks/cpu.txt").read_text().split())
}

BESIDE = dict(one.split("==") for one in BESIDE_CPU_EXTRA)


def named_by(extra: str) -> dict[str, Requirement]:
    """Name → requirement of an extra, of those that it includes, and of the core."""
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    found: dict[str, Requirement] = {}
    for requirement in map(Requirement, lines):
        if requirement.name == "evenkeel":
            for included in requirement.extras:
                found |= named_by(included)
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found


@pytest.mark.parametrize("extra", ["cpu", "mcp"])
def test_the_lock_satisfies_the_extras_of_the_tests(extra: str) -> None:
    for name, requirement in named_by(extra).items():
        assert requirement.specifier.contains(LOCK[name], prereleases=True), requirement


def test_the_extra_of_a_cpu_names_all_that_sglang_asks_for_and_a_cpu_has() -> None:
    asked = [Requirement(line) for line in metadata.requires("sglang") or ()]
    direct = {canonicalize_name(one.name) for one in asked if "extra" not in str(one.marker)}
    assert direct & LOCK.keys() <= named_by("cpu").keys() | BESIDE.keys()


def with_what_they_ask_for(names: set[str]) -> set[str]:
    """The distributions that pip installs for these, among those that are installed here."""
    found: set[str] = set()
    ahead = set(names)
    while ahead:
        name = ahead.pop()
        found.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        asked = (one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": ""}))
        ahead |= {canonicalize_name(one.name) for one in asked} - found
    return found


@pytest.mark.slow
def test_an_engine_on_a_cpu_imports_nothing_beside_the_extra() -> None:
    """SGLang imports packages that it does not ask for: dill and jsonschema are on no list of its own."""
    installed = with_what_they_ask_for(set(named_by("cpu"))) | BESIDE.keys() | {"evenkeel", "setuptools"}
    absent = [
        module
        for module, names in metadata.packages_distributions().items()
        if not {canonicalize_name(name) for name in names} & installed
    ]
    assert {"hypothesis", "pyarrow"} & set(absent)
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent!r}))
from rollout_sglang.cpu import cpu_server
cpu_server.prepare()
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.launch_server, sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler
import sglang.srt.managers.detokenizer_manager, sglang.srt.managers.tokenizer_manager
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Failed to apply hooks" not in done.stderr


def test_what_asks_for_packages_of_gpus_stays_out_of_the_extra_of_a_cpu() -> None:
    """pip would follow SGLang's list to gigabytes of them, and xgrammar's to Triton."""
    assert not named_by("cpu").keys() & BESIDE.keys()
    assert LOCK.items() >= BESIDE.items()
    assert f"sglang=={BESIDE['sglang']}" in PROJECT["optional-dependencies"]["rollout"]


def test_the_license_is_named_and_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert all("Apache License" in (ROOT / name).read_text() for name in PROJECT["license-files"])
