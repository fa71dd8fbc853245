"""Which GPUs of one machine each role has, and that too few are said before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.run import starter
from launch.run.starter import GpuPlaces, LocalStarter, gpu_places, units_of, visible_gpus
from pipeline.config.loader import load_recipe, recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import MachineError, RecipeError

EIGHT = tuple("01234567")
RECIPES = Path(__file__).parents[4] / "pipeline" / "recipes"


def a_recipe(
    root: Path, *, engines: int = 2, width: int = 2, channel: str = "disk", teacher: int = 0, **changes: Any
) -> Recipe:
    """The sizes of docs/coming-from.md: a learner of TP2 × DP2, and two engines of TP2."""
    data = dict(
        run=dict(name="r", root=str(root), steps=1),
        model=dict(path=str(root)),
        task=dict(name="sort_digits"),
        rollout=dict(engines=engines, tensor_parallel=width, **changes.pop("rollout", {})),
        learner=dict(tensor_parallel=2, data_parallel=2),
        weights=dict(channel=channel),
        **changes,
    )
    if teacher:
        data["distillation"] = dict(path=str(root / "teacher"), coefficient=1.0, tensor_parallel=teacher)
    return recipe_from(data, source="test")


@pytest.mark.parametrize("channel", ["disk", "delta", "broadcast"])
def test_learner_engines_and_teacher_have_gpus_of_their_own(tmp_path: Path, channel: str) -> None:
    assert gpu_places(a_recipe(tmp_path, channel=channel), EIGHT) == GpuPlaces(
        learner=("0", "1", "2", "3"), engines=(("4", "5"), ("6", "7"))
    )
    found = gpu_places(a_recipe(tmp_path, channel=channel, engines=3, width=1, teacher=1), EIGHT)
    assert found.engines == (("4",), ("5",), ("6",))
    assert found.collector == ("7",), "the collector starts the teacher"


def test_with_ipc_engines_lie_over_the_learner_and_see_its_gpus(tmp_path: Path) -> None:
    found = gpu_places(a_recipe(tmp_path, channel="ipc", teacher=2), EIGHT)
    assert found.learner == ("0", "1", "2", "3")
    assert found.engines == (("0", "1", "2", "3"), ("2", "3", "0", "1")), "own GPUs first"
    assert found.collector == ("4", "5")
    wider = gpu_places(a_recipe(tmp_path, channel="ipc", engines=3), EIGHT)
    assert [one[:2] for one in wider.engines] == [("0", "1"), ("2", "3"), ("4", "5")]
    assert all(set(one) >= set(wider.learner) for one in wider.engines)


def test_one_gpu_is_enough_for_the_recipe_that_shares_it() -> None:
    recipe = load_recipe(RECIPES / "one_gpu.yaml")
    assert gpu_places(recipe, ("0",)) == GpuPlaces(learner=("0",), engines=(("0",),))


@pytest.mark.parametrize(
    ("extra", "width"),
    [
        (["--pp-size", "2"], 4),
        (["--pp", "2", "--dp", "2"], 8),
        (["--data-parallel-size=2"], 4),
        (["--dp-size", "2", "--enable-dp-attention"], 2),
        (["--pipeline-parallel-size", "2", "--dp-size", "2"], 8),
    ],
)
def test_an_engine_of_several_pipelines_or_replicas_has_gpus_for_all(
    tmp_path: Path, extra: list[str], width: int
) -> None:
    gpus = tuple(map(str, range(4 + width)))
    found = gpu_places(a_recipe(tmp_path, engines=1, rollout=dict(extra_args=extra)), gpus)
    assert found.engines == (gpus[4:],)


def test_too_few_gpus_are_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(
        MachineError,
        match=r"^a learner × 4, 2 engines × 2, a teacher × 1 need 9 GPUs, and this machine has 4 "
        r"\(CUDA_VISIBLE_DEVICES is 0,1,2,3\); lower a size of the learner's layout or rollout\.engines, or start",
    ) as refused:
        gpu_places(a_recipe(tmp_path, teacher=1), EIGHT[:4])
    assert "\n" not in str(refused.value)
    with pytest.raises(MachineError, match=r"need 8 GPUs.* set weights\.channel=ipc where .* both fit"):
        gpu_places(a_recipe(tmp_path), EIGHT[:4])
    with pytest.raises(MachineError, match=r"need 6 GPUs \(weights\.channel ipc: .* share theirs\), and .* has 4"):
        gpu_places(a_recipe(tmp_path, engines=3, channel="ipc"), EIGHT[:4])


def test_a_recipe_that_places_its_engines_itself_is_refused(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, engines=1, rollout=dict(extra_args=["--base-gpu-id", "4"]))
    with pytest.raises(RecipeError, match=r"rollout\.extra_args has --base-gpu-id 4, but .* leave it out"):
        gpu_places(recipe, EIGHT)
    assert gpu_places(recipe, ()) == GpuPlaces(), "a CPU has nothing to give out"


@pytest.mark.parametrize(
    ("named", "count", "found"),
    [
        (None, 3, ("0", "1", "2")),
        ("5, 2", 2, ("5", "2")),
        ("GPU-aa,GPU-bb", 2, ("GPU-aa", "GPU-bb")),
        ("4,99,5", 1, ("4",)),
        ("", 0, ()),
        (None, 0, ()),
    ],
)
def test_gpus_are_those_that_the_user_lets_the_run_have(
    monkeypatch: pytest.MonkeyPatch, named: str | None, count: int, found: tuple[str, ...]
) -> None:
    monkeypatch.setattr(starter, "num_gpus", lambda: count)
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == found


def visible_to(recipe: Recipe, root: Path, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Unit → CUDA_VISIBLE_DEVICES of its newest start, when each is started twice."""
    seen: dict[str, Any] = {}

    def child(command: list[str], log: Path, environment: dict[str, str], **_: object) -> None:
        seen.setdefault(log.name, []).append(environment.get("CUDA_VISIBLE_DEVICES"))

    monkeypatch.setattr(starter, "_Child", child)
    local = LocalStarter(RunDirectory(root), recipe, "key", gpus=gpus)
    for unit in units_of(recipe) * 2:
        local.start(unit, root / unit.name)
    again = {name: second for name, (first, second) in seen.items() if first == second}
    assert len(again) == len(seen), "a role is started again where it was"
    return again


def test_a_started_role_sees_its_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0,9")
    gpus = ("7", "6", "5", "4", "3", "2", "1", "0", "9")
    everything = ",".join(gpus)
    recipe = a_recipe(tmp_path)
    assert visible_to(recipe, tmp_path, gpus, monkeypatch) == {
        "learner": "7,6,5,4",
        "engine-0": "3,2",
        "engine-1": "1,0",
        "router": everything,
        "collector": everything,
    }
    taught = visible_to(a_recipe(tmp_path, teacher=1), tmp_path, gpus, monkeypatch)
    assert taught["collector"] == "9"
