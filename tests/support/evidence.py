"""Results of evidence runs that nobody ran."""

from __future__ import annotations
