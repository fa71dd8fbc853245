"""`evenkeel launch kubernetes`: the objects pass the API server's checks, and the same recipe gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launch.schedulers.kubernetes.render import read
from pipeline.errors import RecipeError
from tests.support.manifests.cases import LEARNER_IMAGE, ROLLOUT_IMAGE, rendered, run_of
from tests.support.runs import evenkeel

EXAMPLE = Path(__file__).parents[4] / "ops/examples/kubernetes-qwen3-32b"


def test_the_example_is_what_the_command_writes(tmp_path: Path) -> None:
    """After a change:  evenkeel launch kubernetes, as ops/examples/README.md says."""
    options = ["--queue", "train", "--learner-image", LEARNER_IMAGE, "--rollout-image", ROLLOUT_IMAGE]
    evenkeel("launch", "kubernetes", "qwen3_32b", "--out", tmp_path, *options)
    written, example = (
        {str(path.relative_to(folder)): path.read_text("utf-8") for path in folder.rglob("*.yaml")}
        for folder in (tmp_path, EXAMPLE)
    )
    assert written == example


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Also those that are named as a rendering's are, and hold anything."""
    command = ["launch", "kubernetes", "qwen3_32b", "--out", str(tmp_path)]
    command += ["--learner-image", LEARNER_IMAGE, "--rollout-image", ROLLOUT_IMAGE]
    notes = tmp_path / "90-notes.yaml"
    notes.write_bytes(b"\xff")
    evenkeel(*command)
    assert notes.read_bytes() == b"\xff"
    assert "90-notes.yaml" not in (tmp_path / "kustomization.yaml").read_text(), "kubectl does not take it"
    evenkeel(*command)  # over the run's own files
    engines = tmp_path / "50-engines.yaml"
    for content in (b"a: 1\n", b"- 1\n", b"\xff"):
        engines.write_bytes(content)
        with pytest.raises(RecipeError, match=r"50-engines.yaml"):
            read(tmp_path, rendered(), run_of().name)
        assert evenkeel(*command).returncode == 1
        assert engines.read_bytes() == content
    engines.unlink()
    with pytest.raises(RecipeError, match=r"is not of this run .*evenkeel/run: other.* another --out"):
        read(tmp_path, rendered(), "other")


@pytest.mark.parametrize(
    ("render", "message"),
    [
        (
            lambda: rendered(learner_image="evenkeel/learner:1"),
            "--learner-image is 'evenkeel/learner:1', expected NAME@sha",
        ),
        (lambda: rendered(gpu_gib=24.0), "does not fit 64 GPUs of 24 GiB"),
        (lambda: rendered(gpu_gib=float("inf")), "--gpu-gib is inf, expected a number from"),
        (lambda: rendered(disk_gb_s=float("inf")), "--disk-gb-s is inf, expected a number from"),
        (lambda: rendered(gpus_per_node=6), "no multiple of --gpus-per-node 6"),
        (lambda: rendered("weights.channel=ipc"), "use --set weights.channel=broadcast"),
        (lambda: rendered("rollout.engines=1", "rollout.urls=[http://e:1]"), "rollout.urls names engines that exist"),
        (lambda: rendered("run.name=32b"), "Kubernetes wants a letter first"),
        (lambda: rendered(pvc="mine", storage_class="a"), "leave out --storage-class"),
        (lambda: rendered(rdma="hca:8"), "expected RESOURCE=COUNT"),
    ],
)
def test_what_cannot_work_is_refused(render: Callable[[], object], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        render()
    assert "\n" not in str(refused.value)


def test_arguments_that_train_refuses_are_refused_before_a_file_is_written(tmp_path: Path) -> None:
    options = ["--learner-image", LEARNER_IMAGE, "--rollout-image", ROLLOUT_IMAGE, "--set"]
    given = "rollout.extra_args=[--hos=0.0.0.0]"
    refused = evenkeel("launch", "kubernetes", "qwen3_32b", "--out", tmp_path / "files", *options, given)
    assert (refused.returncode, "rollout.extra_args has --hos, short for --host" in refused.stderr) == (1, True)
    assert not (tmp_path / "files").exists()
