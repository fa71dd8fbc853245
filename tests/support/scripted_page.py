"""A page of ours with its script at work, without a browser.

The page is parsed, `page_dom.js` is the document that its script finds, and QuickJS runs the script. What a browser
makes of style and layout is not seen here; pictures are for that (`ops/docs/pictures.py`).
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import quickjs

DOCUMENT = Path(__file__).with_name("page_dom.js").read_text()
VOID = {"meta", "br", "img", "link", "input", "hr"}


class _Tree(HTMLParser):
    """Elements as `page_dom.js` takes them, and the text of each script."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[list[Any]] = [["#document", {}, []]]
        self.scripts: list[str] = []
        self.feed(source)
        self.close()
        assert len(self.open) == 1, f"{self.open[-1][0]} is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = [tag, {name: value or "" for name, value in attrs}, []]
        self.open[-1][2].append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        closed = self.open.pop()
        assert closed[0] == tag
        if tag == "script":
            self.scripts.append("".join(closed[2]))

    def handle_data(self, data: str) -> None:
        self.open[-1][2].append(data)


class ScriptedPage:
    """What somebody does with the page of samples, and sees of it."""

    def __init__(self, source: str, *, marks: bool = True) -> None:
        """The page as it is once its script has run; without `marks` the browser is one that cannot mark text."""
        tree = _Tree(source)
        self._engine = quickjs.Context()
        self._engine.set_time_limit(20)
        self._engine.eval(f"const PAGE = {json.dumps(tree.open[0][2])};\n{DOCUMENT}")
        if not marks:
            self._engine.eval("delete window.Highlight")
        [script] = tree.scripts
        self._engine.eval(f"{{{script}}}")

    def enter(self, control: str, value: str) -> None:
        """Choose it, or write it. Raises quickjs.JSException where a list does not offer it, or the script fails."""
        self._engine.eval(f"enter({json.dumps(control)}, {json.dumps(value)})")

    def told(self) -> str:
        """What the page says that it shows."""
        return self._found("document.getElementById('told').textContent")

    def controls_are_shown(self) -> bool:
        return self._found("!document.getElementById('controls').hidden")

    def prompts(self) -> list[str]:
        """Of the groups that are shown, in the order in which they are shown."""
        return self._found(f"{_SHOWN}.map((group) => group.querySelectorAll('.prompt')[0].textContent)")

    def framed(self) -> list[str]:
        """Responses that hold what was searched for, of groups that are shown."""
        return self._found(
            f"{_SHOWN}.flatMap((group) => group.querySelectorAll('.found'))"
            ".map((sample) => sample.querySelectorAll('.text')[0].textContent)"
        )

    def marked(self) -> list[str]:
        """Pieces of text that are marked, with a | between two tokens."""
        return self._found("marked()")

    def _found(self, expression: str) -> Any:
        return json.loads(self._engine.eval(f"JSON.stringify({expression})"))


_SHOWN = "document.querySelectorAll('.group').filter((group) => !group.hidden)"
