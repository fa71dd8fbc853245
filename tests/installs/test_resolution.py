"""What pip would find for the extras and the locks, by the index's metadata: nothing is installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
ALONE = {one["extra"] for group in PROJECT["tool"]["uv"]["conflicts"] for one in group}
ON_GPUS = re.compile(r"(nvidia|cuda)-|triton$")
"""Packages that torch for CUDA asks for, and torch for CPUs does not."""

pytestmark = [pytest.mark.installs, pytest.mark.timeout(600)]


def requirements(*extras: str) -> list[str]:
    """The core's requirements, and those of extras."""
    ours = (line for extra in extras for line in EXTRAS[extra])
    lines = [*PROJECT["project"]["dependencies"], *ours]
    included = [extra for line in lines for extra in re.findall(r"^evenkeel\[([\w-]+)\]", line)]
    plain = [line for line in lines if not line.startswith("evenkeel[")]
    return plain + (requirements(*included) if included else [])


def resolved(
    asked: Iterable[str], *, locks: Iterable[str] = (), overrides: Iterable[str] = (), python: str = "3.12"
) -> dict[str, str]:
    """Name → version of what pip would install for these requirements within the locks, from wheels. Raises ValueError
    without a solution. `overrides` replace the requirements of packages, whoever asks for them."""
    options = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_34", "--only-binary", ":all:"]
    options += ["--no-binary", "transformer-engine-torch"]
    for lock in locks:
        options += ["--constraint", f"ops/locks/{lock}.txt"]
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    with NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as replaced:
        print(*overrides, sep="\n", file=replaced, flush=True)
        done = subprocess.run(
            [*uv, *options, "--override", replaced.name, "-"],
            input="\n".join(asked),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=300,
        )
    if done.returncode:
        raise ValueError(done.stderr)
    return dict(line.split("==") for line in done.stdout.splitlines())


def pins(*locks: str) -> dict[str, str]:
    """Name → version of lock files, names as the index writes them."""
    lines = [line for lock in locks for line in (ROOT / f"ops/locks/{lock}.txt").read_text().split("\n") if line]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def with_all_others() -> dict[str, dict[str, str]]:
    """Extra of those that exclude each other → what is found for it and all others together."""
    others = EXTRAS.keys() - ALONE - {"bench"}  # the benchmark's TRL has an environment of its own
    with ThreadPoolExecutor() as threads:
        found = {extra: threads.submit(resolved, requirements(*others, extra)) for extra in sorted(ALONE)}
    return {extra: one.result() for extra, one in found.items()}


def test_each_extra_resolves_with_all_that_it_does_not_exclude(with_all_others: dict[str, dict[str, str]]) -> None:
    assert {extra: found["torch"] for extra, found in with_all_others.items()} == {
        "cpu": "2.13.0",
        "learner-gpu": "2.11.0",
        "rollout": "2.14.1",
    }


def test_extras_that_are_said_to_exclude_each_other_do() -> None:
    with ThreadPoolExecutor() as threads:
        found = {pair: threads.submit(resolved, requirements(*pair)) for pair in combinations(sorted(ALONE), 2)}
    assert len(found) == 3
    for pair, one in found.items():
        assert "requirements are unsatisfiable" in str(one.exception()), pair


def test_a_learner_on_gpus_has_libraries_of_one_cuda(with_all_others: dict[str, dict[str, str]]) -> None:
    assert not [name for name in with_all_others["learner-gpu"] if name.endswith("cu12")]


def test_the_learner_s_lists_are_what_their_packages_ask_for_but_for_nccl(
    with_all_others: dict[str, dict[str, str]],
) -> None:
    """NCCL alone is another than torch 2.11 asks for: that of the torch which SGLang asks for."""
    nccl = with_all_others["rollout"]["nvidia-nccl-cu13"]
    asked = [*requirements("learner-gpu"), "transformer-engine-torch==2.11.0"]
    # As it is on the index, the extension asks for CUDA 12; built beside torch for CUDA 13, it asks for that.
    instead = [f"nvidia-nccl-cu13=={nccl}", "transformer-engine-cu12==0; sys_platform == 'none'"]
    found = resolved(asked, locks=["learner", "learner-gpu"], overrides=instead)
    assert found == pins("learner", "learner-gpu")
    for image in ("learner", "rollout"):
        assert f"ARG NCCL={nccl}\n" in (ROOT / f"ops/containers/{image}.Dockerfile").read_text()


def test_the_list_of_the_rollout_image_is_complete_and_has_nothing_of_an_engine_s() -> None:
    """Engines run in SGLang's own Python: what was laid over it contradicted what SGLang asks for."""
    found = resolved(requirements() + [one for one in EXTRAS["rollout"] if "sglang==" not in one], locks=["rollout"])
    assert found == pins("rollout")
    assert not {"torch", "sglang", "transformers"} & found.keys()


def test_the_lock_of_cpus_holds_all_that_its_extras_ask_for() -> None:
    found = resolved(requirements("cpu", "mcp"), locks=["cpu"], python="3.11")
    assert {name for name in found if not ON_GPUS.match(name)} <= pins("cpu").keys()
