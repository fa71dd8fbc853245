"""The page for those who come from another trainer names keys that exist."""

from __future__ import annotations

import re

from pipeline.config.meant_keys import known_keys, meant_by
from tests.support.pages import ROOT

PAGE = ROOT / "docs/coming-from.md"


def test_rows_lead_to_keys() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
    assert len(keys) > 50
    assert sorted(keys - known_keys().keys()) == []


def test_an_answer() -> None:
    assert meant_by("rollout.num_generations") == "here it is rollout.group_size"
