"""Which recipe key was meant by one that there is not."""

from __future__ import annotations

import re

import pytest

from pipeline.config.meant_keys import ELSEWHERE, NOT_HERE, all_meant_by, known_keys, meant_by
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
critic: critic.model.path critic.optim.lr critic.megatron.seed algorithm.gamma algorithm.lam algo.advantage.gamma lambd
lora: actor_rollout_ref.model.lora.alpha ds.lora.rank policy.megatron_cfg.peft.dim trainer.model.lora.target_modules
deepspeed: actor_rollout_ref.actor.fsdp_config.seed ds.zero_stage zero_stage deepspeed fsdp fsdp_config
vllm: actor_rollout_ref.rollout.enforce_eager policy.generation.vllm_cfg.kv_cache_dtype vllm_enable_prefix_caching
vllm: actor_rollout_ref.rollout.max_num_batched_tokens inference.vllm.max_model_len policy.draft.model_name
ray: ray_kwargs.ray_init.num_cpus
image: data.image_key data.max_images actor_rollout_ref.model.vision multimodal_keys processor_path
tools: actor_rollout_ref.rollout.multi_turn.enable actor_rollout_ref.rollout.agent.num_workers agent_func_path tool_key
rm: reward_model.model.path reward_model.micro_batch_size reward_pretrain
entropy: entropy_coef actor_rollout_ref.actor.entropy_coeff actor.entropy_coef
colocate: actor_rollout_ref.actor.megatron.param_offload offload_train colocate train.colocate_all vllm.enable_sleep
ema: train.enable_ema ema_beta ptx_coef
profiler: global_profiler.steps actor_rollout_ref.actor.profiler.tool_config.npu.level profile_target
resume: trainer.resume_mode resume_from_checkpoint ckpt.load_enable
wandb: trainer.logger wandb_project report_to logger.wandb.name monitors.wandb.project use_tensorboard logging_steps
nnodes: trainer.nnodes trainer.n_gpus_per_node cluster.num_nodes actor_num_gpus_per_node deployment.num_train_gpus
do_sample: actor_rollout_ref.rollout.val_kwargs.do_sample min_p repetition_penalty policy.generation.stop_token_ids
shuffle: data.shuffle shuffle_dataset data.validation_shuffle
truncation: data.truncation
kl_ctrl: algorithm.kl_ctrl.kl_coef algorithm.use_kl_in_reward algorithm.kl_penalty loss_fn.use_kl_in_reward
learner.optimizer.lr: actor_rollout_ref.actor.optim.lr policy.optimizer.kwargs.lr trainer.optim.lr
learner.tensor_parallel: actor_rollout_ref.actor.megatron.tensor_model_parallel_size
learner.tensor_parallel: policy.dtensor_cfg.tensor_parallel_size
rollout.tensor_parallel: actor_rollout_ref.rollout.tensor_model_parallel_size
rollout.tensor_parallel: policy.generation.vllm_cfg.tensor_parallel_size
rollout.tensor_parallel: vllm.tensor_parallel_size inference.vllm.tensor_parallel_size vllm_tensor_parallel_size
evaluation.temperature: eval.temperature policy.generation.val_temperature
evaluation.temperature: actor_rollout_ref.rollout.val_kwargs.temperature
evaluation.every: eval.steps trainer.test_freq grpo.val_period orchestrator.eval.interval eval_interval
evaluation.samples: eval.n_samples_per_prompt evaluation.n_samples_per_prompt num_generations_eval
rollout.group_size: rollout.n_samples_per_prompt grpo.num_generations_per_prompt num_generations
rollout.prompts_per_batch: grpo.num_prompts_per_step data.train_batch_size rollout_batch_size orchestrator.batch_size
rollout.temperature: policy.generation.temperature actor_rollout_ref.rollout.temperature
reference.estimator: algo.kl.estimator actor_rollout_ref.actor.kl_loss_type
advantage.name: algo.advantage.estimator grpo.adv_estimator.name
correction.cap: algorithm.rollout_correction.rollout_is_threshold loss_fn.truncated_importance_sampling_ratio
run.seed: data.seed grpo.seed train.seed
-: log.level data.datagen.name
-: orchestrator.renderer.name actor_rollout_ref.rollout.prometheus.port data.return_full_prompt
-: data.input_template data.prompt_split loss_fn.kl_input_clamp_value log_unique_prompts distributed_timeout_minutes
"""
"""Keys of verl, TRL, slime, OpenRLHF, prime-rl and NeMo-RL, by what they are: here, not here (a word of NOT_HERE), or
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
