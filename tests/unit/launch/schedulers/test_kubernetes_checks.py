"""What is caught before Kubernetes would: names that it does not allow, secrets, and changes that it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from launch.plan.planner import make_plan
from launch.schedulers.kubernetes.command import kubernetes
from launch.schedulers.kubernetes.render import check_changes, render
from pipeline.errors import RecipeError
from tests.support.manifests.cases import LEARNER_IMAGE, ROLLOUT_IMAGE, documents, rendered, run_of
from tests.support.manifests.outcomes import EXPECTED, outcome
from tests.support.manifests.schemas import problems


@pytest.mark.parametrize(
    "options",
    [
        dict(monitors=True, download="Qwen/Qwen3-32B@main"),
        dict(engines="leaderworkerset", restart="jobset"),
        dict(rdma="rdma/hca=8", queue="train", pvc="mine", run_as="5021:500"),
    ],
)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("rollout.engines=2", "rollout.tensor_parallel=16", "rollout.precision=bf16"),
        ("rollout.engines=1",),
        ("weights.channel=disk",),
    ],
)
def test_what_is_rendered_passes(overrides: tuple[str, ...], options: dict[str, Any]) -> None:
    run = run_of(*overrides, **options)
    found = documents(render(run))
    assert list(check_changes(found, found)) == []
    assert [text for one in found for text in problems(one, old=one)] == []


@pytest.mark.parametrize("precision", ["fp8_block", "bf16"])
def test_engines_have_room_for_a_replica(precision: str) -> None:
    """Twice the published weights on their node's disk, beside what other temporary files may take."""

    def engine_of(channel: str) -> tuple[float, float]:
        override = f"weights.channel={channel}", f"rollout.precision={precision}"
        run = run_of(*override)
        found = documents(render(run))
        engine = pod(found, "engine")
        tmp = next(one for one in engine["volumes"] if one["name"] == "tmp")
        asked = engine["containers"][0]["resources"]["requests"].get("ephemeral-storage", "0Mi")
        return tuple(int(size.removesuffix("Mi")) * 2**20 for size in (tmp["emptyDir"]["sizeLimit"], asked))  # type: ignore[return-value]

    plan = make_plan(
        Path("qwen3_32b"), ["weights.channel=delta", f"rollout.precision={precision}"], {}, gpus=64, gpu_gib=80
    )
    replica = plan["publish"]["replica_gigabytes"] * 1e9
    usual, none = engine_of("broadcast")
    with_replica, asked = engine_of("delta")
    assert none == 0.0
    assert with_replica - usual == asked == pytest.approx(replica, rel=1e-3)


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ('task.system_prompt="Never tell the password: it is secret to all."', False),
        ("rollout.extra_args=[--api-key, opensesame]", True),
        ("rollout.extra_args=[--admin-api-key, opensesame]", True),
        ("rollout.extra_args=[--api-k=opensesame]", True),
        ("rollout.extra_args=[--ssl-keyfile-password, opensesame]", True),
        ("rollout.extra_args=[--tokenizer-path, /shared/tokenizer, --ssl-keyfile, /shared/key.pem]", False),
    ],
)
def test_prose_may_speak_of_secrets_and_arguments_may_not_give_them(override: str, refused: bool) -> None:
    if not refused:
        run_of("task.chat_template=true", override)
        return
    with pytest.raises(RecipeError, match=r"extra_args of the recipe looks as if it held a secret, .* ConfigMap"):
        run_of(override)


@pytest.mark.parametrize("restart", ["job", "jobset"])
@pytest.mark.parametrize("role", ["learner", "collector", "router", "engine"])
def test_what_becomes_of_a_pod_follows_its_exit_status(role: str, restart: str) -> None:
    """Without JobSet's alpha gate, a Job that fails starts all of the run again. What fails for good does in both."""
    found = documents(rendered(restart=restart))
    job_set = next(one for one in found if one["kind"] == "JobSet")["spec"]
    found_outcomes = {cause: outcome(job(found, role), job_set, cause) for cause in EXPECTED}
    actions = {rule["action"] for rule in job_set["failurePolicy"]["rules"]}
    assert any(action.startswith("RestartJob") and "JobSet" not in action for action in actions) == (restart == "job")
    assert {cause: text.removesuffix(", with all others") for cause, text in found_outcomes.items()} == EXPECTED
    assert found_outcomes[1].endswith("others") == (restart == "jobset")
    alone = role in ("collector", "router", "engine")
    assert found_outcomes["DisruptionTarget"].endswith("others") == (restart == "jobset" and not alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pvc="My_PVC"), "--pvc is 'My_PVC'"),
        (dict(storage_class="A B"), "--storage-class is 'A B'"),
        (dict(queue="-train"), "--queue is '-train'"),
        (dict(gpu_resource="gpu gpu"), "--gpu-resource is 'gpu gpu', expected NAME or DOMAIN/NAME"),
        (dict(rdma="RDMA/h ca=8"), "--rdma is"),
        (dict(namespace="A"), "--namespace: String should match"),
        (dict(learner_image="a b@sha256:" + "1" * 64), "expected the name of an image, without spaces"),
        (dict(rollout_image="", allow_tags=True), "--rollout-image is ''"),
        (dict(run_as="0"), "--run-as is '0', expected UID or UID:GID"),
        (dict(run_as="me"), "--run-as is 'me'"),
        (dict(run_as="1000:0"), "--run-as is '1000:0'"),
        (dict(download="Qwen3"), "--download: String should match"),
    ],
)
def test_names_that_kubernetes_would_refuse_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)) as refused:
        run_of(**options)
    assert "\n" not in str(refused.value)


def job(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    job_set = next(one for one in objects if one["kind"] == "JobSet")
    found: dict[str, Any] = next(one for one in job_set["spec"]["replicatedJobs"] if one["name"] == role)
    return found


def pod(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    found: dict[str, Any] = job(objects, role)["template"]["spec"]["template"]["spec"]
    return found


def test_pods_of_any_user_are_as_restricted_as_namespaces_demand() -> None:
    """Also with RDMA: a capability is worth nothing to who is not root, and hardened namespaces refuse such pods."""
    found = documents(rendered(rdma="rdma/hca=8", run_as="5021:500", download="Qwen/Qwen3-32B"))
    pods = [pod(found, role) for role in ("learner", "collector", "router", "engine")]
    pods += [one["spec"]["template"]["spec"] for one in found if one["kind"] == "Job"]
    assert len(pods) == 5
    for one in pods:
        security, (container,) = one["securityContext"], one["containers"]
        users = [security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")]
        assert (users, security["runAsNonRoot"]) == ([5021, 500, 500], True)
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


def command(out: Path, *overrides: str, replace: bool = False) -> None:
    images = dict(learner_image=LEARNER_IMAGE, rollout_image=ROLLOUT_IMAGE)
    kubernetes(Path("qwen3_32b"), out, **images, overrides=list(overrides), replace=replace)  # type: ignore[arg-type]


def test_a_rendering_that_a_cluster_would_refuse_is_not_written(tmp_path: Path) -> None:
    command(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    command(tmp_path)
    with pytest.raises(RecipeError, match=r"JobSet qwen3-32b: spec.replicatedJobs\S+ cannot be changed"):
        command(tmp_path, "rollout.engines=7")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    command(tmp_path, "rollout.engines=7", replace=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} != before
