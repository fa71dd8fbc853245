"""The two images, as far as no container engine is needed: their files, and their Python environments on the CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest

from launch.schedulers.kubernetes.pods import COMMAND
from launch.schedulers.kubernetes.run import ClusterOptions
from pipeline.data.files import NO_HARD_LINKS
from rollout_sglang.server.rollout_python import PYTHON_VARIABLE

ROOT = Path(__file__).parents[2]
ROOMS = ("precision", "pipeline", "megatron_bridge", "rollout_sglang", "launch")


@dataclass(frozen=True)
class Image:
    """What an image is for."""

    name: str
    programs: tuple[tuple[str, ...], ...]
    """Arguments of Python; each must end well."""
    modules: tuple[str, ...]
    """Its programs import these, at once or later."""
    foreign: tuple[str, ...]
    """Top-level packages that it must not have."""
    locks: tuple[str, ...]
    """The lists that it is made from."""


LEARNER = Image(
    "learner",
    programs=(("-m", "launch.cli", "role", "learner", "--help"), ("-m", "launch.run.torchrun", "--help")),
    modules=("launch.roles.learner", "launch.run.learn_rank", "launch.run.metrics"),
    foreign=("sglang", "sglang_router"),
    locks=("learner", "learner-gpu"),
)
ROLLOUT = Image(
    "rollout",
    programs=(
        *(("-m", "launch.cli", "role", role, "--help") for role in ("engine", "router", "collector")),
        ("-m", "launch.schedulers.kubernetes.probe", "--help"),
        ("-m", "rollout_sglang.cpu.cpu_server", "--help"),
        ("-m", "rollout_sglang.server.launch_router", "--help"),
    ),
    modules=(
        *(f"launch.roles.{role}" for role in ("engine", "collector")),
        *("launch.run.metrics", "math_verify", "rollout_sglang.server.launch_server"),
    ),
    foreign=("megatron", "transformer_engine"),
    locks=("rollout",),
)
IMAGES = (LEARNER, ROLLOUT)
images = pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)


def pins(name: str) -> dict[str, str]:
    """Package → version of a lock file."""
    lines = (ROOT / "ops/locks" / name).read_text().split()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines), name
    return dict(line.lower().replace("_", "-").split("==") for line in lines)


def instructions(image: Image) -> list[tuple[str, str]]:
    """(word, rest) of a Dockerfile, continued lines joined."""
    text = (ROOT / f"ops/containers/{image.name}.Dockerfile").read_text()
    lines = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line.strip()]


@images
def test_what_is_copied_exists_and_the_result_is_pinned_and_runs_as_a_user(image: Image) -> None:
    found = instructions(image)
    bases = [rest for word, rest in found if word == "ARG" and rest.startswith("BASE=")]
    assert len(bases) == 1
    assert re.search(r":v?\d+\.\d+[\w.-]*$|@sha256:[0-9a-f]{64}$", bases[0]), "the base has no version"
    stages = [rest for word, rest in found if word == "FROM"]
    assert len(stages) >= 2
    assert all(rest.startswith("${BASE}") for rest in stages)
    for word, rest in found:
        if word in ("COPY", "ADD") and not rest.startswith("--from="):
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
        if word == "RUN" and "pip install" in rest:
            assert all("--no-deps" in part for part in rest.split("&&") if "pip install" in part), rest
        if word == "RUN" and "apt-get install" in rest:
            wanted = rest.partition("--no-install-recommends ")[2].partition(" &&")[0].split()
            assert wanted
            assert all("=" in package for package in wanted), rest
    user = ClusterOptions.model_fields["run_as"].default
    last = found[max(place for place, (word, _) in enumerate(found) if word == "FROM") :]
    assert any("tini=0.19" in rest and "bubblewrap=" in rest for word, rest in last if word == "RUN")
    assert [rest for word, rest in last if word == "USER"] == [f"{user}:{user}"]
    assert [json.loads(rest) for word, rest in last if word == "ENTRYPOINT"] == [COMMAND]
    copied = {source for word, rest in found if word == "COPY" for source in rest.split()[:-1]}
    assert {*ROOMS, *(f"ops/locks/{lock}.txt" for lock in image.locks)} <= copied


def test_engines_of_the_rollout_image_run_in_sglang_s_own_python(tmp_path: Path) -> None:
    """The environment in front of it holds no package that an engine imports, and does not see the base's."""
    found = instructions(ROLLOUT)
    assert not any("--system-site-packages" in rest for _, rest in found)
    [variables] = [rest for word, rest in found if word == "ENV" and PYTHON_VARIABLE in rest]
    name = dict(one.split("=") for one in variables.split())[PYTHON_VARIABLE]
    [making] = [rest for word, rest in found if word == "RUN" and f"> {name}" in rest]
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "python3").symlink_to(sys.executable)
    places = {"PATH": f"{tmp_path / 'base'}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", making.replace(name, str(tmp_path / "python"))], check=True, env=os.environ | places)
    said = subprocess.run(
        [tmp_path / "python", "-P", "-c", "import sys; print(sys.argv)", "a b"], capture_output=True, text=True
    )
    assert said.stdout == "['-c', 'a b']\n", said.stderr


