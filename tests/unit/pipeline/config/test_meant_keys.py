"""Which recipe key was meant by one that there is not."""

from __future__ import annotations

import re

import pytest

from pipeline.config.meant_keys import ELSEWHERE, IN_THEIR_SECTION, NO_KEY, all_meant_by, known_keys, meant_by
from pipeline.config.recipe import Recipe


@pytest.mark.parametrize(
    ("unknown", "said"),
    [
        ("rollout.max_new_token", "did you mean rollout.max_new_tokens?"),
        ("lerner", "did you mean learner?"),
        ("steps", "did you mean run.steps?"),
        ("every", "did you mean checkpoint.every or evaluation.every?"),
        ("learner.lr", "did you mean learner.optimizer.lr?"),
        ("learner.optimizer.learning_rate", "here it is learner.optimizer.lr"),
        ("num_generations", "here it is rollout.group_size"),
        ("schedule.lag", "only schedule async has it; choose that, or leave the key out"),
        ("actor_rollout_ref.rollout.n", "here it is rollout.group_size"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "here it is evaluation.samples"),
        ("actor_rollout_ref.rollout.temperature", "here it is rollout.temperature"),
        ("actor_rollout_ref.model.path", "here it is model.path"),
        ("reward.path", "`evenkeel recipe --schema` lists the known ones"),
        ("name", "`evenkeel recipe --schema` lists the known ones"),
        ("trainer.logger", NO_KEY["logger"]),
        ("controller.x", "`evenkeel recipe --schema` lists the known ones"),
        ("\x1b" * 100_000, "`evenkeel recipe --schema` lists the known ones"),
    ],
)
def test_what_is_said_of_a_key(unknown: str, said: str) -> None:
    assert meant_by(unknown) == said


def test_where_other_trainers_words_lead_there_is_a_key() -> None:
    for keys in (*ELSEWHERE.values(), *IN_THEIR_SECTION.values()):
        assert set(re.findall(r"[a-z_]+\.[a-z_.]+", keys) or [keys]) <= known_keys().keys()


def test_no_word_of_another_trainer_is_a_key_here() -> None:
    """It would be named although the user's key was right, but in a wrong section."""
    leaves = {key.rpartition(".")[2] for key in known_keys()}
    assert not leaves & (ELSEWHERE.keys() | NO_KEY.keys())
    assert not ELSEWHERE.keys() & NO_KEY.keys()


@pytest.mark.parametrize("section", ["run", "model", "rollout", "learner", "checkpoint", "evaluation"])
def test_every_everyday_key_is_described(section: str) -> None:
    definitions = Recipe.model_json_schema()["$defs"]

    def undescribed(name: str) -> list[str]:
        keys = definitions[name]["properties"].items()
        inner = [part["$ref"].rpartition("/")[2] for _, part in keys if "$ref" in part]
        bare = [f"{name}.{key}" for key, part in keys if "$ref" not in part and not part.get("description")]
        return bare + [one for other in inner for one in undescribed(other)]

    assert undescribed(f"{section.capitalize()}Section") == []


def test_a_section_of_another_trainer_is_answered_by_its_keys() -> None:
    theirs = dict(train_batch_size=8, max_prompt_length=9)
    assert all_meant_by("data", theirs) == [
        "data.train_batch_size; here it is rollout.prompts_per_batch",
        "data.max_prompt_length; here it is rollout.context_tokens",
    ]
    assert all_meant_by("lerner", dict(micro_batch_tokens=8)) == ["lerner; did you mean learner?"]
    assert all_meant_by("data", {}) == ["data; `evenkeel recipe --schema` lists the known ones"]
