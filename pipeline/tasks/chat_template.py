"""Chat templates as transformers runs them, in a sandbox of our own.

`strftime_now`, by which some templates write the day into each prompt, writes the day that the recipe names
(task.template_date). A run that is resumed would ask other prompts on another day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import count
from typing import Any, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.errors import RecipeError
from precision.text import quoted

_MOST_REPEATED = 1_000_000
_DEEPEST_INDENT = 16


class Template(Protocol):
    """A chat template at work: pipeline.tasks.tokenizer.Tokenizer."""

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token."""
        ...

    def conversation(self, messages: Sequence[Mapping[str, Any]], *, to_answer: bool = True) -> str:
        """The messages as the model reads them."""
        ...


def check_written(messages: Sequence[Mapping[str, Any]], written: str, template: Template, where: str) -> None:
    """Raises RecipeError, with `where`, for one of `messages` that is not in what the template has `written` of them,
    such as one of a role that it does not know. The assistant's are not looked at: templates leave out thoughts."""
    for number, message in enumerate(messages):
        if message["role"] == "assistant" or str(message["content"]).strip() in written:
            continue
        mark = unused_mark(written)  # a template may also write a text in a form of its own, such as JSON
        marked = [*messages[:number], {**message, "content": mark}, *messages[number + 1 :]]
        if mark not in template.conversation(marked):
            raise RecipeError(
                f"{where}: the chat template leaves out message {number + 1}, {quoted(message['content'])}, whose role "
                f"is {quoted(message['role'])}; use roles that it knows, such as system, user and assistant"
            )


def unused_mark(text: str) -> str:
    """Characters that nobody writes and that `text` does not hold."""
    return next(mark for mark in map("\ue000{}\ue001".format, count()) if mark not in text)


def compiled(template: str, day: date | None = None) -> jinja2.Template:
    """With `strftime_now` where there is a day. Raises jinja2.TemplateError for a template that is none."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    if day is not None:
        environment.globals["strftime_now"] = day.strftime
    return environment.from_string(template)


class _Environment(ImmutableSandboxedEnvironment):
    """A template comes with a model, from wherever: it reaches nothing but its text. `*` and `**` with huge numbers,
    which take all memory at once, are refused. Nothing else bounds memory and time: a template that is made for it can
    double or pad a text until there is no memory left."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raises jinja2.TemplateError for a result that no prompt needs."""
        size = max((len(one) for one in (left, right) if isinstance(one, str | list | tuple)), default=1)
        if any(isinstance(one, int) and abs(one) * size > _MOST_REPEATED for one in (left, right)):
            raise jinja2.TemplateError(f"{operator} with a number or a text of that size is not allowed")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    """Chat templates call this to refuse a conversation."""
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """In place of Jinja's own filter, which sorts keys and escapes characters for web pages."""
    if indent is not None and not (isinstance(indent, int) and indent <= _DEEPEST_INDENT):
        raise jinja2.TemplateError(f"tojson with an indent of more than {_DEEPEST_INDENT} is not allowed")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, around what the model says: the text is that within."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
