"""Llama's tokenizer puts a token in front of a text by itself: plain prompts are read without, which is said, and the
chat template of docs/model.md writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from launch.build.components import build_prompts, build_tokenizer
from launch.convert.new_model import new_model
from launch.run.preflight import start_warnings
from launch.run.sft import Source, look_at
from pipeline.config.recipe import Recipe
from pipeline.tasks.tokenizer import PAD_TOKEN
from tests.support.pages import ROOT

BEGIN = PAD_TOKEN  # a special token at hand
(LINE,) = [line.strip(" `") for line in (ROOT / "docs/model.md").read_text().splitlines() if "{{ bos_token }}" in line]


def recipe_of(folder: Path, *, begins: bool = True, before: str = "", **task: Any) -> Recipe:
    """`begins`: the tokenizer is of Llama's kind; `before`: what stands in front of each prompt of the data."""
    model, rows = folder / "model", folder / "rows.jsonl"
    new_model(model, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64)
    if begins:
        backend = Backend.from_file(str(model / "tokenizer.json"))
        backend.post_processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
        backend.save(str(model / "tokenizer.json"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | dict(bos_token=BEGIN)))
    (model / "chat_template.jinja").write_text(LINE)
    lines = [dict(prompt=f"{before}{n}", response="7", answer="7") for n in range(64)]
    rows.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return Recipe.model_validate(
        dict(
            run=dict(name="own", root=str(folder), steps=1),
            model=dict(path=str(model)),
            task=dict(name="data", path=str(rows), reward="match", **task),
            rollout=dict(precision="fp32", max_new_tokens=8, context_tokens=64),
            learner=dict(precision="fp32"),
        )
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, True), (dict(begins=False), False), (dict(before=BEGIN), False), (dict(chat_template=True), False)],
)
def test_it_is_said_where_the_token_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], said: bool
) -> None:
    recipe = recipe_of(tmp_path, **settings)
    prompts = build_prompts(recipe, build_tokenizer(recipe))
    assert sum(f"read without {BEGIN}, which" in sentence for sentence in start_warnings(recipe, prompts)) == said
    look_at(recipe, Source(batch_size=1, data=tmp_path / "rows.jsonl"))
    assert (f"warning: prompts are read without {BEGIN}, which" in capsys.readouterr().err) == said
