"""Version 0 is made before anything else of a run computes, so by every core of its host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend

from launch.build.components import TaskPrompts
from launch.run import preflight as begin
from launch.run.preflight import (
    check_folder,
    check_learner_here,
    check_room,
    preflight,
    seed_policy,
    start_warnings,
)
from megatron_bridge.hf import folders
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DiskFullError, MachineError, ModelError, RecipeError
from pipeline.tasks import build_task
from pipeline.tasks.mixture import order_of
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from precision.reference import ReferenceSection
from tests.support import quiet_megatron  # noqa: F401
from tests.support.runs import a_recipe, make_model, make_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    make_model(tmp_path / "model")
    return a_recipe(tmp_path, run=dict(steps=1), model=dict(path=str(tmp_path / "model")))


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("given", "used"), [(1, 3), (2, 2)])
def test_one_thread_is_what_a_learners_agent_was_given_and_another_number_is_the_users(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, given: int, used: int
) -> None:
    torch.set_num_threads(given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    run, write, seen = RunDirectory(recipe.directory), folders.write_policy, list[int]()
    run.freeze(recipe)

    def written(*arguments: object, **options: object) -> None:
        seen.append(torch.get_num_threads())
        write(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(folders, "write_policy", written)
    seed_policy(run, recipe)
    assert (seen, torch.get_num_threads()) == ([used], given)
    assert run.published_version() == 0


@pytest.mark.parametrize("of_sources", [False, True], ids=["one file", "a mixture"])
def test_evaluations_take_the_held_out_prompts_that_there_are_and_say_so(tmp_path: Path, of_sources: bool) -> None:
    """The defaults ask for 64; of 300 rows 1 in 16 is held out."""
    write_character_tokenizer(tmp_path / "model", "0123456789=+")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(300)), encoding="utf-8")
    data = dict(
        run=dict(name="r", root=str(tmp_path), steps=1),
        model=dict(path=str(tmp_path / "model")),
        task=dict(name="data", sources=[dict(path=str(rows))]) if of_sources else dict(name="data", path=str(rows)),
    )
    recipe = recipe_from(data, source="test")
    task = build_task(recipe.task, seed=0)
    tokenizer = Tokenizer.load(tmp_path / "model")
    prompts = TaskPrompts(task, tokenizer, order_of(task, 0))
    count = task.num_held_out
    assert 0 < count < recipe.evaluation.prompts == 64
    assert len(prompts.held_out(recipe.evaluation.prompts)) == count
    (told,) = [sentence for sentence in start_warnings(recipe, prompts) if "held-out" in sentence]
    assert told.startswith(f"evaluations ask all {count} held-out prompts, since there are no 64")
    rollout = recipe.rollout.model_copy(update=dict(prompts_per_batch=2 * task.num_prompts))
    (again,) = set(start_warnings(recipe.model_copy(update=dict(rollout=rollout)), prompts)) - set(
        start_warnings(recipe, prompts)
    )
    assert f"the task {task.num_prompts}: each is asked 2.0 times a batch" in again


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("Qwen/Qwen3-8B", r"reference\.path Qwen/Qwen3-8B is not a folder; .*`hf download Qwen/Qwen3-8B --local-dir"),
        ("empty", "empty has no config.json"),
        ("other", "does not hold the weights that its config.json describes"),
    ],
)
def test_a_wrong_reference_is_found_before_anything_starts(
    tmp_path: Path, recipe: Recipe, reference: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    make_model(tmp_path / "other", layers=1)
    folder = Path(reference) if "/" in reference else tmp_path / reference
    section = ReferenceSection(coefficient=0.1, path=folder)
    with pytest.raises(ModelError, match=said):
        preflight(recipe.model_copy(update=dict(reference=section)))


def test_a_weight_that_is_not_finite_ends_a_run_before_its_first_version(tmp_path: Path, recipe: Recipe) -> None:
    path = tmp_path / "model/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, path)
    run = RunDirectory(recipe.directory)
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds values that are not finite"):
        seed_policy(run, recipe)
    assert not run.is_published()


@pytest.mark.parametrize(("template", "seen", "told"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_special_tokens_that_a_template_writes_and_rewards_do_not_see_are_told(
    tmp_path: Path, template: bool, seen: bool, told: int
) -> None:
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    write_character_tokenizer(model, "0123456789=+")
    backend = Backend.from_file(str(model / "tokenizer.json"))
    backend.add_special_tokens(["<think>", "<|user|>"])
    backend.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text("<|user|>{{ messages[0].content }}<think>", encoding="utf-8")
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(64)), encoding="utf-8")
    data = dict(
        run=dict(name="r", root=str(tmp_path), steps=1),
        model=dict(path=str(model)),
        task=dict(name="data", path=str(rows), chat_template=template),
        reward=dict(special_tokens=seen),
    )
    recipe = recipe_from(data, source="test")
    task, tokenizer = build_task(recipe.task, seed=0), Tokenizer.load(model)
    found = start_warnings(recipe, TaskPrompts(task, tokenizer, order_of(task, 0)))
    assert sum(sentence.startswith("rewards do not see <think>, special tokens of") for sentence in found) == told


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("needs") / "model")


def recipe_of(folder: Path, model: Path, **sections: dict[str, object]) -> Recipe:
    from pipeline.config.loader import load_recipe

    return load_recipe(make_recipe(folder, model, "needs", **sections))


@pytest.mark.parametrize("precision", ["fp8_tensor", "fp8_block", "fp8_delayed"])
def test_fp8_in_hardware(tmp_path: Path, model: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, model, learner=dict(precision=precision))
    monkeypatch.setattr(begin, "has_cuda", lambda: False)
    with pytest.raises(MachineError, match=f"learner.precision is {precision}.*and this machine has none; use fp32"):
        check_learner_here(recipe)
    monkeypatch.setattr(begin, "has_cuda", lambda: True)
    monkeypatch.setattr("pipeline.importing.find_spec", lambda package: package != "transformer_engine" or None)
    with pytest.raises(MachineError, match=r"no Transformer Engine: pip install .*transformer-engine-cu13"):
        check_learner_here(recipe)


def test_settings_that_megatron_does_not_have_end_the_command(tmp_path: Path, model: Path) -> None:
    recipe = recipe_of(tmp_path, model, learner=dict(megatron=dict(ddp=dict(bucket_sizes=1))))
    with pytest.raises(RecipeError, match=r"learner.megatron.ddp.bucket_sizes: .*; did you mean bucket_size\?"):
        check_learner_here(recipe)


def test_a_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # who is root may write everywhere
    with pytest.raises(MachineError, match=f"this user may not write in {tmp_path}; set run.root to another"):
        check_folder(tmp_path / "runs/a", "run.root")


def test_a_disk_without_room_for_a_checkpoint(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, model)
    check_room(recipe)
    found = os.statvfs(tmp_path)
    full = os.statvfs_result((found.f_bsize, found.f_frsize, found.f_blocks, 0, 0, *tuple(found)[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(
        DiskFullError, match=r"too full for \d policies \(weights\.keep\) and \d check.* of run needs: it"
    ):
        check_room(recipe)
    (recipe.directory / "checkpoints/000002").mkdir(parents=True)
    (recipe.directory / "checkpoints/000002/COMMIT").touch()
    check_room(recipe)  # what it needs is there already; its own checkpoints ask again
