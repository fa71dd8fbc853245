"""Where the chat template of a base model ends answers by a token at which no server stops, `train` says so, and what
`sft` makes of it is a model whose servers do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.build.components import build_prompts, build_tokenizer
from launch.convert.new_model import new_model
from launch.run.preflight import start_warnings
from launch.run.sft import Source, learn_demonstrations, sft_recipe
from megatron_bridge.parallel.layout import leave_layout
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.tasks.tokenizer import END_TOKEN, PAD_TOKEN, Tokenizer
from tests.support import quiet_megatron  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '=' if m.role == 'user' else 'CLOSING' }}{% endfor %}"


def recipe_of(folder: Path, closing: str, *, chat_template: bool = True) -> Recipe:
    """Of a new model whose template ends answers so."""
    model, rows = folder / "base", folder / "rows.jsonl"
    new_model(model, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64)
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("CLOSING", closing))
    rows.write_text("".join(f'{{"prompt": "{n}", "response": "7", "answer": "7"}}\n' for n in range(64)))
    return Recipe.model_validate(
        dict(
            run=dict(name="own", root=str(folder), steps=1),
            model=dict(path=str(model)),
            task=dict(name="data", path=str(rows), reward="match", chat_template=chat_template),
            rollout=dict(precision="fp32", max_new_tokens=8, context_tokens=24),
            learner=dict(precision="fp32", micro_batch_tokens=512),
        )
    )


def exported(folder: Path, recipe: Recipe) -> dict[str, object]:
    """generation_config.json of what one step of sft leaves."""
    recipe = sft_recipe(recipe, 1, 1e-3, 0)
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    Source.of(8, folder / "rows.jsonl", None).freeze(run)
    try:
        learn_demonstrations(run, folder / "tuned")
    finally:
        leave_layout()
    found = json.loads((folder / "tuned/generation_config.json").read_text())
    assert isinstance(found, dict)
    return found


def test_servers_of_a_tuned_base_model_stop_where_its_answers_end(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, PAD_TOKEN)
    ids = Tokenizer.load(recipe.model.path).encode(END_TOKEN + PAD_TOKEN)
    before = json.loads((recipe.model.path / "generation_config.json").read_text())
    assert exported(tmp_path, recipe) == before | dict(eos_token_id=ids)


@pytest.mark.parametrize(
    ("closing", "chat_template", "said"), [(PAD_TOKEN, True, True), (PAD_TOKEN, False, False), (END_TOKEN, True, False)]
)
def test_training_says_where_engines_do_not_stop(tmp_path: Path, closing: str, chat_template: bool, said: bool) -> None:
    recipe = recipe_of(tmp_path, closing, chat_template=chat_template)
    prompts = build_prompts(recipe, build_tokenizer(recipe))
    found = [one for one in start_warnings(recipe, prompts) if "engines do not stop" in one]
    assert len(found) == said
    if said:
        assert f"ends an answer by {PAD_TOKEN}" in found[0]
        assert "eos_token_id is a list then, with 0 in it" in found[0]
