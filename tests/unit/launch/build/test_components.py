"""What only shows when recipe and tokenizer meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.build.components import (
    TaskPrompts,
    build_interruption,
    build_prompts,
    require_engines_here,
)
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError
from pipeline.rollout.group_sampler import Interruption
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Token 0 pads, 1 ends, 2 to 11 are the digits, 12 is `=`."""
    write_character_tokenizer(tmp_path, "0123456789=")
    return Tokenizer.load(tmp_path)


def recipe(*, max_new_tokens: int = 22, interruption: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    rollout = dict(max_new_tokens=max_new_tokens, interruption=interruption)
    data = dict(
        run=dict(name="r", steps=2, seed=7), model=dict(path="m"), task=dict(name="sort_digits"), rollout=rollout
    )
    return recipe_from({**data, **sections}, source="test")


def cut(**changes: Any) -> dict[str, Any]:
    return dict(from_tokens=4, to_tokens=8, phrase="=12=", answer_tokens=10) | changes


def test_interruption_speaks_in_tokens(tokenizer: Tokenizer) -> None:
    assert build_interruption(recipe(), tokenizer) is None
    assert build_interruption(recipe(interruption=cut()), tokenizer) == Interruption(
        from_tokens=4, to_tokens=8, phrase=(12, 3, 4, 12), answer_tokens=10, seed=7
    )


def test_interruption_must_fit(tokenizer: Tokenizer) -> None:
    """8 + 4 + 10 = 22 tokens fit into 22, not into 21; a phrase of one more token does not fit into 22."""
    with pytest.raises(RecipeError, match=r"8 \+ 4 tokens of the phrase \+ answer_tokens 10 = 22, at most .* 21 fit"):
        build_interruption(recipe(max_new_tokens=21, interruption=cut()), tokenizer)
    with pytest.raises(RecipeError, match=r"= 23, at most rollout.max_new_tokens 22 fit"):
        build_prompts(recipe(interruption=cut(phrase="=123=")), tokenizer)


def test_a_phrase_that_the_tokenizer_does_not_know(tokenizer: Tokenizer) -> None:
    with pytest.raises(RecipeError, match=r"rollout.interruption.phrase: .*character 'O' has no token"):
        build_interruption(recipe(interruption=cut(phrase="Okay")), tokenizer)


def test_prompts_name_their_problems(tokenizer: Tokenizer) -> None:
    prompts = build_prompts(recipe(task=dict(name="sort_digits", num_prompts=5)), tokenizer)
    assert prompts.num_problems == 5
    assert sorted(prompts.prompt(group).problem for group in range(5)) == [0, 1, 2, 3, 4]
    again = {prompts.problem(group): prompts.prompt(group).text for group in range(5, 10)}
    assert again == {prompts.problem(group): prompts.prompt(group).text for group in range(5)}
    assert {prompt.problem for prompt in prompts.held_out(3)} == {-1}


def test_prompts_of_data_that_do_not_fit_are_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """64 tokens less 22 of the answer leave 42."""
    lengths = [3, 42, 43, 100] * 20
    lines = [json.dumps(dict(prompt=f"{number:0{length}}", answer=1)) for number, length in enumerate(lengths)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    room = dict(max_new_tokens=22, context_tokens=64)
    prompts = build_prompts(recipe(task=dict(name="data", path=tmp_path / "p.jsonl"), rollout=room), tokenizer)
    found = [prompts.prompt(group) for group in range(prompts.num_problems)]
    found += prompts.held_out(prompts.task.num_held_out)
    assert sorted(len(prompt.tokens) for prompt in found) == [3] * 20 + [42] * 20
    assert "40 of 80 prompts have more than 42 tokens" in prompts.task.notes[0]


def test_a_prompt_that_the_chat_template_leaves_out_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Rows of ShareGPT call the user human; the model would be asked nothing."""
    known = "{% for m in messages if m.role == 'user' %}{{ m.content }}={% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(known)
    data = dict(name="data", path=tmp_path / "p.jsonl", chat_template=True)

    def prompts(role: str) -> TaskPrompts:
        rows = [dict(prompt=[dict(role=role, content=f"{number}")], answer=1) for number in range(80)]
        (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return build_prompts(recipe(task=data), tokenizer)

    assert len(prompts("user").prompt(0).tokens) in (2, 3)
    with pytest.raises(
        RecipeError, match=r"the prompt '\d+': the chat template leaves out message 1, .* is 'human'; use"
    ):
        prompts("human")


def test_only_engines_of_this_machine_can_open_memory() -> None:
    require_engines_here(["http://127.0.0.1:30000", "http://localhost:30001"])
    away = "http://192.0.2.7:30001"  # an address that is nobody's (RFC 5737)
    with pytest.raises(RecipeError, match=rf"weights.channel is ipc, but {away} is not on this machine"):
        require_engines_here(["http://127.0.0.1:30000", away])
