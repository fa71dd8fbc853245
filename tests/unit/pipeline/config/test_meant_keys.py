"""Which recipe key was meant by one that there is not."""

from __future__ import annotations

import re

import pytest

from pipeline.config.meant_keys import known_keys, meant_by, other_words

ELSEWHERE, NOT_HERE = other_words()


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
        ("reward.path", "`evenkeel recipe --schema` lists the known ones"),
        ("name", "`evenkeel recipe --schema` lists the known ones"),
        ("trainer.logger", NOT_HERE["logger"]),
        ("evaluation.n", "here it is evaluation.samples"),
        ("evaluation.group_size", "group_size is a key of rollout"),
        ("rollout.tensor_parallel_size", "here it is rollout.tensor_parallel"),
        ("task.columns.promt", "did you mean task.columns.prompt?"),
        ("lerner.micro_batch_tokens", "did you mean learner.micro_batch_tokens?"),
        ("controller.x", "`evenkeel recipe --schema` lists the known ones"),
        ("\x1b" * 100_000, "`evenkeel recipe --schema` lists the known ones"),
    ],
)
def test_what_is_said_of_a_key(unknown: str, said: str) -> None:
    assert meant_by(unknown) == said


def test_where_other_trainers_words_lead_there_is_a_key() -> None:
    for keys in ELSEWHERE.values():
        assert set(re.findall(r"[a-z_]+\.[a-z0-9_.]+", keys) or [keys]) <= known_keys().keys()
