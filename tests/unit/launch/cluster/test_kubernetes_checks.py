"""What is caught before Kubernetes would: mistakes of every kind, a typo in any field, and changes that it refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.cluster.kubernetes.checks.everything import check
from launch.cluster.kubernetes.checks.jobs import EXPECTED, outcome
from launch.cluster.kubernetes.checks.pods import size_bytes
from launch.cluster.kubernetes.command import kubernetes
from launch.cluster.kubernetes.render import render
from launch.plan.planner import Machine, make_plan
from pipeline.errors import RecipeError
from tests.support.manifests.cases import LEARNER_IMAGE, ROLLOUT_IMAGE, documents, rendered, run_of
from tests.support.manifests.mutations import MUTATIONS, container, job, pod, printed, table
from tests.support.manifests.schemas import problems

FREE = ("labels", "matchLabels", "selector", "data", "requests", "limits", "annotations")
"""Maps whose keys are the user's."""


@pytest.mark.parametrize(
    "options",
    [{}, dict(engines="leaderworkerset"), dict(rdma="rdma/hca=8", queue="train", pvc="mine", monitors=False)],
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
    assert list(check(found, run, found)) == []
    assert [text for one in found for text in problems(one, old=one)] == []


@pytest.mark.parametrize("precision", ["fp8_block", "bf16"])
def test_engines_have_room_for_a_replica(precision: str) -> None:
    """Twice the published weights on their node's disk, beside what other temporary files may take."""

    def engine_of(channel: str) -> tuple[float, float]:
        override = f"weights.channel={channel}", f"rollout.precision={precision}"
        run = run_of(*override)
        found = documents(render(run))
        assert list(check(found, run)) == []
        tmp = next(one for one in pod(found, "engine")["volumes"] if one["name"] == "tmp")
        asked = container(found, "engine")["resources"]["requests"].get("ephemeral-storage", "0")
        return size_bytes(tmp["emptyDir"]["sizeLimit"]), size_bytes(asked)

    plan = make_plan(
        Path("qwen3_32b"), ["weights.channel=delta", f"rollout.precision={precision}"], Machine(gpus=64, gpu_gib=80), {}
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
    run = run_of("task.chat_template=true", override)
    found = [text for text in check(documents(render(run)), run) if "secret" in text]
    assert bool(found) == refused


def test_every_mistake_is_caught() -> None:
    """`pytest -s` shows who caught what."""
    rows = list(table())
    print("\n" + printed(rows))
    assert len(rows) >= 50
    assert [mutation.name for mutation, found in rows if not found] == []
    silent = [
        mutation.name
        for mutation, found in rows
        if not any(mutation.says in text for said in found.values() for text in said)
    ]
    assert silent == []
    assert {catcher for _, found in rows for catcher in found} == {"schema", "CEL", "ours"}
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def fields(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all fields that have a schema."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield (*path, key)
            if key not in FREE or path[-1:] == ("spec",):
                yield from fields(value, (*path, key))
    elif isinstance(part, list):
        for place, value in enumerate(part):
            yield from fields(value, (*path, place))


@pytest.mark.parametrize("engines", ["jobset", pytest.param("leaderworkerset", marks=pytest.mark.slow)])
def test_a_typo_in_any_field_is_caught_by_the_schema(engines: str) -> None:
    tried, missed = set(), []
    for one in documents(rendered(engines=engines, queue="train", rdma="rdma/hca=8")):
        for path in fields(one):
            general = (one["kind"], *("*" if isinstance(step, int) else step for step in path))
            if general in tried or (one["kind"] in ("Service",) and "selector" in path[:-1]):
                continue
            tried.add(general)
            broken = copy.deepcopy(one)
            holder = broken
            for step in path[:-1]:
                holder = holder[step]
            holder[f"{path[-1]}x"] = holder.pop(path[-1])
            if not problems(broken):
                missed.append(general)
    assert missed == []
    assert len(tried) > 150


@pytest.mark.parametrize("role", ["learner", "collector", "router", "engine"])
def test_what_becomes_of_a_pod_follows_its_exit_status(role: str) -> None:
    found = documents(rendered())
    job_set = next(one for one in found if one["kind"] == "JobSet")
    assert {cause: outcome(job(found, role), job_set["spec"], cause) for cause in EXPECTED} == EXPECTED


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


def test_a_name_that_pods_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"63 are allowed; shorten run\.name"):
        command(tmp_path, f"run.name={'q' * 50}")
    assert list(tmp_path.iterdir()) == []
