"""The recipe's `run`, `model`, `learner.optimizer`, `checkpoint` and `evaluation`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from pipeline.config.section import Samples, Section, Temperature
from precision.ratios import LrByLag


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Folder below `root`.")
    root: Path = Field(Path("runs"), description="Where run directories live.")
    seed: NonNegativeInt = Field(0, description="Seeds prompt order, model-parallel RNG and evaluation prompts.")
    steps: PositiveInt = Field(description="Batches to train on, each in learner.updates_per_batch optimizer steps.")
    wait_deadline_s: PositiveFloat = Field(
        3600.0, description="Longest wait of one loop for the other; an evaluation must fit in, too."
    )
    max_restarts: NonNegativeInt = Field(5, description="Restarts of one process without progress before giving up.")


class ModelSection(Section):
    path: Path = Field(description="HF folder: config.json, safetensors, tokenizer. Qwen3, Qwen3-MoE, Qwen2 or Llama.")
    fp32_lm_head: bool = Field(
        False, description="Learner and engines multiply by the LM head in float32 (ScaleRL), whatever their precision."
    )
    check_tokenizer: bool = Field(
        True,
        description="Refuse a tokenizer with far fewer tokens than the model has rows, or with another end token than "
        "its config.json and generation_config.json name. False: both are meant.",
    )


Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]
"""Of a moment, how much stays in each step."""


class OptimizerSection(Section):
    lr: PositiveFloat = Field(
        1e-6,
        le=100.0,
        description="Highest learning rate of AdamW. The default is for real models; tiny ones take 1e-4 to 1e-3.",
    )
    min_lr: float = Field(0.0, ge=0.0, description="Learning rate at the end of the decay.")
    decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How lr goes to min_lr after the warm-up: not at all, in a line, by half a cosine."
    )
    warmup_steps: NonNegativeInt = Field(10, description="Optimizer steps of linear warm-up.")
    decay_steps: PositiveInt | None = Field(
        None, description="Optimizer step at which the decay has reached min_lr; default: the run's last one."
    )
    lr_by_lag: LrByLag = Field(
        "none",
        description="sqrt: a batch whose tokens were sampled `age` optimizer steps ago in the mean is learned from at "
        "lr / √(1 + age). ess: at lr × (1 - √(1 - e)), where e is the ESS of what the learner has changed since the "
        "tokens were sampled; needs a pass over each stale batch, and with async the memory of "
        "learner.old_logprobs_at sampling. With the ESS controller, the smaller of both factors holds.",
    )
    betas: tuple[Momentum, Momentum] = Field(
        (0.9, 0.95), description="What stays each step of AdamW's mean of gradients, and of that of their squares."
    )
    eps: PositiveFloat = Field(1e-8, description="AdamW divides by the root of the mean square plus this.")
    weight_decay: float = Field(0.01, ge=0.0, description="AdamW: each step shrinks weights by learning rate × this.")
    clip_grad: float = Field(1.0, ge=0.0, description="Global norm; 0 turns clipping off.")

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.decay != "constant" and self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}, so that the rate would rise; lower it")
        return self


class CheckpointSection(Section):
    every: PositiveInt = Field(20, description="Steps between checkpoints; the last step always saves one.")
    keep: PositiveInt = Field(
        2, description="Newest checkpoints that stay, about 14 bytes a parameter each in BF16; a fork begins at one."
    )


class EvaluationSection(Section):
    every: PositiveInt = Field(20, description="Steps between evaluations; the first and the last always run.")
    prompts: PositiveInt = Field(64, description="Held-out prompts; all of them where there are fewer.")
    samples: Samples = Field(8, description="Samples of a prompt: pass@k is known up to this k.")
    temperature: Temperature = Field(1.0, description="Of sampling in evaluations, whatever the rollouts have.")

    @field_validator("temperature", mode="before")
    @classmethod
    def _samples(cls, given: object) -> object:
        if isinstance(given, int | float) and not isinstance(given, bool) and given == 0:
            raise ValueError(
                "there is no greedy evaluation: pass@k is over evaluation.samples different answers; use 0.6 or 1, and "
                "measure a checkpoint by itself for a greedy score (docs/model.md)"
            )
        return given
