"""`make install`: an environment counts as made when torch, Megatron-Core and SGLang can be imported in it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.runs import ROOT

pytestmark = pytest.mark.slow


def add_wheel(index: Path, name: str, files: dict[str, bytes], version: str = "1.0", needs: str = "") -> None:
    """Write a wheel of these files."""
    info = f"{name}-{version}.dist-info"
    described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + f"Requires-Dist: {needs}\n" * bool(needs)
    files = {
        **files,
        f"{info}/METADATA": described.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder of wheels in which torch needs CUDA's packages, as where an index has no CPU build."""
    folder = tmp_path / "index"
    folder.mkdir()
    add_wheel(folder, "torch", {"torch/__init__.py": b"import cudnn"}, needs='cudnn; platform_system == "Linux"')
    add_wheel(folder, "cudnn", {"cudnn.py": b""})
    add_wheel(folder, "megatron_core", {"megatron/core/__init__.py": b""})
    add_wheel(folder, "sglang", {"sglang/__init__.py": b"import triton"})
    add_wheel(folder, "triton", {"triton.py": b""}, version=metadata_pin("triton"))
    add_wheel(folder, "transformers", {
        "transformers/__init__.py": b"",
        "transformers/utils/__init__.py": b"",
        "transformers/utils/import_utils.py": b"is_torchvision_available = is_torchvision_v2_available = bool",
    })  # fmt: skip
    real = metadata.distribution("setuptools")
    files = {str(file): Path(str(file.locate())).read_bytes() for file in real.files or () if ".." not in file.parts}
    add_wheel(
        folder, "setuptools", {n: b for n, b in files.items() if ".dist-info/" not in n or "entry" in n}, real.version
    )
    return folder


def metadata_pin(name: str) -> str:
    return (ROOT / "ops/locks" / f"{name}.txt").read_text(encoding="utf-8").strip().split("==")[1]


def install(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    lock = tmp_path / "lock.txt"
    setuptools = f"setuptools=={metadata.version('setuptools')}"
    lock.write_text(f"torch==1.0\nmegatron-core==1.0\nsglang==1.0\ntransformers==1.0\n{setuptools}\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "ops/install.py", str(tmp_path / "venv"), str(lock)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=300)


def test_torch_brings_the_packages_that_its_cuda_build_needs(tmp_path: Path, index: Path) -> None:
    done = install(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this index has torch for CUDA only" in done.stdout
    assert (tmp_path / "venv" / ".installed").exists()


def test_an_environment_that_cannot_import_is_not_done_and_the_next_call_mends_it(tmp_path: Path, index: Path) -> None:
    hidden = index / "cudnn-1.0-py3-none-any.whl"
    aside = hidden.rename(tmp_path / hidden.name)
    broken = install(tmp_path)
    assert broken.returncode == 1
    assert "No matching distribution found for cudnn" in broken.stdout
    assert broken.stderr.startswith("error: pip failed, its last lines are above")
    assert not (tmp_path / "venv" / ".installed").exists()

    aside.rename(hidden)
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    (site / "sglang" / "__init__.py").write_text("import gone", encoding="utf-8")
    broken = install(tmp_path)
    assert broken.returncode == 1
    assert "No module named 'gone'" in broken.stdout
    assert not (tmp_path / "venv" / ".installed").exists()

    (site / "sglang" / "__init__.py").write_text("", encoding="utf-8")
    assert install(tmp_path).returncode == 0
    assert (tmp_path / "venv" / ".installed").exists()
