"""Which recipe keys a later start of a run may change, and why the others may not.

One table. A key is ruled by its own entry, or by that of the section that it stands in; a test walks every key of the
recipe, so that a new one is not forgotten. A run without a batch may change everything (pipeline.resume.resume).
"""

from __future__ import annotations

from pipeline.config.loader import changed_keys
from pipeline.config.recipe import Recipe
from pipeline.errors import RunConflictError
from precision.text import listed

SAFE = None
"""Changes what a run costs, how long it waits or where it ends; not what is learned from a batch."""
_SAMPLED = "batches before and after it would be sampled differently"
_ORDER = "prompts are asked in an order that it decides, and some would be asked twice or never"
_LEARNED = "the weights so far were learned with the old value"
_OPTIMIZER = "the optimizer's state was gathered with the old value"
_MEASURED = "points of one curve would be measured differently"
_LEDGER = "which prompts are passed over is derived again from all batches"

RULES: dict[str, str | None] = {
    "run.name": "it names the directory",
    "run.root": SAFE,
    "run.seed": _ORDER,
    "run.steps": SAFE,
    "run.wait_deadline_s": SAFE,
    "run.max_restarts": SAFE,
    "model.path": _LEARNED,
    "model.fp32_lm_head": _LEARNED,
    "model.check_tokenizer": SAFE,
    "task": _ORDER,
    "reward.workers": SAFE,
    "reward.concurrency": SAFE,
    "reward.retries": SAFE,
    "reward.deadline_s": SAFE,
    "reward.overlong": _LEARNED,
    "reward.math_tolerance": _LEARNED,
    "reward.program_tolerance": _LEARNED,
    "reward.solved_at": _MEASURED,
    "reward.special_tokens": _LEARNED,
    "reward.sandbox": "reward code goes on in the sandbox that it began in",
    "reward.memory_mib": SAFE,
    "reward.max_failed_share": SAFE,
    "rollout.engines": SAFE,
    "rollout.tensor_parallel": SAFE,
    "rollout.precision": "the policies that are published are in the old format",
    "rollout.quant_map": "the policies that are published are in the old format",
    "rollout.prompts_per_batch": _SAMPLED,
    "rollout.group_size": _SAMPLED,
    "rollout.max_new_tokens": _SAMPLED,
    "rollout.temperature": _SAMPLED,
    "rollout.top_p": _SAMPLED,
    "rollout.top_k": _SAMPLED,
    "rollout.kept_set": _SAMPLED,
    "rollout.replay_experts": _SAMPLED,
    "rollout.context_tokens": "it decides which prompts are too long",
    "rollout.concurrent_prompts": SAFE,
    "rollout.urls": SAFE,
    "rollout.port": SAFE,
    "rollout.request_deadline_s": SAFE,
    "rollout.start_deadline_s": SAFE,
    "rollout.interruption": _SAMPLED,
    "rollout.extra_args": SAFE,
    "learner.tensor_parallel": SAFE,
    "learner.sequence_parallel": SAFE,
    "learner.pipeline_parallel": SAFE,
    "learner.virtual_pipeline": SAFE,
    "learner.context_parallel": SAFE,
    "learner.data_parallel": SAFE,
    "learner.expert_parallel": SAFE,
    "learner.expert_tensor_parallel": SAFE,
    "learner.distributed_optimizer": "checkpoints hold the optimizer's state in the old form",
    "learner.overlap_grad_reduce": SAFE,
    "learner.recompute": SAFE,
    "learner.temperature": _LEARNED,
    "learner.precision": "checkpoints hold weights and the optimizer's state in the old precision",
    "learner.fp8_emulation": _LEARNED,
    "learner.micro_batch_tokens": SAFE,
    "learner.updates_per_batch": _LEARNED,
    "learner.old_logprobs_at": _LEARNED,
    "learner.optimizer.lr": SAFE,
    "learner.optimizer.min_lr": SAFE,
    "learner.optimizer.decay": SAFE,
    "learner.optimizer.decay_steps": SAFE,
    "learner.optimizer.lr_by_lag": _LEARNED,
    "learner.optimizer.warmup_steps": SAFE,
    "learner.optimizer.betas": _OPTIMIZER,
    "learner.optimizer.eps": _OPTIMIZER,
    "learner.optimizer.weight_decay": _LEARNED,
    "learner.optimizer.clip_grad": _LEARNED,
    "learner.step_deadline_s": SAFE,
    "prompts": _LEDGER,
    "objective": _LEARNED,
    "reference": _LEARNED,
    "distillation": _LEARNED,
    "distillation.urls": SAFE,
    "distillation.tensor_parallel": SAFE,
    "distillation.extra_args": SAFE,
    "correction": _LEARNED,
    "advantage": _LEARNED,
    "schedule": "which version a batch may be sampled with is checked over the whole run",
    "weights.channel": SAFE,
    "weights.kv_cache": _SAMPLED,
    "weights.bucket_mib": SAFE,
    "weights.whole_every": SAFE,
    "weights.keep": SAFE,
    "weights.publish_deadline_s": SAFE,
    "weights.probe_max_gap_nats": SAFE,
    "controller": "its decisions rest on what it measured under the old value",
    "checkpoint.every": SAFE,
    "checkpoint.keep": SAFE,
    "evaluation.every": SAFE,
    "evaluation.prompts": _MEASURED,
    "evaluation.samples": _MEASURED,
    "evaluation.temperature": _MEASURED,
}
"""Key, or section → SAFE, or why a run that has a batch keeps its value."""

