"""The names that docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from tests.support.pages import ROOT


@cache
def explained() -> re.Pattern[str]:
    """Matches a name of a line of metrics that stands in the first column of a table; `…` there stands for a word."""
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([a-z0-9_…]+)`", row)}
    return re.compile("|".join(re.escape(name).replace("…", r"\w+") for name in sorted(names)) + "|crc32")


def unexplained(names: Iterable[str]) -> list[str]:
    """Those that the page does not explain."""
    return sorted({name for name in names if not explained().fullmatch(name)})
