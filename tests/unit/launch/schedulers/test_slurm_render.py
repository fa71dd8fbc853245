"""`evenkeel launch slurm`: the files, byte for byte, what differs between two of them, and what is refused."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.schedulers.slurm import srun
from launch.schedulers.slurm.command import submitted
from launch.schedulers.slurm.render import SlurmOptions, render
from pipeline.config.loader import load_recipe
from pipeline.errors import RecipeError
from tests.support.runs import ROOT, evenkeel

GOLDEN = ROOT / "tests/golden/slurm"
FOLDER = Path("/shared/jobs/qwen")
OPTIONS: dict[str, Any] = dict(
    workdir=Path("/shared/team"),
    python="/shared/venv/bin/python",
    time="24:00:00",
    grace=1410,
    partition="h100",
    account="research",
)


def files(*overrides: str, **options: Any) -> dict[str, str]:
    return render(load_recipe(Path("qwen3_32b"), overrides), SlurmOptions(**OPTIONS | options), FOLDER)


def test_the_script_for_32b() -> None:
    """What a user gets; a change shows its difference here."""
    assert files()["job.sbatch"] == (GOLDEN / "job.sbatch").read_text()


CONTAINER: dict[str, Any] = dict(container_image="registry#learner", key_dir="/shared/keys")
SETS = ("run.root=/shared/runs", "model.path=/models/qwen", "task.path=/shared/math.jsonl")


@pytest.mark.parametrize(
    ("mounts", "message"),
    [
        (None, r"--out is /shared/jobs/qwen, which containers do not see: it is in no mount of .*\(none\)"),
        ("/shared:/shared", r"model.path is /models/qwen, .* add /models/qwen:/models/qwen, or a folder above it"),
        ("/lustre:/shared,/models", r"--out is /shared/jobs/qwen, .* another folder there \(/lustre:/shared\)"),
        ("/shared,/models,/tmp:/shared/keys", r"--key-dir is /shared/keys, .* another folder there"),
        ("/shared/jobs:/shared/jobs,/shared/keys,/shared/runs,/models", "--workdir is /shared/team"),
        ("/shared:/shared:rw,/data/models:/models:ro", None),
        ("/shared,/models", None),
    ],
)
def test_what_containers_do_not_see_is_refused_before_the_queue(mounts: str | None, message: str | None) -> None:
    if message is None:
        assert f"--container-mounts {mounts}" in files(*SETS, **CONTAINER, container_mounts=mounts)["job.sbatch"]
        return
    with pytest.raises(RecipeError, match=message):
        files(*SETS, **CONTAINER, container_mounts=mounts)
    assert files(*SETS, container_mounts=mounts), "without an image nothing is hidden"


@pytest.mark.parametrize("option", ["--array=1-4", "--arr=1-4", "--ar=0", "-a1-4"])
def test_an_array_is_refused(option: str) -> None:
    with pytest.raises(RecipeError, match="all tasks of an array would train the same run"):
        files(sbatch=(option,))
    assert files(sbatch=("--account=a", "--acctg-freq=30"))


def test_a_module_of_the_users_hides_none_of_ours(tmp_path: Path) -> None:
    """In the folder where the job begins."""
    (tmp_path / "pipeline.py").write_text("raise SystemExit('shadowed')")
    script = files(python=sys.executable)["job.sbatch"]
    program = shlex.split(script.partition("\nexec ")[2].replace("\\\n", ""))[:4]
    done = subprocess.run([*program, "--help"], cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert (done.returncode, "--gpus-per-node" in done.stdout) == (0, True), done.stderr


def test_the_notice_of_the_time_limit_follows_from_the_speed_of_the_disk(tmp_path: Path) -> None:
    """Unless the user says how long the notice is."""

    def notice(*options: object) -> int:
        done = evenkeel("launch", "slurm", "qwen3_32b", "--out", tmp_path, *options)
        assert done.returncode == 0, done.stderr
        found = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", (tmp_path / "job.sbatch").read_text(), re.MULTILINE)
        assert found
        return int(found[1])

    whole, half, quarter = notice(), notice("--disk-gb-s", 1), notice("--disk-gb-s", 0.5)
    assert quarter - half == pytest.approx(2 * (half - whole), abs=40)
    assert half > whole
    assert notice("--grace", 900) == 900
    refused = evenkeel("launch", "slurm", "qwen3_32b", "--out", tmp_path, "--disk-gb-s", 0)
    assert (refused.returncode, "--disk-gb-s is 0.0, expected a number from" in refused.stderr) == (1, True)


def test_arguments_that_train_refuses_are_refused_before_a_file_is_written(tmp_path: Path) -> None:
    given = "rollout.extra_args=[--admin-api-key, opensesame]"
    refused = evenkeel("launch", "slurm", "qwen3_32b", "--out", tmp_path / "job", "--set", given)
    assert (refused.returncode, "rollout.extra_args has --admin-api-key" in refused.stderr) == (1, True)
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(time="a day"), "--time is 'a day', expected Slurm's form"),
        (dict(spare=-1), "--spare -1"),
        (dict(partition="h100 --oops"), "--partition is 'h100 --oops'; use no space"),
        (dict(sbatch=("--comment=$(id)",)), "use no space, quote"),
    ],
)
def test_options_that_slurm_would_misread_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        files(**options)


def test_a_slurm_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "sbatch"
    fake.write_text("#!/bin/bash\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(srun, "DEADLINE_S", 0.5)
    with pytest.raises(RecipeError, match=r"^sbatch job did not answer within 0\.5 s.*squeue --me") as no:
        submitted(Path("job"))
    assert "\n" not in str(no.value)


def test_the_environment_that_slurm_stores_has_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "sbatch"
    fake.write_text(f"#!/bin/bash\nenv > {tmp_path}/stored\necho Submitted batch job 7\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("EVENKEEL_API_KEY", "a-key-that-nobody-may-see")
    done = evenkeel("launch", "slurm", "qwen3_32b", "--out", tmp_path / "job", "--submit")
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 7\n")
    assert "a-key-that-nobody-may-see" not in (tmp_path / "stored").read_text()


def test_kernels_compiled_in_containers_are_kept_on_the_shared_file_system() -> None:
    image = dict(container_image="a.sqsh", container_mounts="/shared:/shared", key_dir="/shared/key")
    kept = 'export EVENKEEL_KERNEL_CACHE="${EVENKEEL_KERNEL_CACHE:-/shared/team/.cache/evenkeel/kernels}"\n'
    assert kept in files("model.path=/shared/m", "task.path=/shared/d.jsonl", **image)["job.sbatch"]
    assert "KERNEL_CACHE" not in files()["job.sbatch"], "without containers the user's home lasts"
