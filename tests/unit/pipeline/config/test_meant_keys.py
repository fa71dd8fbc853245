"""Which recipe key was meant by one that there is not."""

from __future__ import annotations

import re

import pytest

from pipeline.config.meant_keys import all_meant_by, known_keys, meant_by, other_words
from pipeline.config.recipe import Recipe

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


def test_no_word_of_another_trainer_is_a_key_here() -> None:
    """It would be named although the user's key was right, but in a wrong section."""
    leaves = {key.rpartition(".")[2] for key in known_keys()}
    assert leaves & (ELSEWHERE.keys() | NOT_HERE.keys()) <= {"gamma"}  # FADE's, and a critic's for all others
    assert not ELSEWHERE.keys() & NOT_HERE.keys()


OTHERS = """
critic: critic.model.path algo.advantage.gamma lambd
lora: actor_rollout_ref.model.lora.alpha policy.megatron_cfg.peft.dim
deepspeed: ds.zero_stage fsdp_config
vllm: actor_rollout_ref.rollout.enforce_eager vllm_enable_prefix_caching
wandb: trainer.logger report_to use_tensorboard
nnodes: trainer.nnodes cluster.num_nodes actor_num_gpus_per_node
learner.tensor_parallel: policy.dtensor_cfg.tensor_parallel_size actor.megatron.tensor_model_parallel_size
evaluation.samples: evaluation.n_samples_per_prompt num_generations_eval
rollout.group_size: actor_rollout_ref.rollout.n grpo.num_generations_per_prompt
-: log.level data.input_template distributed_timeout_minutes
"""
"""Keys of verl, TRL, slime, OpenRLHF, prime-rl and NeMo-RL, by what they are: here, not here (a word of `not_here`), or
none that is like one here (-)."""


@pytest.mark.parametrize("line", OTHERS.strip().splitlines(), ids=lambda line: line.partition(":")[0])
def test_keys_of_others_lead_to_what_is_the_same_and_to_nothing_else(line: str) -> None:
    place, _, words = line.partition(": ")
    here = "`evenkeel recipe --schema` lists the known ones" if place == "-" else f"here it is {place}"
    said = NOT_HERE.get(place, here)
    assert {word: meant_by(word) for word in words.split() if meant_by(word) != said} == {}


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
    assert all_meant_by("critic", dict(model=dict(path="x"), optim=dict(lr=1e-6))) == [f"critic; {NOT_HERE['critic']}"]
    assert all_meant_by("data", {}) == ["data; `evenkeel recipe --schema` lists the known ones"]
