"""The wheel: every module and data file of the product, nothing else, and commands that work where it is unpacked."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("precision", "pipeline", "megatron_bridge", "rollout_sglang", "launch")
LIBRARY = ROOT / "launch" / "library"
"""Holds what a program imports as `evenkeel`."""
SHIPPED_SUFFIXES = (".py", ".yaml", ".json", ".j2", ".css", ".js")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the sources, in which Python has left its caches."""
    folder = tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / "source" / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    assert compileall.compile_dir(folder / "source", quiet=1)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(folder / "source")], check=True, timeout=200)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_a_wheel_holds_the_product_and_nothing_else(unpacked: Path) -> None:
    wheel = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    product = {
        path.relative_to(LIBRARY if path.is_relative_to(LIBRARY) else ROOT)
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in SHIPPED_SUFFIXES and "__pycache__" not in path.parts
    }
    assert {path for path in wheel if not path.parts[0].endswith(".dist-info")} == product
    assert Path("pipeline/analysis/pages/report.html.j2") in wheel
    assert [path.name for path in wheel if path.parts[-2:-1] == ("licenses",)] == ["LICENSE"]
    assert {Path("pipeline/recipes/models/qwen3-32b/config.json"), Path("evenkeel/__init__.py")} <= wheel


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--help",), "Usage"),
        (("recipe", "demo"), "name: demo"),
        (("plan", "qwen3_32b", "--gpus", "64", "--gpu-gib", "80"), "32.76 B parameters"),
    ],
)
def test_commands_run_where_the_wheel_is_unpacked(
    unpacked: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    code = f"import launch.cli as cli; assert cli.__file__.startswith({str(unpacked)!r}), cli.__file__; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_programs_import_it_where_the_wheel_is_unpacked(unpacked: Path, tmp_path: Path) -> None:
    code = "import evenkeel; print(evenkeel.__file__, evenkeel.load_recipe('demo').run.name)"
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(unpacked / "evenkeel" / "__init__.py"), "demo"]
