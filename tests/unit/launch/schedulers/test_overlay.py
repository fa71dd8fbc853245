"""The overlay of docs/cluster.md: what it adds is there after every rendering, and an API server takes the result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from tests.support.manifests.cases import documents, rendered
from tests.support.manifests.schemas import problems
from tests.support.pages import blocks
from tests.support.runs import ROOT

[TEXT] = [text for text in blocks(ROOT / "docs/cluster.md", "yaml") if "kind: Kustomization" in text]
OVERLAY = yaml.safe_load(TEXT)


def patched(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As kustomize applies patches of JSON 6902; the page's only add."""
    result = copy.deepcopy(objects)
    for patch in OVERLAY["patches"]:
        targets = [one for one in result if one["kind"] == patch["target"]["kind"]]
        assert targets
        for one in targets:
            for operation in yaml.safe_load(patch["patch"]):
                assert operation["op"] == "add"
                *way, last = [step.replace("~1", "/") for step in operation["path"].split("/")[1:]]
                part: Any = one
                for step in way:
                    part = part[int(step)] if isinstance(part, list) else part[step]
                if isinstance(part, list):
                    assert last == "-"
                    part.append(operation["value"])
                else:
                    assert last not in part, f"{operation['path']} would replace what is rendered"
                    part[last] = operation["value"]
    return result


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ((), {}),
        (("rollout.engines=1",), dict(queue="train", run_as="5021")),
        (("rollout.engines=7", "learner.optimizer.lr=2.0e-6"), dict(restart="jobset", rdma="rdma/hca=8")),
    ],
)
def test_what_the_page_adds_is_there_after_every_rendering(overrides: tuple[str, ...], options: dict[str, Any]) -> None:
    found = patched(documents(rendered(*overrides, **options)))
    assert [(one["kind"], text) for one in found for text in problems(one)] == []
    job_set = next(one for one in found if one["kind"] == "JobSet")
    templates = {job["name"]: job["template"]["spec"]["template"] for job in job_set["spec"]["replicatedJobs"]}
    names = {role: [one["name"] for one in pod["spec"]["containers"][0]["env"]] for role, pod in templates.items()}
    assert [role for role in templates if "NCCL_IB_HCA" in names[role]] == ["learner", "engine"]
    assert {"JUDGE_API_KEY", "EVENKEEL_TEACHER_API_KEY_FILE", "EVENKEEL_API_KEY_FILE"} <= {*names["collector"]}
    learner, collector = templates["learner"], templates["collector"]
    assert learner["spec"]["nodeSelector"] == {"node.example/pool": "h100"}
    assert [one["key"] for one in learner["spec"]["tolerations"]] == ["nvidia.com/gpu", "dedicated"]
    assert learner["spec"]["priorityClassName"] == "training"
    assert learner["metadata"]["annotations"]
    (mount,) = (one for one in collector["spec"]["containers"][0]["volumeMounts"] if one["name"] == "teacher-key")
    assert f"{mount['mountPath']}/api-key" in {one.get("value") for one in collector["spec"]["containers"][0]["env"]}
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "research"
