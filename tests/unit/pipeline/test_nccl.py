"""NCCL's releases: what a process has loaded, what is installed, and which go together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.nccl import loaded_release, mismatch

LIBRARY = "int ncclGetVersion(int *version) { *version = 23007; return 0; }"


def test_the_loaded_library_is_asked_not_the_release_that_torch_was_compiled_with(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-x", "c", "-", "-o", str(library)],
        input=LIBRARY.encode(),
        check=True,
        timeout=60,
    )
    code = (
        f"import ctypes; from pipeline import nccl; print(repr(nccl.loaded_release())); ctypes.CDLL({str(library)!r})"
    )
    said = subprocess.run(
        [sys.executable, "-c", f"{code}; print(nccl.loaded_release())"], capture_output=True, text=True, timeout=60
    )
    assert said.stdout.split() == ["''", "2.30.7"], said.stderr


def test_a_torch_for_cpus_has_none() -> None:
    import torch

    if torch.version.cuda is None:
        assert loaded_release() == ""


@pytest.mark.parametrize(
    ("learner", "engines", "fit"),
    [("2.28.9", "2.30.7", False), ("2.30.7", "2.30.4", False), ("2.30.7", "2.30.7", True), ("", "2.30.7", True)],
)
def test_releases_are_equal_or_one_is_unknown(learner: str, engines: str, fit: bool) -> None:
    assert (mismatch(learner, engines) == "") == fit
    if not fit:
        assert f"NCCL {engines} in the engines' torch and {learner} in the learner's" in mismatch(learner, engines)
