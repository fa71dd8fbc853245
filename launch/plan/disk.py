"""Estimate the disk that a run takes: what grows with its steps, with and without retention, and what does not.

Columns of a batch are compressed (pipeline.data.zarr_zip). Measured on 2¹⁸ values, zstd at level 1 leaves of an id, of
vocabularies of 32 to 151,936 tokens, log2(vocabulary) / 8 + .3 to .6 bytes where all are equally frequent, + .04 to .5
by Zipf's law; 3.7 of a log-probability; log2(experts) / 8 of an expert's number; next to nothing of versions and masks,
and of tokens that an episode was given, whose log-probability is 0. Repeated prompts and tokens of probability 1 take
less.
"""

from __future__ import annotations

import math
from typing import Any

from launch.build.components import build_scoring
from launch.build.sizes import checkpoint_bytes
from launch.plan.costs import Assumptions
from megatron_bridge.hf.model_config import ModelConfig
from pipeline.config.recipe import Recipe

ID_BYTES, FLOAT_BYTES = 0.4, 3.7
"""Left by zstd of a token's id, beside log2(vocabulary) / 8, and of a log-probability."""
SCORE_BYTES = 4
"""Of a log-probability in logprobs/, which is not compressed."""
RECORD_BYTES = 24
"""Of a group in the record of a removed batch: its number, its problem's number and counts."""


def disk_use(config: ModelConfig, recipe: Recipe, assumed: Assumptions, policy_bytes: float) -> dict[str, Any]:
    """Return gigabytes of each kind of file, and the terabytes of the whole run: with the recipe's keys
    (`terabytes`) and with all batches and log-probabilities kept (`all_terabytes`). Not in it: logs and pages,
    evaluations, what an engine keeps on its host, and the sets that rollout.kept_set records."""
    rollout, run, schedule = recipe.rollout, recipe.run, recipe.build_schedule()
    samples = rollout.prompts_per_batch * rollout.group_size
    sampled, tokens = samples * assumed.mean_response_tokens, samples * assumed.mean_tokens
    responses = sampled + samples * assumed.mean_observed_tokens  # from the first sampled token to the last
    columns = dict(tokens=tokens * (math.log2(config.vocab_size) / 8 + ID_BYTES), logprobs=sampled * FLOAT_BYTES)
    if rollout.replay_experts and config.experts is not None:
        each = config.experts.per_token * math.log2(config.experts.count) / 8
        columns["experts"] = tokens * config.num_layers * each
    if recipe.distillation is not None:
        columns["teacher_logprobs"] = responses * FLOAT_BYTES
    batch = sum(columns.values())
    scores = responses * SCORE_BYTES * (2 if schedule.kind == "staged" and build_scoring(recipe).reads_old else 1)
    checkpoint = checkpoint_bytes(config, recipe)
    fixed = (
        (recipe.checkpoint.keep + 1) * checkpoint
        + (recipe.weights.keep + 2) * policy_bytes
        + config.num_parameters * recipe.learner.parameter_bytes
    )

    def kept(keep: int | None) -> int:
        """Count the batches that are there at the most: the next checkpoint lets the oldest go."""
        if keep is None:
            return run.steps
        behind = max(keep, (recipe.checkpoint.keep - 1) * recipe.checkpoint.every)
        return min(run.steps, behind + recipe.checkpoint.every + schedule.batches_in_flight)

    batches = kept(run.keep_batches)
    scored = min(batches, kept(run.keep_logprobs))
    records = (run.steps - batches) * rollout.prompts_per_batch * RECORD_BYTES
    return dict(
        steps=run.steps,
        batch_gigabytes=batch / 1e9,
        columns={name: size / 1e9 for name, size in columns.items()},
        logprobs_gigabytes=scores / 1e9,
        batches_kept=batches,
        logprobs_kept=scored,
        checkpoint_gigabytes=checkpoint / 1e9,
        checkpoints_kept=recipe.checkpoint.keep,
        policy_gigabytes=policy_bytes / 1e9,
        policies_kept=recipe.weights.keep + 1,
        fixed_terabytes=fixed / 1e12,
        terabytes=(fixed + batches * batch + scored * scores + records) / 1e12,
        all_terabytes=(fixed + run.steps * (batch + scores)) / 1e12,
    )
