"""What a tokenizer must be for its model, and a prompt for an engine, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.build.components import build_prompts, build_tokenizer
from launch.convert.new_model import new_model
from pipeline.config.recipe import Recipe
from pipeline.errors import FatalError, ModelError, RecipeError
from pipeline.tasks.tokenizer import write_character_tokenizer


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    new_model(model, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64)
    rows.write_text("".join(f'{{"prompt": "{n}", "answer": "7"}}\n' for n in range(64)))
    return dict(
        run=dict(name="own", root=str(tmp_path), steps=1),
        model=dict(path=str(model)),
        task=dict(name="data", path=str(rows), reward="match"),
        rollout=dict(precision="fp32", max_new_tokens=8, context_tokens=64),
        learner=dict(precision="fp32"),
    )


def of(recipe: dict[str, Any], **sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({name: value | sections.get(name, {}) for name, value in recipe.items()})


def edit(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | keys), encoding="utf-8")


@pytest.mark.parametrize(
    ("tokens", "rows", "refused"), [(60, 64, False), (60, 76, True), (151_669, 151_936, False), (14, 151_936, True)]
)
def test_fewer_tokens_than_padding_explains(
    recipe: dict[str, Any], tokens: int, rows: int, refused: bool, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    write_character_tokenizer(
        model, "".join(chr(0x4E00 + n) if n < 20_000 else chr(0x20000 + n) for n in range(tokens - 2))
    )
    edit(model / "config.json", vocab_size=rows)
    assert build_tokenizer(of(recipe, model=dict(check_tokenizer=False))).vocab_size == tokens
    if not refused:
        assert build_tokenizer(of(recipe)).vocab_size == tokens
        return
    with pytest.raises(
        ModelError, match=rf"has {tokens} tokens, and the model {rows} rows.*model\.check_tokenizer=false"
    ):
        build_tokenizer(of(recipe))


def test_another_end_than_the_configs(recipe: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "model"
    end = build_tokenizer(of(recipe)).eos_token_id
    edit(model / "config.json", eos_token_id=[end + 1, end + 2])
    (model / "generation_config.json").unlink()
    with pytest.raises(
        ModelError, match=rf"token {end}, but .* name {end + 1}, {end + 2}.*model\.check_tokenizer=false"
    ):
        build_tokenizer(of(recipe))
    assert build_tokenizer(of(recipe, model=dict(check_tokenizer=False))).eos_token_id == end
    (model / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[end])))
    assert build_tokenizer(of(recipe)).eos_token_id == end  # servers stop at it


def test_a_prompt_without_tokens_is_refused_with_its_row(recipe: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "model"
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "63"}, "content": ""}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        RecipeError, match=r"rows\.jsonl, line 64: the tokenizer makes no token of '63'.*remove the row"
    ):
        build_prompts(of(recipe), build_tokenizer(of(recipe)))


@pytest.mark.parametrize("guarded", [True, False])
def test_a_template_writes_the_day_of_the_recipe(recipe: dict[str, Any], tmp_path: Path, guarded: bool) -> None:
    day = "{{ strftime_now('%d%m') }}"
    written = f"{{% if strftime_now is defined %}}{day}{{% else %}}0{{% endif %}}" if guarded else day
    (tmp_path / "model/chat_template.jinja").write_text(written + "={{ messages[0].content }}")
    dated = of(recipe, task=dict(chat_template=True, template_date="2025-01-31"))
    assert Recipe.model_validate(dated.model_dump(mode="json")) == dated
    tokenizer = build_tokenizer(dated)
    assert tokenizer.decode(build_prompts(dated, tokenizer).prompt(0).tokens).startswith("3101=")
    plain = of(recipe, task=dict(chat_template=True))
    if guarded:
        assert tokenizer.decode(build_prompts(plain, build_tokenizer(plain)).prompt(0).tokens).startswith("0=")
        return
    with pytest.raises(FatalError, match=r"strftime_now.*task\.template_date=2025-01-31") as caught:
        build_prompts(plain, build_tokenizer(plain))
    assert "chat_template=false" not in str(caught.value)
