"""The recipe's `run`, `model`, `checkpoint` and `evaluation`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from pipeline.config.section import Section


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


class CheckpointSection(Section):
    every: PositiveInt = Field(20, description="Steps between checkpoints; the last step always saves one.")
    keep: PositiveInt = 2


class EvaluationSection(Section):
    every: PositiveInt = Field(20, description="Steps between evaluations; the first and the last always run.")
    prompts: PositiveInt = Field(64, description="Held-out prompts.")
    samples: PositiveInt = Field(8, description="Samples of a prompt: pass@k is known up to this k.")
    temperature: PositiveFloat = 1.0

    @field_validator("temperature", mode="before")
    @classmethod
    def _samples(cls, given: object) -> object:
        if isinstance(given, int | float) and not isinstance(given, bool) and given == 0:
            raise ValueError(
                "there is no greedy evaluation: pass@k is over evaluation.samples different answers; use 0.6 or 1, and "
                "measure a checkpoint by itself for a greedy score (docs/model.md)"
            )
        return given
