"""Read the tokenizer that transformers' AutoTokenizer makes of a local HF folder, mostly without transformers.

A folder's tokens come from tokenizer.json, from tokens that tokenizer_config.json and the older special_tokens_map.json
and added_tokens.json add or name, and from the class, which may rebuild all but the vocabulary. For most folders it can
be shown that tokenizer.json is already the result. Any other folder is read by AutoTokenizer itself, where transformers
is installed, and refused elsewhere: importing transformers takes torch, and seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pipeline.data.files import MODEL_JSON_BYTES, read_at_most
from pipeline.errors import ModelError
from pipeline.importing import pip_install
from precision.text import one_line, parse_object, quoted

TOKENIZER_BYTES = 256 << 20
"""Largest tokenizer.json; with 260,000 tokens it has some 35 MB."""
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Names of special tokens in tokenizer_config.json and in chat templates."""
_UNCHANGED = ("PreTrainedTokenizer", "TokenizersBackend")
"""Classes, without the ending Fast, that use tokenizer.json as it stands."""
_QWEN, _QWEN_MODELS = "Qwen2Tokenizer", ("qwen2", "qwen3", "qwen3_moe")
_QWEN_NAMES = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OTHERWISE = ("auto_map", "fast_tokenizer_files", "init_inputs", "split_special_tokens", "add_prefix_space", "backend")
"""Keys of tokenizer_config.json that may make other tokens of the same files."""
_OLDER = ("tokenizer.model", "vocab.json", "spiece.model", "*.tiktoken")
"""Vocabulary files from before tokenizer.json."""


@dataclass(frozen=True)
class FolderTokenizer:
    backend: Backend
    config: Mapping[str, Any]
    """Contents of tokenizer_config.json; empty without the file."""
    named: Mapping[str, str]
    """Text of the special tokens, by names such as eos_token."""
    sha256: str
    """Digest of tokenizer.json; where other files change the tokenizer, of the result."""


def read_tokenizer(folder: Path) -> FolderTokenizer:
    """Return the tokenizer of a folder. Raises ModelError, which names the file."""
    path = folder / "tokenizer.json"
    try:
        data = read_at_most(path, TOKENIZER_BYTES)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and any(any(folder.glob(name)) for name in _OLDER):
            return _by_transformers(folder, "it has no tokenizer.json, only files of an older kind")
        below = folder / "tokenizer" / path.name
        within = f"; {below.parent} holds one: copy its files to {folder}" if below.is_file() else ""
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"cannot read {path}: {reason}; model.path must be an HF folder with a fast tokenizer{within}"
        ) from error
    try:
        backend = Backend.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{path} is not a tokenizer: {one_line(error, 200)}; copy it again from the model's origin"
        ) from error
    config = read_object(folder / "tokenizer_config.json")
    reading = _Reading(folder, config, backend)
    if (why := reading.difference()) is not None:
        return _by_transformers(folder, why)
    return FolderTokenizer(backend, config, reading.named, hashlib.sha256(data).hexdigest())


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object of a model folder; empty without the file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        return parse_object(read_at_most(path, MODEL_JSON_BYTES))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; copy it again from the model's origin") from error
    except ValueError as error:
        raise ModelError(f"{path} is damaged: {error}; copy it again from the model's origin") from None


