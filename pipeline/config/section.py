"""The base of every recipe section, and the types that sections share."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from precision.settings import Settings

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]
"""SGLang takes less than 1e-6 for greedy sampling."""
MOST_PROCESSES = 2**16
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Samples = Annotated[int, Field(ge=1, le=2**16)]
"""Samples of a prompt."""


class Section(Settings):
    """Frozen, no unknown keys, no NaN."""


def _different_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    foreign = [url for url in urls if not re.fullmatch(r"https?://[^\s/@?#]+", url)]
    if foreign or len(set(urls)) < len(urls):
        raise ValueError(
            f"names {', '.join(foreign) or 'a server twice'}; expected a different http://HOST:PORT for each server"
        )
    return urls


ServerUrls = Annotated[tuple[str, ...], AfterValidator(_different_urls)]
"""`http://HOST:PORT` of each, no server twice, and without a password or a path."""
