"""Which recipe key was meant by one that there is not."""

from __future__ import annotations

import re

import pytest

from pipeline.config.meant_keys import ELSEWHERE, known_keys, meant_by
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
        ("controller.x", "`evenkeel recipe --schema` lists the known ones"),
        ("\x1b" * 100_000, "`evenkeel recipe --schema` lists the known ones"),
    ],
)
def test_what_is_said_of_a_key(unknown: str, said: str) -> None:
    assert meant_by(unknown) == said


def test_where_other_trainers_words_lead_there_is_a_key() -> None:
    for keys in ELSEWHERE.values():
        assert set(re.findall(r"[a-z_]+\.[a-z_.]+", keys) or [keys]) <= known_keys().keys()


def test_no_word_of_another_trainer_is_a_key_here() -> None:
    """It would be named although the user's key was right, but in a wrong section."""
    leaves = {key.rpartition(".")[2] for key in known_keys()}
    assert not leaves & ELSEWHERE.keys()


@pytest.mark.parametrize("section", ["run", "model", "rollout", "learner", "checkpoint", "evaluation"])
def test_every_everyday_key_is_described(section: str) -> None:
    definitions = Recipe.model_json_schema()["$defs"]

    def undescribed(name: str) -> list[str]:
        keys = definitions[name]["properties"].items()
        inner = [part["$ref"].rpartition("/")[2] for _, part in keys if "$ref" in part]
        bare = [f"{name}.{key}" for key, part in keys if "$ref" not in part and not part.get("description")]
        return bare + [one for other in inner for one in undescribed(other)]

    assert undescribed(f"{section.capitalize()}Section") == []
