"""The recipe of a run that fine-tunes: the recipe's model and learner, and the schedule of the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.run.sft import Source, batch_of, read_recipe, sft_recipe
from megatron_bridge.step.optimizer import learning_rate
from pipeline.analysis.run_log import SFT_FILE
from pipeline.config.loader import load_recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.demonstrations import Form, read_demonstrations
from pipeline.errors import RecipeError, RunConflictError, StoreError
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.support.batches import CONTRACT
from tests.support.written_runs import write_run


def rates(*overrides: str) -> list[float]:
    recipe = sft_recipe(load_recipe(Path("demo"), overrides), steps=300, lr=1e-5, warmup_steps=50)
    return [learning_rate(step, recipe.learner.optimizer, recipe.run.steps) for step in range(300)]


def test_the_rate_falls_linearly_to_zero_over_the_run_whatever_the_recipe_says() -> None:
    plain = rates()
    assert max(plain) == plain[49] == plain[50] == 1e-5
    assert plain[-1] == 0.0 < plain[-2]
    assert plain[174] == pytest.approx(0.5e-5, rel=0.01)
    keys = ("decay_steps=40", "decay=cosine", "min_lr=1e-6", "warmup_steps=7")
    assert rates(*(f"learner.optimizer.{key}" for key in keys)) == plain


def test_a_staged_recipe_may_have_fewer_steps_than_a_stage(tmp_path: Path) -> None:
    recipe = sft_recipe(load_recipe(Path("mu_grpo"), [f"run.root={tmp_path}"]), steps=20, lr=1e-5, warmup_steps=5)
    run = RunDirectory(recipe.directory)
    assert run.freeze(recipe) == run.recipe() == recipe
    assert run.path.name == "mu-grpo-sft"


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("learner.optimizer.lr=1e-4", "give --lr"),
        ("learner.optimizer.warmup_steps=3", "give --warmup-steps"),
        ("run.steps=4", "give --steps"),
        ("learner.optimizer.decay=cosine", "falls linearly to zero; leave it out"),
        ("learner.optimizer.min_lr=0.1", "falls linearly to zero; leave it out"),
        ("learner.optimizer.decay_steps=7", "falls linearly to zero; leave it out"),
        ("learner.optimizer={weight_decay: 0.1, lr: 1.0e-4}", "give --lr"),
        ("learner={optimizer: {lr: 1.0e-4}}", "give --lr"),
    ],
)
def test_a_key_that_would_be_dropped_is_refused(override: str, instead: str) -> None:
    with pytest.raises(RecipeError, match=f"does not go by it; .*{instead}"):
        read_recipe(Path("demo"), [override], 20, None)


def test_with_data_a_recipe_needs_neither_steps_nor_a_path(tmp_path: Path) -> None:
    recipe, rows = tmp_path / "tune.yaml", tmp_path / "rows.jsonl"
    for task in ("", "task: {name: data}\n", f"task: {{name: data, path: {rows}}}\n"):
        recipe.write_text("run: {name: tune}\nmodel: {path: model}\n" + task)
        found = read_recipe(recipe, [], 30, rows)
        assert (found.run.steps, found.task.model_dump()["path"]) == (30, rows)
    recipe.write_text("run: {name: tune}\nmodel: {path: model}\ntask: {name: sort_digits}\n")
    assert read_recipe(recipe, [], 30, rows).task.name == "sort_digits"
    recipe.write_text("run: {name: tune}\nmodel: {path: model}\ntask: {name: data}\n")
    with pytest.raises(RecipeError, match=r"task\.path"):
        read_recipe(recipe, [], 30, None)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (20, 5), (60, 15), (220, 50), (5000, 50)])
def test_the_warm_up_of_a_short_run_is_a_part_of_it(steps: int, warmup: int) -> None:
    recipe = sft_recipe(load_recipe(Path("demo")), steps=steps, lr=1e-5, warmup_steps=None)
    assert recipe.learner.optimizer.warmup_steps == warmup


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(write_run(tmp_path, 0))


def rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text('{"prompt": "1=", "response": "1"}\n')
    return path


def test_another_source_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    Source.of(8, None, None).freeze(run)
    Source.of(8, None, None).freeze(run)
    with pytest.raises(RunConflictError, match="was begun with batch_size 8, got 16"):
        Source.of(16, None, None).freeze(run)
    with pytest.raises(RunConflictError, match=r"was begun with data None, got .*rows\.jsonl"):
        Source.of(8, rows(tmp_path), None).freeze(run)


@pytest.mark.parametrize("text", ["", "{", '{"batch_size": 8, "of_tomorrow": 1}', '{"batch_size": "many"}'])
def test_a_damaged_file_is_one_line(run: RunDirectory, text: str) -> None:
    (run.path / SFT_FILE).write_text(text)
    with pytest.raises(StoreError, match=r"sft\.json does not name the run's data; put back a copy"):
        Source.of(8, None, None).freeze(run)


def test_a_batch_holds_the_tokens_of_its_rows_and_what_is_learned(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, "0123456789=")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    said = [
        (("user", "12="), ("assistant", "3"), ("user", "4="), ("assistant", "56")),
        (("user", "="), ("assistant", "7")),
    ]
    rows = [dict(messages=[dict(role=role, content=content) for role, content in row]) for row in said]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = Tokenizer.load(tmp_path)
    form = Form(tokenizer=tokenizer, chat_template=False, system_prompt=None)
    batch = batch_of(3, read_demonstrations(tmp_path / "rows.jsonl", form, longest=20).rows, CONTRACT)
    assert batch.tokens.tolist() == tokenizer.encode("12=34=56" + "=7")
    assert batch.sample_offsets.tolist() == [0, 8, 10]
    assert batch.prompt_lengths.tolist() == [3, 1]
    assert batch.loss_mask.tolist() == [True, False, False, True, True, True]
