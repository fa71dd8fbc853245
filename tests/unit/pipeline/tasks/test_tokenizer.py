"""Tokenizers: the ids of transformers, nothing dropped, clear refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pipeline.errors import ModelError
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.support.files import huge_at, pipe_at

CHARACTERS = "0123456789=+ \nabé漢"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("characters")
    write_character_tokenizer(path, CHARACTERS)
    return path


def edit(folder: Path, name: str, **keys: object) -> None:
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (config | keys).items() if value is not None}))


def test_one_token_a_character(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("10=") == [3, 2, 12]
    assert tokenizer.decode([3, 2, 12]) == "10="
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (0, 1, 2 + len(CHARACTERS))
    assert tokenizer.sha256 == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8192


@given(text=st.text(CHARACTERS))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_comes_back(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["1x2", "x", "10=\t"])
def test_an_unknown_character_is_named(folder: Path, text: str) -> None:
    unknown = next(c for c in text if c not in CHARACTERS)
    with pytest.raises(ModelError, match="has no token") as caught:
        Tokenizer.load(folder).encode(text)
    assert f"character {unknown!r}" in str(caught.value)


@pytest.mark.parametrize("characters", ["", "aa", "0120"])
def test_characters_must_be_some_and_different(tmp_path: Path, characters: str) -> None:
    with pytest.raises(ValueError, match="none twice"):
        write_character_tokenizer(tmp_path, characters)


def test_a_vocabulary_beyond_the_models_rows_is_refused(folder: Path) -> None:
    size = len(CHARACTERS) + 2
    Tokenizer.load(folder, vocab_size=size)
    with pytest.raises(ModelError, match=rf"token id {size - 1}, but the model has {size - 1} rows"):
        Tokenizer.load(folder, vocab_size=size - 1)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json: No such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
    write_character_tokenizer(tmp_path, "ab")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is damaged: not JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"holds \[\], expected an object"):
        Tokenizer.load(tmp_path)
    huge_at(tmp_path / "tokenizer_config.json")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is damaged: it is larger than 16 MiB; copy it again"):
        Tokenizer.load(tmp_path)
    for put, said in ((pipe_at, "no regular file"), (huge_at, "larger than 256 MiB")):
        put(tmp_path / "tokenizer.json")
        with pytest.raises(ModelError, match=rf"cannot read \S+tokenizer\.json: it is {said}; model\.path must be"):
            Tokenizer.load(tmp_path)


def test_where_the_end_token_comes_from(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, "ab")
    edit(tmp_path, "tokenizer_config.json", eos_token={"__type": "AddedToken", "content": "b"}, pad_token=None)
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (3, 3)  # without a padding token, the end pads
    edit(tmp_path, "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="names the eos token; add eos_token"):
        Tokenizer.load(tmp_path)
    edit(tmp_path, "config.json", eos_token_id=[2, 3], pad_token_id=0)
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    edit(tmp_path, "tokenizer_config.json", eos_token="<|gone|>")
    assert Tokenizer.load(tmp_path).eos_token_id == 4  # transformers adds a token that a name is given to
    with pytest.raises(ModelError, match="token id 4, but the model has 4 rows"):
        Tokenizer.load(tmp_path, vocab_size=4)


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A byte-level BPE with no merges and chat markers, as Qwen's is built."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    edit(tmp_path, "tokenizer_config.json", eos_token="<|im_end|>", tokenizer_class="PreTrainedTokenizerFast")
    return tmp_path


CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
)


@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_the_chat_template_is_transformers_own(byte_level: Path, place: str) -> None:
    from transformers import AutoTokenizer

    if place == "file":
        (byte_level / "chat_template.jinja").write_text(CHATML)
    else:
        template = CHATML if place == "config" else [{"name": "default", "template": CHATML}]
        edit(byte_level, "tokenizer_config.json", chat_template=template)
    ours, theirs = Tokenizer.load(byte_level), AutoTokenizer.from_pretrained(str(byte_level))
    text = ours.conversation([dict(role="user", content="Sortiere: é {{ 1 + 1 }} <b>")])
    assert text == "<|im_start|>user\nSortiere: é {{ 1 + 1 }} <b><|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": "Sortiere: é {{ 1 + 1 }} <b>"}]
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text).count(256) == 2  # markers are single tokens
    assert ours.decode(ours.encode(text)).startswith("user\nSortiere: é")


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ pad_token }}hi{{ eos_token }}{% if bos_token is defined %}!{% endif %}",
        "{{ {'b': \"it's <x> é\", 'a': [1, None]} | tojson }}{{ messages | tojson(indent=2) }}",
        "{% if tools is not none %}A{% else %}B{% endif %}{% if tools is defined %}C{% endif %}{{ documents }}",
        "{{ tools | tojson }}{% if not tools and not documents %}none{% endif %}",
        "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}\n{% endgeneration %}{{ x }}{% endfor %}",
    ],
)
def test_what_templates_may_use_is_transformers_own(byte_level: Path, template: str) -> None:
    from transformers import AutoTokenizer

    edit(byte_level, "tokenizer_config.json", chat_template=template)
    messages = [{"role": "user", "content": "é <b>"}, {"role": "assistant", "content": "it's"}]
    theirs = AutoTokenizer.from_pretrained(str(byte_level))
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert Tokenizer.load(byte_level).conversation(messages) == expected


def test_what_the_file_keeps_of_a_former_call_is_not_done(byte_level: Path) -> None:
    """`save_pretrained` writes the truncation and the padding that the last call asked for."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(byte_level))
    theirs.pad_token = "<|im_end|>"
    theirs(["0123456789", "1"], truncation=True, max_length=4, padding="longest")
    theirs.save_pretrained(str(byte_level))
    kept = json.loads((byte_level / "tokenizer.json").read_text())
    assert kept["truncation"]
    assert kept["padding"]
    texts, again = ["0", "0123456789=", "01"], AutoTokenizer.from_pretrained(str(byte_level))
    ours = Tokenizer.load(byte_level)
    assert [ours.encode(text) for text in texts] == [again.encode(text, add_special_tokens=False) for text in texts]
    assert ours.count(texts) == [len(ours.encode(text)) for text in texts] == [1, 11, 2]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ messages | tojson(indent=10**9) }}", "the chat template failed: tojson with an indent"),
        ("{{ raise_exception('no system role') }}", "failed: no system role"),
        ("{% if %}", "the chat template failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template failed"),
        ("{{ 1 / 0 }}", "the chat template failed: division by zero"),
        ("{{ 'a' * 10**10 }}", "the chat template failed: .* of that size is not allowed"),
        ("{{ 9**9**9 }}", "the chat template failed: .* of that size is not allowed"),
        ("{{ 10**10 * ([1] * 10**7) }}", "the chat template failed: .* of that size is not allowed"),
        ("{% for i in range(10**9) %}x{% endfor %}", "the chat template failed: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template failed: maximum recursion"),
        ("{{ raise_exception('no' + '\n' * 2 + 'way') }}", "failed: no way"),
    ],
)
def test_a_chat_template_that_is_missing_failing_or_hostile(
    byte_level: Path, template: str | None, message: str
) -> None:
    edit(byte_level, "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(byte_level).conversation([dict(role="user", content="hello")])


def bytes_tokenizer(folder: Path) -> Tokenizer:
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    return Tokenizer.load(folder)


def test_a_character_of_several_tokens_is_with_the_last_of_them(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(tmp_path)
    assert tokenizer.pieces(tokenizer.encode("aé漢 ")) == ["a", "", "é", "", "", "漢", " "]
    assert tokenizer.pieces(tokenizer.encode("a漢")[:3]) == ["a", "", "\ufffd"]
    assert tokenizer.pieces([]) == []


def test_pieces_are_the_whole_text_whatever_the_tokens(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(tmp_path)
    random = np.random.default_rng(0)
    for _ in range(50):
        ids = random.integers(0, 256, 40).tolist()
        assert "".join(tokenizer.pieces(ids)) == tokenizer.decode(ids, special=True)
