"""The recipe's `task` and `prompts` sections: where prompts and rewards come from, and which prompts are asked. Tasks
themselves are in pipeline.tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PositiveInt, model_validator

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


class Columns(Section):
    """What the data calls what a problem is made of. `a.b` is b of the object a."""

    prompt: str | None = Field(
        None,
        min_length=1,
        description="Text, or messages for the chat template; default prompt, or messages where there is no prompt.",
    )
    answer: str | None = Field(
        "answer", min_length=1, description="Text or a number; null: there are none, and the reward needs none."
    )


class DataTask(Section):
    name: Literal["data"]
    path: Path = Field(description="JSON Lines, Parquet, or a folder that Hugging Face datasets saved (docs/data.md).")
    held_out_path: Path | None = Field(None, description="Evaluation prompts; otherwise 1 in 16 rows is held out.")
    columns: Columns = Field(default_factory=Columns)
    reward: str = Field(
        "math_verify",
        description="math_verify, python_tests (answers are tests, see docs/sandbox.md), or "
        "package.module:function(prompt, response, answer, metadata).",
    )
    chat_template: bool = Field(
        False, description="Put the prompt, as the user's turn, or its messages through the tokenizer's chat template."
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="The first message of each conversation that does not begin with one itself."
    )
    sha256: str | None = Field(
        None, pattern="[0-9a-f]{64}", description="Of the data; frozen when the run begins, and compared at each start."
    )

    @model_validator(mode="after")
    def _a_template_writes_it(self) -> Self:
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt is written by the chat template; set task.chat_template to true")
        return self


class OwnTask(Section):
    """A task of the user's own; `name` may be left out."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Literal["own"] = "own"
    class_: str = Field(
        alias="class",
        pattern=r"[\w.]+:\w+",
        description="package.module:Class, importable where the run's processes run; made as Class(seed=…, **options).",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Plain data for the class.")


TaskSection = Annotated[SortDigitsTask | SpellDigitsTask | DataTask | OwnTask, Field(discriminator="name")]


class PromptsSection(Section):
    """Which prompts are asked."""

    refill: bool = Field(
        False, description="Dynamic sampling (DAPO): groups of equal rewards are dropped and further prompts asked."
    )
    max_refills: PositiveInt = Field(3, description="refill: at most so many times prompts_per_batch further prompts.")
    solved_pass_rate: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Prompts solved at least this often so far are never asked again (ScaleRL .9).",
    )
    solved_min_samples: PositiveInt | None = Field(
        None, description="Samples of a prompt before its pass rate counts; default one group."
    )
