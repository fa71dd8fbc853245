"""What mkdocs does beside its own work: pages made from the code, pages of `ops/`, and links between all of them.

In the repository a page links to another file by its place there, so that it can be read where it lies. In the site a
link to a page leads to that page, and a link to any other file of the repository becomes the name of the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from launch.run.metrics import markdown
from ops.docs.cli_reference import commands_page
from ops.docs.recipe_reference import recipe_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE: dict[str, Callable[[], str]] = {
    "reference/recipe.md": recipe_page,
    "reference/cli.md": commands_page,
    "reference/prometheus.md": lambda: f"# Prometheus metrics\n\n{markdown()}",
}
"""Place in the site → what makes the page."""
FROM_REPOSITORY = (
    "CHANGELOG.md",
    "ops/assumptions.md",
    "ops/decisions.md",
    "ops/examples/README.md",
    "ops/gpu/README.md",
    "ops/measurements/README.md",
    "ops/measurements/2026-11-27-h200.md",
    "ops/runbook.md",
)
"""Pages that lie elsewhere in the repository and have the same place in the site."""
_LINK = re.compile(r"(\]\()([^)#\s]+)?(#[^)\s]*)?(\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not lie in docs/. Called by mkdocs."""
    from mkdocs.structure.files import File

    for place, content in extra_pages().items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site needs them. Called by mkdocs."""
    return with_links_of_the_site(markdown, page.file.src_uri)


def extra_pages() -> dict[str, str]:
    """Place in the site → text, for every page that does not lie in docs/."""
    pages = {place: make() for place, make in MADE.items()}
    pages |= {place: (ROOT / place).read_text(encoding="utf-8") for place in FROM_REPOSITORY}
    return pages


def with_links_of_the_site(markdown: str, place: str) -> str:
    """The page at `place` of the site, with every link that leaves docs/ turned to where its target is."""

    def turned(match: re.Match[str]) -> str:
        target, anchor = match[2], match[3] or ""
        if target is None or re.match(r"[a-z]+:", target):
            return match[0]
        there = in_site(resolved(repository_path(place), target))
        if there is None:
            return "](" + _NOWHERE + ")"
        return f"]({os.path.relpath(there, PurePosixPath(place).parent)}{anchor})"

    return re.sub(r"\[([^\]]*)\]\(" + _NOWHERE + r"\)", r"\1", _LINK.sub(turned, markdown))


_NOWHERE = "nowhere-in-the-site"


def repository_path(place: str) -> PurePosixPath:
    """Where the text of a page lies, or would lie, in the repository."""
    return PurePosixPath(place) if place in FROM_REPOSITORY else PurePosixPath("docs") / place


def resolved(page: PurePosixPath, target: str) -> PurePosixPath:
    """The path in the repository that a link of a page leads to."""
    return PurePosixPath(os.path.normpath(page.parent / target))


def in_site(path: PurePosixPath) -> str | None:
    """The place in the site of a file of the repository; None where it is no part of the site."""
    if str(path) in FROM_REPOSITORY:
        return str(path)
    inside = path.relative_to("docs") if path.is_relative_to("docs") else None
    if inside is not None and (str(inside) in MADE or (DOCS / inside).is_file()):
        return str(inside)
    return None
