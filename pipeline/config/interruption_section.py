"""The recipe's `rollout.interruption`; what is done with it is in pipeline.rollout.interruption."""

from __future__ import annotations

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from pipeline.config.section import Section


class InterruptionSection(Section):
    """ScaleRL: a response that is still going on at a random length is cut and told to give its answer."""

    from_tokens: PositiveInt = Field(description="Fewest tokens after which a response is cut; the number is random.")
    to_tokens: PositiveInt = Field(description="Most tokens after which a response is cut.")
    phrase: str = Field(
        "Okay, time is up. Let me stop thinking and formulate an answer now. </think>",
        min_length=1,
        description="Text that is appended to a response that was cut. Its tokens are not trained on.",
    )
    answer_tokens: PositiveInt = Field(description="Most tokens of the answer that follows the phrase.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.from_tokens > self.to_tokens:
            raise ValueError(f"from_tokens {self.from_tokens} is above to_tokens {self.to_tokens}; lower it")
        return self
