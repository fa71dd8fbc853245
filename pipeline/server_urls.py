"""Servers that exist already, as a recipe names them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def _different_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    foreign = [url for url in urls if not re.fullmatch(r"https?://[^\s/@?#]+", url)]
    if foreign or len(set(urls)) < len(urls):
        raise ValueError(
            f"names {', '.join(foreign) or 'a server twice'}; expected a different http://HOST:PORT for each server"
        )
    return urls


ServerUrls = Annotated[tuple[str, ...], AfterValidator(_different_urls)]
"""`http://HOST:PORT` of each, no server twice, and without a password or a path."""
