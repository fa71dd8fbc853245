"""The pages for those who come from another trainer say the same as what a recipe's unknown keys are answered with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from pipeline.config.meant_keys import known_keys, meant_by
from pipeline.config.recipe import Recipe
from tests.support.pages import ROOT, blocks

PAGES = tuple(ROOT / f"docs/from-{trainer}.md" for trainer in ("trl", "verl", "slime"))
TOO_SHORT = {"enable", "len", "save"}
"""Words that somebody may have meant otherwise."""
LEAVES = {key.rpartition(".")[2] for key in known_keys()}


def rows(page: Path) -> list[tuple[list[str], list[str]]]:
    """(their words, keys here) of each row of the table."""
    found = re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", theirs), re.findall(r"`([^`]+)`", ours)) for theirs, ours in found]


def leaf(word: str) -> str:
    """`--eps-clip`, `actor.clip_ratio` → the word that somebody would write into a recipe."""
    return word.removeprefix("--").replace("-", "_").rpartition(".")[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_rows_lead_to_keys(page: Path) -> None:
    found = rows(page)
    assert len(found) > 30
    assert sorted({key for _, ours in found for key in ours} - known_keys().keys()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_recipe_of_theirs_is_translated(page: Path) -> None:
    (recipe,) = (data for text in blocks(page, "yaml") if "run" in (data := yaml.safe_load(text)))
    Recipe.model_validate(recipe)


def test_each_word_of_a_page_is_answered_as_there() -> None:
    told: dict[str, set[str]] = {}
    for page in PAGES:
        for theirs, ours in rows(page):
            for word in theirs:
                if ours and leaf(word) not in LEAVES | TOO_SHORT:
                    told.setdefault(leaf(word), set()).update(ours)
    wrong = {word: keys for word, keys in told.items() if not any(key in meant_by(word) for key in keys)}
    assert wrong == {}


def test_an_answer() -> None:
    assert meant_by("rollout.num_generations") == "here it is rollout.group_size"
