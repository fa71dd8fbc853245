"""What a recipe says to the chat template by name reaches every text that is made with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.build.components import build_prompts, build_tokenizer
from launch.convert.new_model import new_model
from launch.run.sft import Source, read_source
from pipeline.config.recipe import Recipe
from pipeline.config.task_sections import DataTask

TEMPLATE = (  # as Qwen3 does
    "{% for m in messages %}{{ m.role }}:{{ 'none;' if m.role == 'assistant' and enable_thinking is false }}"
    "{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}none;{% endif %}{% endif %}"
)


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    new_model(model, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows.write_text("".join(f'{{"prompt": "{n}", "response": "7", "answer": "7"}}\n' for n in range(64)))
    return dict(
        run=dict(name="own", root=str(tmp_path), steps=1),
        model=dict(path=str(model)),
        task=dict(name="data", path=str(rows), reward="match", chat_template=True),
        rollout=dict(precision="fp32", max_new_tokens=8, context_tokens=64),
        learner=dict(precision="fp32"),
    )


def with_arguments(recipe: dict[str, Any], **arguments: Any) -> Recipe:
    return Recipe.model_validate({**recipe, "task": {**recipe["task"], "template_arguments": arguments}})


@pytest.mark.parametrize(
    ("arguments", "opening"), [({}, ""), (dict(enable_thinking=True), ""), (dict(enable_thinking=False), "none;")]
)
def test_prompts_evaluations_and_demonstrations_get_them(
    recipe: dict[str, Any], arguments: dict[str, Any], opening: str
) -> None:
    found = with_arguments(recipe, **arguments)
    tokenizer = build_tokenizer(found)
    prompts = build_prompts(found, tokenizer)
    for prompt in (prompts.prompt(0), *prompts.held_out(1)):
        assert tokenizer.decode(prompt.tokens) == f"user:{prompt.text};assistant:{opening}"
    source = Source(batch_size=1, data=Path(recipe["task"]["path"]))
    assert read_source(found, source, tokenizer)[0].first == f"user:0;assistant:{opening}»7;«"


@pytest.mark.parametrize(
    ("arguments", "more", "said"),
    [
        (dict(enable_thinking=False), dict(chat_template=False), "set task.chat_template to true"),
        (dict(messages="x"), {}, r"template_arguments\.messages is given to each chat template anyway"),
        (dict(bos_token="x"), {}, r"template_arguments\.bos_token is given to each chat template anyway"),
        (dict(tone=["dry"]), {}, "template_arguments"),
    ],
)
def test_what_is_no_argument_is_refused(
    recipe: dict[str, Any], arguments: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        DataTask.model_validate({**recipe["task"], **more, "template_arguments": arguments})
