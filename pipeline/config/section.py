"""The base of every recipe section, and the number types that sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from precision.settings import Settings

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(Settings):
    """Frozen, no unknown keys, no NaN."""
