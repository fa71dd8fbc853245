"""The recipe's `task` section: where prompts and rewards come from. Tasks themselves are in pipeline.tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from pipeline.config.section import Probability, Section


class DigitsTask(Section):
    """What the generated digit tasks share."""

    min_digits: PositiveInt = 4
    max_digits: PositiveInt = 16
    num_prompts: PositiveInt = Field(100_000, description="Prompts of an epoch.")
    demonstration_noise: Probability = Field(0.1, description="sft only: chance that a target digit is off by one.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits {self.min_digits} is above max_digits {self.max_digits}; lower it")
        return self


class SortDigitsTask(DigitsTask):
    name: Literal["sort_digits"] = "sort_digits"


class SpellDigitsTask(DigitsTask):
    name: Literal["spell_digits"]
    misspelt_share: Probability = Field(0.6, description="sft only: how often 3, 6 and 8 get a wrong letter.")


class JsonlTask(Section):
    name: Literal["jsonl"]
    path: Path = Field(description='One JSON object a line: {"prompt": …, "answer": …}.')
    held_out_path: Path | None = Field(None, description="Evaluation prompts; otherwise 1 in 16 lines is held out.")
    reward: str = Field("math_verify", description="math_verify or package.module:function(prompt, response, answer).")
    chat_template: bool = Field(False, description="Wrap the prompt as a user turn of the tokenizer's chat template.")


TaskSection = Annotated[SortDigitsTask | SpellDigitsTask | JsonlTask, Field(discriminator="name")]
