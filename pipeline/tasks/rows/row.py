"""One row of somebody's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 16 << 20
"""Of one row."""


@dataclass(frozen=True)
class Row:
    """Column → value, and where it stands, for messages."""

    where: str
    values: Mapping[str, Any]
    unread: Mapping[str, str] = field(default_factory=dict)
    """Columns that there are beside these, and of which kind, which nothing reads."""