CUTS_MICRO_BATCHES = (
    *("learner.micro_batch_tokens", "learner.data_parallel", "learner.tensor_parallel", "learner.sequence_parallel"),
    *("learner.pipeline_parallel", "learner.virtual_pipeline", "learner.context_parallel", "learner.expert_parallel"),
    "learner.expert_tensor_parallel",
)
"""Safe keys that say which samples are in a micro-batch together."""

MAY_FIX_FORMATS = ("rollout.urls", "weights.channel")
"""Safe keys that say whether the ESS controller may change the formats of the engines (launch.build.control)."""

NOT_IN_A_CHECKPOINT = {
    "model.path": "the checkpoint holds the weights of that model",
    "learner.precision": RULES["learner.precision"],
    "learner.distributed_optimizer": RULES["learner.distributed_optimizer"],
}
"""What a fork may not change either."""


def rule_of(key: str) -> str:
    """The entry of RULES that a key goes by: the longest that it begins with. Raises KeyError where there is none."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if (entry := ".".join(parts[:length])) in RULES:
            return entry
    raise KeyError(f"recipe key {key} has no rule in pipeline.resume.rules")


def unsafe(changes: dict[str, str]) -> dict[str, str]:
    """Of changes (key → `old → new`), those that a run which has a batch may not go on with."""
    return {key: change for key, change in changes.items() if RULES[rule_of(key)] is not SAFE}


def refuse_unsafe(run: str, changes: dict[str, str]) -> None:
    """Raises RunConflictError when a run that has a batch may not go on with these changes (key → `old → new`)."""
    refused = [f"{key}: {change} ({RULES[rule_of(key)]})" for key, change in unsafe(changes).items()]
    if refused:
        raise RunConflictError(
            f"{run} cannot go on with {listed(refused, most=3)}: restore what it was, begin another run.name, or "
            f"make a new run from a checkpoint of this one: `evenkeel fork {run} NEW --at STEP`"
        )


def refuse_what_no_checkpoint_carries(run: str, changes: dict[str, str]) -> None:
    """Raises RunConflictError when a fork may not have these changes."""
    refused = [
        f"{key}: {change} ({NOT_IN_A_CHECKPOINT[key]})" for key, change in changes.items() if key in NOT_IN_A_CHECKPOINT
    ]
    if refused:
        raise RunConflictError(f"a fork of {run} cannot have {listed(refused)}; begin a run from the model instead")


def refuse_impossible(
    before: Recipe,
    after: Recipe,
    *,
    run: str,
    settled: int,
    published: int,
    scored: int,
    optimizer_steps: int,
    num_promoted: int = 0,
) -> None:
    """Raises RunConflictError for safe keys whose new value does not fit what the run holds: `settled` steps that are
    sampled, trained or published, of which the engines serve version `published`. The newest checkpoint holds `scored`
    steps; 0 where the batches of a stage are not scored at its beginning. Up to its last step by `before`, the run
    takes `optimizer_steps`. The ESS controller has the engines hold `num_promoted` modules unquantized."""
    old, new = before.run.steps, after.run.steps
    if new < settled:
        raise RunConflictError(
            f"run.steps: {old} → {new}, but {run} holds {settled} steps; use at least that, or "
            f"`evenkeel fork {run} NEW --at STEP`"
        )
    stage = before.schedule.updates_per_stage if before.schedule.kind == "staged" else 1
    last = old // stage * stage
    if new > old and last < max(published, scored):  # the stage would have batches that nobody scored at its beginning
        raise RunConflictError(
            f"run.steps: {old} → {new}, but the last stage of {run}, which ends at step {old}, is under way or over, "
            f"and {old} is no multiple of schedule.updates_per_stage {stage}; `evenkeel fork {run} NEW --at {last}` "
            "goes on from before it"
        )
    changed = changed_keys(before, after)
    keep_formats = (bool(after.rollout.urls), after.weights.channel == "ipc")
    fixed = [key for key, keeps in zip(MAY_FIX_FORMATS, keep_formats, strict=True) if keeps and key in changed]
    if num_promoted and fixed:
        raise RunConflictError(
            f"{listed(fixed)}: engines of rollout.urls, and those on the learner's GPUs (weights.channel ipc), keep "
            f"their formats, but the ESS controller of {run} holds {num_promoted} modules unquantized; restore what "
            f"it was, or `evenkeel fork {run} NEW --at STEP`, whose controller begins afresh"
        )
    moved = [key for key in changed if key in CUTS_MICRO_BATCHES]
    if moved and after.objective.depends_on_micro_batches:
        raise RunConflictError(
            f"{listed(moved)}: they cut micro-batches otherwise, and objective {after.objective.name} learns from each "
            f"by itself: restore what it was, or `evenkeel fork {run} NEW --at STEP`"
        )
    optimizer = after.learner.optimizer
    if new != old and optimizer.decay != "constant" and optimizer.decay_steps is None:
        whole = optimizer_steps + (new - old) * after.learner.updates_per_batch
        raise RunConflictError(
            f"run.steps: {old} → {new}, but learner.optimizer.decay is {optimizer.decay} over all steps: say where it "
            f"ends with learner.optimizer.decay_steps={optimizer_steps} (then the rate stays at min_lr) or ={whole} "
            "(then the steps that are left have the rates of the longer run)"
        )
    if "delta" in (before.weights.channel, after.weights.channel) and before.weights.channel != after.weights.channel:
        raise RunConflictError(
            f"weights.channel: {before.weights.channel} → {after.weights.channel}, but policies by delta are made from "
            f"those before them; restore the value, or `evenkeel fork {run} NEW --at STEP`"
        )
