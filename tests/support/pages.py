"""What pages of the documentation say that can be checked: commands, links, code, recipes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from launch.cli import app

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "ops").glob("*.md")),
    *sorted((ROOT / "ops").glob("*/*.md")),
)
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    """Its path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Its fenced code of a language; "" for code that names none."""
    return [text for found, text in _FENCED.findall(page.read_text(encoding="utf-8")) if found == language]


def commands(page: Path) -> list[str]:
    """Calls of evenkeel in code, with continued lines joined and comments cut off."""
    return [
        *fenced_commands(page),
        *re.findall(r"`(evenkeel [^`\n]*)`", _FENCED.sub("", page.read_text(encoding="utf-8"))),
    ]


def fenced_commands(page: Path) -> list[str]:
    """Those that somebody would copy: they stand in code of their own."""
    text = "\n".join(
        code for language, code in _FENCED.findall(page.read_text(encoding="utf-8")) if language in ("", "sh", "bash")
    )
    found = re.findall(r"^(?:\w+=\S+ )*(evenkeel [^\n]*)", text.replace("\\\n", " "), re.MULTILINE)
    return [command.split("  #")[0].strip() for command in found]


@cache
def _program() -> Any:
    return typer.main.get_command(app)


def parser_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words call, and what is left of them: its arguments. Raises LookupError."""
    parser = _program()
    rest = list(words)
    while rest and not rest[0].startswith("-") and hasattr(parser, "commands"):
        if rest[0] not in parser.commands:
            raise LookupError(f"there is no command {rest[0]}")
        parser = parser.commands[rest.pop(0)]
    return parser, rest


def words_of(command: str) -> list[str]:
    """What a shell makes of it, without `evenkeel` and what follows a pipe."""
    return shlex.split(command.split(" | ")[0].split(" && ")[0])[1:]


def unknown_options(command: str) -> list[str]:
    """Options that it is called with and does not have. Raises LookupError where there is no such command."""
    parser, rest = parser_of(words_of(command.replace("…", "")))
    known = {name for parameter in parser.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return [word for word in rest if word.startswith("--") and word.split("=")[0] not in known]


def parse(command: str) -> None:
    """Parse it as `evenkeel` would, and do not run it. Raises what the parser raises. NODE and the like are numbers."""
    parser, rest = parser_of(words_of(command))
    numbered = ["1" if re.fullmatch(r"NODE|INDEX|[A-Z]", word) else word for word in rest]
    with parser.make_context(command, numbered):
        pass


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(target, anchor) of every link to a file; the target is "" for one to a place on the same page."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            yield target, anchor


@cache
def anchors(text: str) -> frozenset[str]:
    """Names of the places on a page that a link can lead to, as mkdocs makes them of its headings."""
    named = re.findall(r'\{ ?#([^ }]+) ?\}|<a id="([^"]+)"', text)
    headings = re.findall(r"^#+ (.*?)(?: \{ ?#.*)?$", _FENCED.sub("", text), re.MULTILINE)
    return frozenset([*(first or second for first, second in named), *map(slug, headings)])


def slug(heading: str) -> str:
    """As Markdown's `toc` does."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    ascii_only = plain.encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())
