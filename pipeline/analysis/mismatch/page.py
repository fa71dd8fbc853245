"""One HTML page of an attribution, with its picture inside: nothing to install, nothing to fetch."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from pipeline.analysis.mismatch.figure import MEANING, draw, shown_terms
from pipeline.analysis.pages.style import page_style
from pipeline.data.files import write_atomically


def write_page(result: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write mismatch.html and mismatch.png into `folder`, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    picture, page = folder / "mismatch.png", folder / "mismatch.html"
    draw(result, picture)
    write_atomically(page, render(result, picture))
    return page, picture


def render(result: Mapping[str, Any], picture: Path) -> str:
    """The page as text."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(nats=nats, percent=percent)
    template = environment.from_string(
        resources.files("pipeline.analysis.mismatch").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    rows = [(term, MEANING[term], result["terms"][term]) for term in shown_terms(result)]
    image = base64.b64encode(picture.read_bytes()).decode()
    return template.render(
        style=page_style(), result=result, rows=[*rows, ("total", "all of it", result["total"])], image=image
    )


def nats(value: float) -> str:
    """Two digits, or 0."""
    return "0" if value == 0 else f"{value:.2g}"


def percent(value: float) -> str:
    """One digit after the point."""
    return f"{round(100 * value, 1) + 0.0:.1f} %"  # never -0.0
