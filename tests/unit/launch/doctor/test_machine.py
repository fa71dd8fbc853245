from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch.doctor import machine as doctor
from launch.doctor.machine import GIB, Check, diagnose, report
from rollout_sglang.server.rollout_python import PYTHON_VARIABLE


@pytest.mark.slow
def test_this_machine_is_diagnosed_completely(tmp_path: Path) -> None:
    checks = {check.name: check for check in diagnose(tmp_path)}
    assert {
        "python",
        "glibc",
        "locale",
        "cpus",
        "memory",
        "disk",
        "shared memory",
        "exclusive creation",
        "loopback",
    } <= set(checks)
    assert {"numpy", "pydantic", "zarr", "megatron-core", "sglang", "math-verify"} <= set(checks)
    assert checks["python"].status == checks["exclusive creation"].status == checks["loopback"].status == "ok"
    assert checks["numpy"].status == "ok"
    assert all(check.advice for check in checks.values() if check.status != "ok")


@pytest.mark.parametrize(
    ("requirement", "extra", "status", "found"),
    [
        ("pytest>=1", "", "ok", None),
        ("pytest>=9999", "", "fail", None),
        ("pytest>=9999", "learner", "warn", None),
        ("no-such-package-here>=1", "", "fail", "not installed"),
        ("no-such-package-here>=1", "rollout", "warn", "not installed"),
    ],
)
def test_packages(requirement: str, extra: str, status: str, found: str | None) -> None:
    check = doctor.check_package(Requirement(requirement), extra)
    assert check.status == status
    assert found is None or check.found == found
    if status == "fail":
        assert check.advice == f"pip install '{requirement}'"


def test_an_installed_package_that_cannot_be_imported_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metadata is in order, and a library of it is missing; or it ends the interpreter."""
    for name, source in (
        ("no_library", "import ctypes; ctypes.CDLL('libgone.so.9')"),
        ("deadly", "import os; os._exit(3)"),
    ):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    requires = ["deadly>=1", 'no_library>=1; extra == "learner"', "numpy>=1"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requires)
    checks = {check.name: check for check in doctor.check_packages()}
    assert {name: check.status for name, check in checks.items()} == {
        "deadly": "fail",
        "no_library": "fail",
        "numpy": "ok",
    }
    assert "status 3" in checks["deadly"].found
    assert "libgone.so.9: cannot open shared object file" in checks["no_library"].found


def test_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    there = {tmp_path: usage(0, 0, GIB // 2), tmp_path.parent: usage(32 * 2**20, 0, 0)}
    monkeypatch.setattr(shutil, "disk_usage", there.__getitem__)
    _, _, disk, shared = doctor.check_room(tmp_path / "runs" / "deep", tmp_path.parent)
    assert (disk.status, shared.status) == ("fail", "warn")
    assert doctor.check_room(tmp_path, tmp_path / "none")[-1].status == "fail"


def test_a_file_system_that_creates_one_file_twice_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_exclusive_creation(tmp_path).status == "ok"
    monkeypatch.setattr(os, "link", lambda source, target: None)
    check = doctor.check_exclusive_creation(tmp_path)
    assert (check.status, check.found) == ("fail", f"{tmp_path} creates one file twice")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "status", "found"),
    [("2.11.0", "ok", "2.11.0"), ("2.12.0", "warn", "2.12.0"), (None, "warn", "of unknown version")],
)
def test_transformer_engine_must_be_one_that_megatron_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, status: str, found: str
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "_version", lambda name: version)
    check = doctor.check_gpus(tmp_path)[1]
    assert (check.status, check.found) == (status, found)
    if version == "2.12.0":
        assert check.advice.startswith("megatron-core asks for <2.12.0,>=2.9.0")


@pytest.mark.parametrize(("release", "status", "learns"), [("2.28", "fail", True), ("2.34", "ok", False)])
def test_an_engine_needs_a_newer_glibc_than_a_learner(
    monkeypatch: pytest.MonkeyPatch, release: str, status: str, learns: bool
) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", release))
    [check] = [one for one in doctor.check_interpreter() if one.name == "glibc"]
    assert (check.status, check.found) == (status, release)
    assert ("a learner alone runs here" in check.advice) == learns


def test_two_releases_of_nccl_are_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, release in (("learner", "2.28.9"), ("rollout", "2.30.7")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {release}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "learner"))
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    assert doctor.check_nccl() == [Check("nccl", "ok", "2.28.9")]
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "rollout"))
    [check] = doctor.check_nccl()
    assert (check.status, check.found) == ("warn", "2.28.9, of engines 2.30.7")
    assert "nvidia-nccl-cu13==2.30.7" in check.advice


@pytest.mark.parametrize(
    ("limit", "capabilities", "status", "found"),
    [
        (resource.RLIM_INFINITY, "0000000000000000", "ok", "unlimited"),
        (8 * 2**20, "0000000000000000", "warn", "8 MiB"),
        (65536, "00000000a80425fb", "warn", "0.0625 MiB"),  # root in a container, as docker starts it
        (65536, "000001ffffffffff", "ok", "0.0625 MiB, and the capability to lock more"),
    ],
)
def test_where_rdma_devices_are_memory_may_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, capabilities: str, status: str, found: str
) -> None:
    """With a few MiB NCCL fails to register its buffers with the devices."""
    (tmp_path / "status").write_text(f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    assert doctor.check_locked_memory(tmp_path, tmp_path / "status") == [], "no RDMA device, nothing to lock for"
    (tmp_path / "infiniband").mkdir()
    (check,) = doctor.check_locked_memory(tmp_path, tmp_path / "status")
    assert (check.status, check.found) == (status, found)
    assert bool(check.advice) == (status != "ok")


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_and_json(capsys: pytest.CaptureFixture[str], status: doctor.Status, code: int) -> None:
    check = Check("thing", status, "found [this]", "do [that]")
    assert report([check], as_json=True) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is (code == 0)
    assert printed["checks"][0] == {"name": "thing", "status": status, "found": "found [this]", "advice": "do [that]"}
    report([check], as_json=False)
    table = capsys.readouterr().out
    assert "found [this]" in table
    assert "do [that]" in table
