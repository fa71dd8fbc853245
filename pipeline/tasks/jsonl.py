"""Problems from a JSON Lines file: one `{"prompt": …, "answer": …}` a line, further keys ignored."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.config.task_sections import JsonlTask
from pipeline.errors import RecipeError
from pipeline.tasks.base import HELD_OUT_ONE_IN, Problem, check_index, is_held_out
from precision.text.json_data import JsonError, parse_json
from precision.text.short import one_line, quoted

_BUILT_IN = ("math_verify", "python_tests")
"""Rewards with a short name; both are in pipeline.rewards.verifiers."""
_MOST_BYTES = 16 << 20
"""Longest line."""


class Jsonl:
    """Problems of a file, all in memory. Held out are those of `held_out_path`, else 1 in 16 by prompt text.

    Raises RecipeError, with file and line, for anything that is not a problem, and for a training prompt that the
    held-out file holds too.
    """

    characters = None

    def __init__(self, section: JsonlTask) -> None:
        self.reward = f"pipeline.rewards.verifiers:{section.reward}" if section.reward in _BUILT_IN else section.reward
        self.chat_template = section.chat_template
        problems = read_problems(section.path)
        if section.held_out_path is None:
            self._training = [p for p in problems if not is_held_out(p.text)]
            self._held_out = [p for p in problems if is_held_out(p.text)]
        else:
            self._training, self._held_out = problems, read_problems(section.held_out_path)
            _refuse_overlap(section.path, problems, section.held_out_path, self._held_out)
        if not self._training or not self._held_out:
            raise RecipeError(
                f"{section.path}: {len(problems)} problems leave {len(self._training)} to train on and "
                f"{len(self._held_out)} held out (1 in {HELD_OUT_ONE_IN} by prompt text), expected some of both; "
                "set task.held_out_path"
            )

    @property
    def num_prompts(self) -> int:
        return len(self._training)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def problem(self, index: int) -> Problem:
        check_index(index, self.num_prompts, "problem")
        return self._training[index]

    def held_out(self, index: int) -> Problem:
        check_index(index, self.num_held_out, "held-out problem")
        return self._held_out[index]

    def demonstration(self, index: int) -> None:
        """There is none: the model can already answer."""


def read_problems(path: Path) -> list[Problem]:
    """All problems of a file, blank lines skipped. Raises RecipeError naming file and line."""
    try:
        if not path.is_file():
            path.stat()
            raise RecipeError(f"{one_line(path, 200)} is not a file; set task.path to a JSON Lines file")
        with path.open("rb") as file:
            return [
                _parse(line, f"{path}, line {number}")
                for number, line in enumerate(_lines(file, path), 1)
                if line.strip(b" \t\r\n")
            ]
    except OSError as error:
        raise RecipeError(
            f"cannot read {one_line(path, 200)}: {error.strerror}; set task.path to a JSON Lines file"
        ) from error


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Lines end with \\n alone. A file without line ends is not read into memory as one."""
    number = 0
    while line := file.readline(_MOST_BYTES + 1):
        number += 1
        if len(line) > _MOST_BYTES:
            raise RecipeError(
                f"{path}, line {number}: longer than {_MOST_BYTES >> 20} MiB; no context holds such a prompt: see "
                "whether the file has line ends"
            )
        yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _parse(line: bytes, where: str) -> Problem:
    try:
        row = parse_json(line.rstrip(b"\r\n"))
    except JsonError as error:
        raise RecipeError(f"{where}: {error}; write one object a line") from None
    if not isinstance(row, dict):
        raise RecipeError(f'{where}: a {type(row).__name__}, expected an object {{"prompt": …, "answer": …}}')
    for key in ("prompt", "answer"):
        if not isinstance(row.get(key), str):
            got = f"{quoted(row[key])}, a {type(row[key]).__name__}" if key in row else "nothing"
            raise RecipeError(f"{where}: {key} is {got}, expected a string; quote it")
    if not row["prompt"]:
        raise RecipeError(f"{where}: prompt is empty, expected text; remove the line")
    return Problem(text=row["prompt"], answer=row["answer"])


def _refuse_overlap(path: Path, training: list[Problem], held_out_path: Path, held_out: list[Problem]) -> None:
    kept_apart = {problem.text for problem in held_out}
    shared = [problem.text for problem in training if problem.text in kept_apart]
    if shared:
        raise RecipeError(
            f"{path} and {held_out_path} share {len(shared)} prompts, the first {quoted(shared[0])}; evaluation would "
            "measure memory: remove them from one of the two"
        )
