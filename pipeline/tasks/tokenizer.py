"""Convert text to token ids and back as a local HF folder does, over the `tokenizers` library alone.

The ids are those of transformers' AutoTokenizer for the same folder, without the special tokens that it would add by
itself. Chat templates run as in transformers, in a sandbox of our own. Some templates write the day into each prompt by
`strftime_now`; here it writes the recipe's (task.template_date), so that a resumed run asks the same prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import date
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Encoding, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from pipeline.errors import ModelError, RecipeError
from pipeline.tasks.folder_tokenizer import read_object, read_tokenizer
from precision.text import one_line, quoted

PAD_TOKEN, END_TOKEN = "<|pad|>", "<|end|>"
"""Special tokens of a character tokenizer."""
_MOST_REPEATED = 1_000_000
_DEEPEST_INDENT = 16


class Tokenizer:
    """A folder's tokenizer; create it by `Tokenizer.load`."""

    @staticmethod
    def load(
        folder: Path,
        *,
        vocab_size: int | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        template_date: date | None = None,
    ) -> Tokenizer:
        """Return the tokenizer of a folder. `config.json` gives end and padding tokens that the tokenizer files do not
        name. The chat template gets the arguments by name, and the date. Raises ModelError when a file is missing or
        cannot be used, when there is no end-of-sequence token, or when the vocabulary has an id at or above
        `vocab_size`, the rows of the model's embedding."""
        tokenizer = Tokenizer(folder)
        tokenizer.template_arguments = dict(template_arguments or {})
        tokenizer.template_date = template_date
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            raise ModelError(
                f"{folder}/tokenizer.json has token id {tokenizer.vocab_size - 1}, but the model has {vocab_size} rows "
                "(config.json: vocab_size); use the tokenizer that belongs to the model"
            )
        return tokenizer

    def __init__(self, folder: Path) -> None:
        """Read the folder; use `load` instead."""
        found = read_tokenizer(folder)
        self._backend, self._config, self._named, self.sha256 = found.backend, found.config, found.named, found.sha256
        # `save_pretrained` keeps the last call's truncation and padding; transformers resets them at each call.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.folder = folder
        self.template_arguments: Mapping[str, Any] = {}
        self.template_date: date | None = None
        self._compiled: jinja2.Template | None = None
        model = read_object(folder / "config.json")
        self.vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        """Id of every token, special tokens included."""
        self.vocab_size = 1 + max(self.vocabulary.values(), default=-1)
        added = self._backend.get_added_tokens_decoder()
        self.reserved = frozenset(added)
        """Ids of the tokens added to those of text, such as special tokens: each is always one token."""
        self.special_tokens = [token.content for token in added.values() if token.special]
        """Texts of the tokens that `decode` leaves out."""
        self.eos_token_id = self._special_id("eos", model)
        self.pad_token_id = self._special_id("pad", model, default=self.eos_token_id)
        self.eos_token = str(self._backend.id_to_token(self.eos_token_id) or "")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, no special tokens added. Raises ModelError naming a character without any."""
        return list(self._encoding(text).ids)

    def encode_at(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and where in it the characters of each begin. Raises as `encode`."""
        found = self._encoding(text)
        return list(found.ids), [start for start, _ in found.offsets]

    def _encoding(self, text: str) -> Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            words = reduce(lambda left, token: left.replace(token, ""), self.special_tokens, text)
            unknown = next((c for c in words if self._backend.token_to_id(c) is None), None)
            what = f"character {quoted(unknown)} has no token" if unknown is not None else one_line(error, 200)
            raise ModelError(
                f"{self.folder}: {quoted(text)} cannot be encoded: {what}; use another tokenizer"
            ) from error

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of ids that `encode` gives for each text, in less time. Raises as `encode`."""
        try:
            return [len(one) for one in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except Exception:  # noqa: BLE001 - the library raises bare Exception, and does not say for which text
            return [len(self.encode(text)) for text in texts]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of the ids, without special tokens (such as end-of-sequence) unless `special`."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text [ids] that each id adds to those before it, special tokens included. A character of several
        ids comes with the last of them."""
        stream = DecodeStream(skip_special_tokens=False)
        found = [stream.step(self._backend, token) or "" for token in ids]
        whole, joined = self.decode(ids, special=True), "".join(found)
        if found and whole.startswith(joined):
            found[-1] += whole[len(joined) :]  # bytes that make no character, which the stream holds back
        return found

    @property
    def leading(self) -> list[int]:
        """Ids that transformers puts in front of a text, as Llama's <|begin_of_text|>, and `encode` does not."""
        return [token for token in self._backend.encode("").ids if token in self.reserved - {self.eos_token_id}]

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        to_answer: bool = True,
    ) -> str:
        """Return the chat template's text of `messages`, each {"role": …, "content": …}, with the schemas of `tools`;
        with `to_answer`, ready for the model's answer. Raises ModelError when the folder has no chat template or the
        template fails."""
        given = {**self._named, **self.template_arguments}  # special tokens without a name are undefined: no text
        try:
            if self._compiled is None:
                self._compiled = compiled(self.template, self.template_date)
            return self._compiled.render(
                messages=list(messages),
                add_generation_prompt=to_answer,
                tools=list(tools) or None,
                documents=None,
                **given,
            )
        except ModelError:
            raise
        except Exception as error:
            remedy = "correct the template, or what is given to it (task.template_arguments)"
            if "strftime_now" in str(error):
                remedy = (
                    "it writes a date: name the one that every prompt is to have, as in task.template_date=2025-01-31"
                )
            raise ModelError(
                f"{self.folder}: the chat template failed: {one_line(error, 200) or type(error).__name__}; {remedy}"
            ) from error

    @property
    def template_sha256(self) -> str:
        """Digest of the chat template's text. Raises ModelError when the folder has none."""
        return hashlib.sha256(self.template.encode()).hexdigest()

    @property
    def has_template(self) -> bool:
        return (self.folder / "chat_template.jinja").is_file() or self._config.get("chat_template") is not None

    @property
    def template(self) -> str:
        """Text of the chat template. Raises ModelError when the folder has none."""
        separate = self.folder / "chat_template.jinja"
        if separate.is_file():
            try:
                return separate.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelError(f"{separate} cannot be read: {one_line(error, 200)}; copy it again") from error
        template = self._config.get("chat_template")
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        if not isinstance(template, str):
            raise ModelError(f"{self.folder} has no chat template; set task.chat_template=false")
        return template

    def _special_id(self, kind: str, model: dict[str, Any], default: int | None = None) -> int:
        token = self._named.get(f"{kind}_token")
        if token and (found := self._backend.token_to_id(token)) is not None:
            return found
        value = model.get(f"{kind}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            return value
        if default is not None:
            return default
        raise ModelError(
            f"{self.folder}: neither tokenizer_config.json nor config.json names the {kind} token; add {kind}_token"
        )


def check_written(messages: Sequence[Mapping[str, Any]], written: str, template: Tokenizer, where: str) -> None:
    """Raise RecipeError, with `where`, for a message that is not in the template's text `written`, such as one of a
    role that it does not know. The assistant's messages are not checked: templates leave out thoughts."""
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
    """Return private characters that `text` does not hold."""
    return next(mark for mark in map("\ue000{}\ue001".format, count()) if mark not in text)


def compiled(template: str, day: date | None = None) -> jinja2.Template:
    """Compile a template, with `strftime_now` for a given day. Raises jinja2.TemplateError if it is invalid."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    if day is not None:
        environment.globals["strftime_now"] = day.strftime
    return environment.from_string(template)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox for templates, which come with models from anywhere: a template reaches nothing but its text. `*` and
    `**` with huge numbers, which take all memory at once, are refused. Nothing else bounds memory and time: a malicious
    template can double or pad a text until there is no memory left."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raise jinja2.TemplateError for a result that no prompt needs, else return it."""
        size = max((len(one) for one in (left, right) if isinstance(one, str | list | tuple)), default=1)
        if any(isinstance(one, int) and abs(one) * size > _MOST_REPEATED for one in (left, right)):
            raise jinja2.TemplateError(f"{operator} with a number or a text of that size is not allowed")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    """Refuse a conversation, as chat templates do."""
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON in place of Jinja's own filter, which sorts keys and escapes characters for web pages."""
    if indent is not None and not (isinstance(indent, int) and indent <= _DEEPEST_INDENT):
        raise jinja2.TemplateError(f"tojson with an indent of more than {_DEEPEST_INDENT} is not allowed")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """The tags `{% generation %} … {% endgeneration %}` around the model's words, which are kept."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def write_character_tokenizer(folder: Path, characters: str) -> None:
    """Write tokenizer.json and tokenizer_config.json: id 0 pads, id 1 ends, then `characters` in their order. There is
    no unknown token: encoding an unlisted character is an error. Raises ValueError for a repeated character or none."""
    if not characters or len(set(characters)) != len(characters):
        twice = sorted({c for c in characters if characters.count(c) > 1})
        raise ValueError(f"characters are {characters!r}, expected at least one and none twice (twice: {twice})")
    vocabulary = {token: id for id, token in enumerate((PAD_TOKEN, END_TOKEN, *characters))}
    tokenizer = Backend(models.WordLevel(vocabulary))
    # Without a split the whole text would be one word; `[\s\S]` also takes line ends.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(PAD_TOKEN, special=True), AddedToken(END_TOKEN, special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "eos_token": END_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
