"""Problems from JSON Lines: good files whose bytes or values were changed, and attacks on JSON itself."""

from __future__ import annotations

import codecs
import json
import os
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config.task_sections import DataTask
from pipeline.errors import ModelError, RecipeError
from pipeline.tasks import Task, build_task
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.chaos.malformed.mutations import NASTY, judged, mutated_bytes, mutated_data

COUNT = 2000
IN_MAKE_TEST = 60
_HELD_OUT = 5


def prepare() -> None:
    """Imports what the tries need, and makes the tokenizer."""
    _tokenizer()


def attempt(seed: int, folder: Path) -> str:
    """Write a malformed file, read it as a run does, and encode what it holds."""
    rng = random.Random(f"tasks/{seed}")
    path = folder / rng.choice(("p.jsonl",) * 8 + ("ü 🦆.jsonl", "a\nb.jsonl"))
    _write(rng, path)
    held_out = None
    if rng.random() < 0.5:
        held_out = folder / "held-out.jsonl"
        held_out.write_text("\n".join(json.dumps(dict(prompt=f"h{i}", answer="1")) for i in range(_HELD_OUT)))
    section = DataTask(name="data", path=path, held_out_path=held_out)
    return judged(
        lambda: _use(build_task(section, 0)), RecipeError, names=(path.name.replace("\n", " "), held_out or path.name)
    )


def _use(task: Task) -> None:
    problems = [task.problem(i) for i in range(min(50, task.num_prompts))] + [task.held_out(0)]
    for problem in problems:
        try:
            _tokenizer().encode(problem.text)
        except ModelError as error:
            verdict = judged(_raising(error), ModelError)
            assert verdict == "ok", verdict
        json.dumps([problem.text, problem.answer]).encode()
        (problem.text + problem.answer).encode()


def _raising(error: Exception) -> Any:
    def call() -> None:
        raise error

    return call


@cache
def _tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_character_tokenizer(Path(folder), "0123456789+= abcdefghijklmnopqrstuvwxyz")
        return Tokenizer.load(Path(folder))


def _rows(rng: random.Random, count: int = 40) -> list[Any]:
    return [dict(prompt=f"{rng.randrange(10**6)}+{i}=", answer=str(i), level=rng.choice((1, None,
        "x"))) for i in range(count)]  # fmt: skip


def _write(rng: random.Random, path: Path) -> None:
    how = rng.random()
    if how < 0.35:
        rows = _rows(rng)
        rows[rng.randrange(len(rows))] = mutated_data(rng, rng.choice(rows))
        path.write_bytes(_encoded(rng, rows))
    elif how < 0.65:
        path.write_bytes(mutated_bytes(rng, _encoded(rng, _rows(rng))))
    elif how < 0.97:
        lines = [json.dumps(row).encode() for row in _rows(rng)]
        lines.insert(rng.randint(0, len(lines)), rng.choice(_ATTACKS)(rng))
        path.write_bytes(rng.choice((b"\n", b"\n", b"\r\n", b"\n\n", b"\r", b"")).join(lines))
    else:
        _no_file(rng, path)


def _encoded(rng: random.Random, rows: list[Any]) -> bytes:
    ascii_only = rng.random() < 0.7
    text = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows) + rng.choice(("\n", "", "\n\n\n", "\0"))
    data = text.encode(rng.choice(("utf-8",) * 6 + ("utf-16", "utf-32", "latin-1")), "replace")
    return rng.choice((b"", b"", codecs.BOM_UTF8)) + data


def _deep(rng: random.Random) -> bytes:
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"prompt":', b"}"), (b"[[],", b"]")))
    depth = rng.choice((50, 99, 100, 101, 990, 5000, 200_000))
    value = opening * depth + b"1" + closing * rng.choice((depth, depth, depth - 1))
    return rng.choice((b"%s", b'{"prompt": "a", "answer": "b", "x": %s}')) % value


def _value(rng: random.Random) -> bytes:
    values = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 4301, b"-0", b"01", b"0x1", b"'a'", b'"\\ud800"',
        b'"\\u0000"',
              b'"\\x"', b'"\t"', b'"' + b"a" * 2_000_000 + b'"', b"null", b"true", b"[]", b"{}", b'"\xff"',
              b'"\xed\xa0\x80"', b"")  # fmt: skip
    prompt, answer, more = (rng.choice((rng.choice(values), b'"1"')) for _ in range(3))
    return b'{"prompt": %s, "answer": %s, "x": %s}' % (prompt, answer, more)


def _keys(rng: random.Random) -> bytes:
    return rng.choice((
        b'{"prompt": "a", "answer": "b", "prompt": "c"}', b'{"prompt": "a"}', b'{"Prompt": "a", "answer": "b"}',
        b"{}",
        b'{"prompt\\u0000": "a", "answer": "b"}', b'{"prompt": "a", "answer": "b"} {"prompt": "a", "answer": "b"}',
        b'{"prompt": "a", "answer": "b"},', b'[{"prompt": "a", "answer": "b"}]', b'"prompt"', b"prompt,answer",
        b"\x00" * 100,
        b'{"prompt": "a", "answer": "b"' + b', "k": 1' * 50_000 + b"}", b"<html>", b"PK\x03\x04", b"\x1f\x8b\x08\x00",
    ))  # fmt: skip


def _nasty(rng: random.Random) -> bytes:
    row = dict(prompt=rng.choice(NASTY), answer=rng.choice(NASTY))
    return json.dumps(row).encode("utf-8", "surrogatepass")


_ATTACKS = (_deep, _value, _value, _keys, _nasty, _nasty)


def _no_file(rng: random.Random, path: Path) -> None:
    match rng.randrange(6):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(path)
        case 2:
            os.mkfifo(path)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            with path.open("wb") as file:
                file.truncate(rng.choice((0, 1, 40 << 20)))
        case _:
            pass
