"""Chat templates as transformers runs them, in a sandbox of our own.

One thing is not there: `strftime_now`, by which some templates write the day into each prompt. A run that is resumed
would ask other prompts on another day.
"""

from __future__ import annotations

import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Names in a template, and in tokenizer_config.json."""
_MOST_REPEATED = 1_000_000
_DEEPEST_INDENT = 16


def compiled(template: str) -> jinja2.Template:
    """Raises jinja2.TemplateError for a template that is none."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)


class _Environment(ImmutableSandboxedEnvironment):
    """A template comes with a model, from wherever: it can call nothing, and cannot make a text of gigabytes."""

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
