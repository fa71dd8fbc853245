"""Folders of every kind give the tokens that transformers' AutoTokenizer makes of them, or are refused by a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pipeline.errors import ModelError
from pipeline.tasks import folder_tokenizer
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer

TEXTS = (
    *(
        "",
        "Hello, hello world",
        "  two  spaces\n\n\ttab ",
        "1234567 3.14",
        "naïve café e\u0301 Å",
        "漢字 🙂",
        "don't WE'LL",
    ),
    *(
        "<|im_start|>user\nhi<|im_end|>",
        "<|endoftext|>x",
        "<s>a</s>",
        " <extra>  <mapped> b",
        "<added>a<listed>",
        "a b\n0",
    ),
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"


def byte_level(split: str) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("o", "r"), ("1", "2"), ("3", "4"), ("Ġ", "w")]
    vocabulary = {token: id for id, token in enumerate([*alphabet, *dict.fromkeys("".join(one) for one in merges)])}
    backend = Backend(models.BPE(vocabulary, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


def qwen(folder: Path) -> None:
    byte_level(folder_tokenizer._QWEN_SPLIT).save(str(folder / "tokenizer.json"))
    names = dict(eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None, bos_token=None)
    write(folder, "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer", **names)
    write(folder, "config.json", model_type="qwen3", eos_token_id=1)


def llama3(folder: Path) -> None:
    backend = byte_level(LLAMA3)
    bos = backend.token_to_id("<|im_start|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", bos)]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = dict(eos_token="<|im_end|>", bos_token="<|im_start|>")
    write(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **names)
    write(folder, "config.json", model_type="llama", eos_token_id=1)


def llama2(folder: Path) -> None:
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefhilmnorstuwx"]
    vocabulary = {token: id for id, token in enumerate([*letters, "he", "ll", "▁w"])}
    merges = [("h", "e"), ("l", "l"), ("▁", "w")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    backend.save(str(folder / "tokenizer.json"))
    names = dict(eos_token="</s>", bos_token="<s>", unk_token="<unk>")
    write(folder, "tokenizer_config.json", tokenizer_class="LlamaTokenizer", add_bos_token=True, **names)
    write(folder, "config.json", model_type="llama", eos_token_id=2)


def characters(folder: Path) -> None:
    write_character_tokenizer(folder, "".join(sorted({c for text in TEXTS for c in text})))
    write(folder, "config.json", model_type="qwen3", eos_token_id=1)


def older(folder: Path) -> None:
    """Qwen's files before there was tokenizer.json."""
    qwen(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = [" ".join(one) if isinstance(one, list) else one for one in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n", encoding="utf-8")


def write(folder: Path, name: str, **keys: Any) -> None:
    """Change keys of a JSON file; ... takes one away."""
    path = folder / name
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = {key: value for key, value in (data | keys).items() if value is not ...}
    path.write_text(json.dumps(kept), encoding="utf-8")


def config(**keys: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder, "tokenizer_config.json", **keys)


def model(**keys: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder, "config.json", **keys)


def mapped(**keys: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder, "special_tokens_map.json", **keys)


def added(**tokens: int) -> Callable[[Path], None]:
    return lambda folder: write(folder, "added_tokens.json", **{f"<{name}>": id for name, id in tokens.items()})


def listed(extra: str | None = None, leave_out: int = 0, **flags: Any) -> Callable[[Path], None]:
    """`added_tokens_decoder` of the tokens that tokenizer.json adds, and of another one."""

    def change(folder: Path) -> None:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        tokens = {id: folder_tokenizer._flags(token) for id, token in backend.get_added_tokens_decoder().items()}
        tokens = dict(sorted(tokens.items())[leave_out:])
        if extra is not None:
            tokens[backend.get_vocab_size()] = folder_tokenizer._flags(AddedToken(extra)) | flags
        write(folder, "tokenizer_config.json", added_tokens_decoder={str(id): token for id, token in tokens.items()})

    return change


def nothing(_: Path) -> None:
    """As it is."""


QWEN_SIZE = 256 + 7 + len(SPECIAL)
TOKEN = dict(content="<mapped>", lstrip=True, rstrip=False, normalized=False, single_word=False)
FOLDERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], bool]] = {
    # name: how it is made, what is changed, whether that takes transformers
    "qwen": (qwen, nothing, False),
    "qwen, class of fast": (qwen, config(tokenizer_class="Qwen2TokenizerFast"), False),
    "qwen, no class": (qwen, config(tokenizer_class=...), False),
    "qwen, plain class": (qwen, config(tokenizer_class="PreTrainedTokenizerFast"), False),
    "qwen, its tokens listed": (qwen, listed(), False),
    "qwen, a token listed besides": (qwen, listed("<listed>"), True),
    "qwen, a special token listed besides": (qwen, listed("<listed>", special=True, lstrip=True), True),
    "qwen, not all listed": (qwen, listed(leave_out=1), True),
    "qwen, a token in added_tokens.json": (qwen, added(added=QWEN_SIZE), True),
    "qwen, two tokens in added_tokens.json": (qwen, added(added=QWEN_SIZE + 1, extra=QWEN_SIZE), True),
    "qwen, special_tokens_map.json says the same": (qwen, mapped(eos_token="<|im_end|>"), False),
    "qwen, special_tokens_map.json says another end": (qwen, mapped(eos_token="<|endoftext|>"), False),
    "qwen, special_tokens_map.json names a new start": (qwen, mapped(bos_token=TOKEN), True),
    "qwen, special_tokens_map.json names further ones": (qwen, mapped(additional_special_tokens=["<extra>"]), True),
    "qwen, map beside a list": (qwen, lambda f: (listed()(f), mapped(eos_token="<|endoftext|>")(f))[0], False),
    "qwen, further special tokens": (qwen, config(additional_special_tokens=["<extra>"]), True),
    "qwen, further special tokens that are there": (qwen, config(additional_special_tokens=list(SPECIAL)), False),
    "qwen, extra_special_tokens": (qwen, config(extra_special_tokens={"image_token": "<extra>"}), True),
    "qwen, a token of its own": (qwen, config(think_token="<extra>"), True),
    "qwen, no end named": (qwen, config(eos_token=...), False),
    "qwen, an end that is no token": (qwen, config(eos_token="<extra>"), True),
    "qwen, a start": (qwen, config(bos_token="<|im_start|>", add_bos_token=True), False),
    "qwen, special tokens split": (qwen, config(split_special_tokens=True), True),
    "qwen, prefix space": (qwen, config(add_prefix_space=True), True),
    "qwen2": (qwen, model(model_type="qwen2"), False),
    "qwen2, plain class": (qwen, lambda f: (model(model_type="qwen2")(f), config(tokenizer_class="X")(f))[0], False),
    "qwen, another class": (qwen, config(tokenizer_class="LlamaTokenizerFast"), True),
    "qwen, no model": (qwen, lambda f: (f / "config.json").unlink(), False),
    "qwen, older files": (older, nothing, True),
    "qwen, older files and added tokens": (older, added(added=256 + 7), True),
    "llama 3": (llama3, nothing, False),
    "llama 3, ends added": (llama3, config(add_eos_token=True, add_bos_token=False), False),
    "llama 3, a token listed besides": (llama3, listed("<listed>", special=True), True),
    "llama 3, special_tokens_map.json": (llama3, mapped(bos_token="<|endoftext|>", eos_token=TOKEN), True),
    "llama 3, other start mapped": (llama3, mapped(bos_token="<|endoftext|>"), False),
    "llama 3, added_tokens.json": (llama3, added(added=QWEN_SIZE), True),
    "llama 3, class of Llama": (llama3, config(tokenizer_class="LlamaTokenizerFast"), True),
    "llama 3 in a Qwen2 folder": (llama3, model(model_type="qwen2"), True),
    "llama 2": (llama2, nothing, True),
    "llama 2, plain class": (llama2, config(tokenizer_class="PreTrainedTokenizerFast"), False),
    "llama 2, prefix off": (llama2, config(add_prefix_space=False), True),
    "characters": (characters, nothing, False),
    "characters, a token added": (characters, mapped(additional_special_tokens=["<extra>"]), True),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_tokens_are_auto_tokenizers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    make, change, by_transformers = FOLDERS[name]
    make(tmp_path)
    change(tmp_path)
    asked: list[str] = []
    ask = folder_tokenizer._by_transformers
    monkeypatch.setattr(folder_tokenizer, "_by_transformers", lambda folder, why: asked.append(why) or ask(folder, why))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert ours.vocabulary == theirs.get_vocab()
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, special=True) == theirs.decode(ids)
    named = {key: text for key, text in theirs.special_tokens_map.items() if isinstance(text, str)}
    assert {key: ours._named.get(key) for key in ("bos_token", "eos_token")} == {
        key: named.get(key) for key in ("bos_token", "eos_token")
    }
    assert theirs.eos_token_id in (None, ours.eos_token_id)
    assert bool(asked) == by_transformers, asked


@pytest.mark.parametrize("name", [name for name, (*_, by_transformers) in FOLDERS.items() if by_transformers])
def test_without_transformers_what_only_it_knows_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, change, _ = FOLDERS[name]
    make(tmp_path)
    change(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"only transformers knows its tokens.*pip install.*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("listed", [5, "<extra>", [5]])
def test_special_tokens_that_are_no_list_are_refused_by_the_file_s_name(tmp_path: Path, listed: object) -> None:
    characters(tmp_path)
    mapped(additional_special_tokens=listed)(tmp_path)
    with pytest.raises(ModelError, match=r"special_tokens_map\.json names .*, and transformers cannot read it"):
        Tokenizer.load(tmp_path)


def test_tokens_that_another_file_adds_are_part_of_the_digest(tmp_path: Path) -> None:
    qwen(tmp_path)
    before = Tokenizer.load(tmp_path)
    added(added=QWEN_SIZE)(tmp_path)
    after = Tokenizer.load(tmp_path)
    assert after.encode("<added>") == [QWEN_SIZE] != before.encode("<added>")
    assert after.sha256 != before.sha256
