"""The recipe's `schedule` section: how far batches may be behind the weights. See pipeline.schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipeline.config.section import Section


class SyncSchedule(Section):
    kind: Literal["sync"] = "sync"


class AsyncSchedule(Section):
    kind: Literal["async"]
    lag: PositiveInt = Field(1, description="Versions that a batch may be behind when it starts.")


class StagedSchedule(Section):
    kind: Literal["staged"]
    updates_per_stage: PositiveInt = Field(8, description="mu: batches that are trained on between two publishes.")


ScheduleSection = Annotated[SyncSchedule | AsyncSchedule | StagedSchedule, Field(discriminator="kind")]
