"""What every page looks like."""

from __future__ import annotations

from importlib import resources


def page_style() -> str:
    """The CSS of every page: colors for light and dark, cards, tables, figures; wide and narrow."""
    return resources.files("pipeline.analysis").joinpath("page.css").read_text(encoding="utf-8")