@images
def test_locks_are_of_one_version_and_hold_no_foreign_package(image: Image) -> None:
    everything, own, base = pins("cpu.txt"), pins(f"{image.name}.txt"), pins(f"{image.name}-cpu.txt")
    assert (own | base).items() <= everything.items()
    assert not own.keys() & base.keys()
    assert "torch" not in own, "it is of the list for CPUs, or for GPUs"
    assert not {"megatron-core" if name == "megatron" else name.replace("_", "-") for name in image.foreign} & (
        own.keys() | base.keys()
    )


@pytest.fixture(scope="module", params=IMAGES, ids=lambda image: image.name)
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Image, Path]:
    """(image, the Python of an environment with its packages and the product), made as the Dockerfile does."""
    image: Image = request.param
    folder = tmp_path_factory.mktemp(image.name)
    source = folder / "source"
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True, timeout=120)
    python = folder / "env/bin/python"
    [site_packages] = (folder / "env/lib").glob("python*/site-packages")
    for package, version in (pins(f"{image.name}.txt") | pins(f"{image.name}-cpu.txt")).items():
        link_package(package, version, site_packages)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", str(source)], check=True, timeout=300)
    return image, python


def link_package(package: str, version: str, site_packages: Path) -> None:
    """The package of this environment, which `make install` made of a lock that holds this pin too, into another.

    Installing it again would take minutes. Its programs beside the interpreter are left out: no role starts one.
    """
    installed = distribution(package)
    found = installed.version.partition("+")[0]  # of torch, the build for a CPU
    assert found == version, f"{package}: {found} is installed, the image has {version}"
    for file in installed.files or ():
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        target = site_packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(Path(str(file.locate())).resolve())
        except FileExistsError:  # two packages may share a folder's __init__.py
            continue
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            shutil.copy(file.locate(), target)


def run_python(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a folder of nothing, with nothing of this environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EVENKEEL"))}
    return subprocess.run(
        [str(python), "-P", *arguments], capture_output=True, text=True, timeout=280, env=clean, cwd=python.parent
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_role_finds_what_it_needs_and_nothing_of_the_other(environment: tuple[Image, Path]) -> None:
    image, python = environment
    for program in image.programs:
        done = run_python(python, *program)
        assert done.returncode == 0, (program, done.stderr[-2000:])
    loads = "; ".join(f"importlib.import_module({name!r})" for name in image.modules)
    lacks = f"[name for name in {image.foreign!r} if importlib.util.find_spec(name)]"
    done = run_python(python, "-c", f"import importlib, importlib.util; {loads}; print({lacks})")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-2000:]
