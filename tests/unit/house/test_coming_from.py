"""The page for those who come from another trainer names keys that exist, and its recipe loads."""

from __future__ import annotations

import re

import yaml

from pipeline.config.meant_keys import known_keys, meant_by
from pipeline.config.recipe import Recipe
from tests.support.pages import ROOT, blocks

PAGE = ROOT / "docs/coming-from.md"


def test_rows_lead_to_keys() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
    assert len(keys) > 50
    assert sorted(keys - known_keys().keys()) == []


def test_the_recipe_is_one() -> None:
    (text,) = blocks(PAGE, "yaml")
    Recipe.model_validate(yaml.safe_load(text))


def test_an_answer() -> None:
    assert meant_by("rollout.num_generations") == "here it is rollout.group_size"