class _Reading:
    """A comparison of a folder's tokenizer.json with what AutoTokenizer would make of the folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any], backend: Backend) -> None:
        self.folder, self.config, self.backend = folder, config, backend
        self.added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.by_text = {token.content: token for token in self.added.values()}
        self.model = read_object(folder / "config.json")
        self.legacy = "added_tokens_decoder" not in config  # otherwise the two older files are ignored
        self.map = read_object(folder / "special_tokens_map.json") if self.legacy else {}
        class_name = config.get("tokenizer_class") or self.model.get("tokenizer_class")
        self.class_name = class_name.removesuffix("Fast") if isinstance(class_name, str) else None
        model_type = self.model.get("model_type")
        if model_type == "qwen2" or (class_name is None and model_type in _QWEN_MODELS):
            self.class_name = _QWEN  # whatever the folder says

        self.is_qwen = self.class_name == _QWEN
        every = {**(_QWEN_NAMES if self.is_qwen else {}), **self.config, **self.map}
        self.named = {name: text for name in SPECIAL_TOKENS if (text := content_of(every.get(name))) is not None}
        """Text of each named special token, from the last file that names it."""

    def difference(self) -> str | None:
        """Return the reason, for people, why AutoTokenizer may make other tokens; None if it cannot."""
        for key in _OTHERWISE:
            if self.config.get(key):
                return f"tokenizer_config.json sets {key}"
        model_type = self.model.get("model_type")
        if model_type not in (None, "", "llama", *_QWEN_MODELS) or self.class_name not in (None, *_UNCHANGED, _QWEN):
            return f"its tokenizer_class is {quoted(self.class_name)}, its model_type {quoted(model_type)}"
        if not self.is_qwen:
            return self._of_other_tokens()
        if not _is_qwens(self.backend):
            return f"its tokenizer_class {_QWEN} splits text otherwise than tokenizer.json"
        listed = None if self.legacy else self.config["added_tokens_decoder"]
        if isinstance(listed, dict) and {str(token_id) for token_id in self.added} - set(listed):
            return "tokenizer_config.json (added_tokens_decoder) leaves out tokens of tokenizer.json"
        base = self.backend.get_vocab_size(with_added_tokens=False)
        behind = sorted(token_id for token_id in self.added if token_id >= base)
        within = all(self.backend.model.token_to_id(t.content) == i for i, t in self.added.items() if i < base)
        if behind != list(range(base, base + len(behind))) or not within:
            return "the added tokens of tokenizer.json do not follow its vocabulary"
        return self._of_other_tokens()

    def _of_other_tokens(self) -> str | None:
        """Return the first token that another file adds, changes or names otherwise than tokenizer.json; or None."""
        file = "tokenizer_config.json"
        listed = self.config.get("added_tokens_decoder", {})
        for token_id, token in listed.items() if isinstance(listed, dict) else (("", listed),):
            here = self.added.get(int(token_id)) if str(token_id).isdecimal() else None
            given = {**_flags(AddedToken("")), **token} if isinstance(token, dict) else {}
            if here is None or any(given.get(name) != value for name, value in _flags(here).items()):
                return f"{file} (added_tokens_decoder) gives token {quoted(token_id)} otherwise than tokenizer.json"
        for source, data in ((file, self.config), ("special_tokens_map.json", self.map)):
            tokens = [
                value
                for key, value in data.items()
                if key.endswith("_token") and value is not None and not isinstance(value, bool)
            ]
            for key in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
                listed = data.get(key) or []
                listed = [*listed.values()] if isinstance(listed, dict) else listed
                tokens += listed if isinstance(listed, list) else [listed]
            for token in tokens:
                if (text := content_of(token)) is None or not self._is_special(text, token):
                    return f"{source} names {quoted(text or token)}, which is no such special token in tokenizer.json"
        if self.is_qwen and (other := set(self.named.values()) - set(self.by_text)):
            return f"its tokenizer_class names {quoted(min(other))}, which is no special token in tokenizer.json"
        if self.legacy:
            for text, token_id in read_object(self.folder / "added_tokens.json").items():
                here = self.added.get(token_id) if isinstance(token_id, int) else None
                if here is None or here.content != text:
                    return f"added_tokens.json gives {quoted(text)} the id {quoted(token_id)}, tokenizer.json does not"
        return None

    def _is_special(self, text: str, token: Any) -> bool:
        here = self.by_text.get(text)
        if here is None or not here.special:
            return False
        if isinstance(token, dict) and token.get("__type") != "AddedToken" and not self.legacy:
            return False
        if self.legacy or _flags(here) == _flags(AddedToken(text, special=True, normalized=False)):
            return True
        listed = self.config["added_tokens_decoder"]
        return isinstance(listed, dict) and any(content_of(token) == text for token in listed.values())


def content_of(token: Any) -> str | None:
    """Return the text of a special token, which HF writes as text or as {"content": text, …}; None for other values."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _flags(token: AddedToken) -> dict[str, Any]:
    return {name: getattr(token, name) for name in _FLAGS}


def _is_qwens(backend: Backend) -> bool:
    """Return whether all but vocabulary and merges is as transformers builds it for Qwen2Tokenizer."""
    usual = dict(dropout=None, fuse_unk=False, byte_fallback=False, ignore_merges=False)
    model = backend.model
    if type(model).__name__ != "BPE" or any(getattr(model, name) != value for name, value in usual.items()):
        return False
    if model.unk_token or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    split = pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated", invert=False)
    wanted = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    found = (_state(backend.normalizer), _state(backend.pre_tokenizer), _state(backend.decoder).get("type"))
    return found == (dict(type="NFC"), _state(wanted), "ByteLevel")


def _state(part: Any) -> dict[str, Any]:
    """Return the settings of a tokenizer's part, without those that concern offsets alone."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(one) for key, one in value.items() if key != "trim_offsets"}
        return [kept(one) for one in value] if isinstance(value, list) else value

    return {} if part is None else dict(kept(json.loads(part.__getstate__())))


def _by_transformers(folder: Path, why: str) -> FolderTokenizer:
    """Return AutoTokenizer's tokenizer. Raises ModelError where transformers is missing or fails."""
    save = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(
            f"{folder}: {why}, so that only transformers knows its tokens, which this machine has not; "
            f"{pip_install('transformers')}, or call {save} where it is"
        ) from None
    try:
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file may raise anything
        raise ModelError(
            f"{folder}: {why}, and transformers cannot read it ({type(error).__name__}: {one_line(error, 300)}); copy "
            "the tokenizer again from the model's origin"
        ) from error
    backend = getattr(theirs, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelError(
            f"{folder}: {why}, and transformers makes a {type(theirs).__name__} of it, which is no fast tokenizer; "
            "give the folder a tokenizer.json"
        )
    named = {name: text for name, text in theirs.special_tokens_map.items() if isinstance(text, str)}
    config = read_object(folder / "tokenizer_config.json")
    return FolderTokenizer(backend, config, named, hashlib.sha256(backend.to_str().encode()).hexdigest())
