"""Read the problems of a run from files or folders of rows: JSON Lines, Parquet, Hugging Face datasets.

    row ──columns──▶ prompt, answer, metadata ──task.filter──▶ Problem        held out: held_out_path, or 1 in 16

A filter is a user's function that is called for every row, training and held out, at each start:

    def short(answer, metadata):        # any of prompt, answer, metadata; null is None
        return answer is not None and len(answer) < 10 and metadata["level"] != "hard"

A run's groups are numbers of rows. In changed, cut or reordered data the same numbers mean other prompts; another chat
template or choice of rows changes all of them. So digests of the data, of the rows that the filter keeps, and of the
chat template are frozen with the recipe.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.config.task_sections import DataTask
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError
from pipeline.importing import own_function, truth_of
from pipeline.tasks.rows import Row, data_files, read_rows, refusing_unreadable
from pipeline.tasks.task import HELD_OUT_ONE_IN, Problem, Task, check_index, is_held_out, normalized
from pipeline.tasks.tokenizer import Tokenizer
from precision.text import listed, one_line, quoted

_BUILT_IN = ("math_verify", "python_tests", "exact_match")
"""Short names of rewards in pipeline.rewards.verifiers."""


class Data(Task):
    """The problems of files, all in memory. Held out are those of `held_out_path`, else 1 in 16 by prompt text. Raises
    RecipeError, with file and row, for a row that is not a problem, and for a training prompt that is also held out."""

    characters = None

    def __init__(self, section: DataTask) -> None:
        self.reward = f"pipeline.rewards.verifiers:{section.reward}" if section.reward in _BUILT_IN else section.reward
        self.chat_template = section.chat_template
        assert section.path is not None, "of a task with sources each is asked for by itself"
        problems, notes = filtered(section.path, section)
        times = Counter(problem.text for problem in problems)
        if again := len(problems) - len(times):  # they stay: the repetition may be intended
            answers = Counter(text for text, _ in {(problem.text, problem.answer) for problem in problems})
            unsure = sum(count > 1 for count in answers.values())
            and_so = f"; {unsure} prompts come with different answers" if unsure else ""
            text, most = times.most_common(1)[0]
            notes.append(
                f"{section.path}: {again} of {len(problems)} rows repeat the prompt of another{and_so}; {quoted(text)} "
                f"comes {most} times in an epoch"
            )
        if section.held_out_path is None:
            # Groups number the training problems, so a prompt with two spellings stays there and is not held out.
            self._training = [p for p in problems if not is_held_out(p.text)]
            trained = {normalized(problem.text) for problem in self._training}
            apart = [p for p in problems if is_held_out(p.text)]
            self._held_out = [p for p in apart if normalized(p.text) not in trained]
            if out := len(apart) - len(self._held_out):
                said = "held-out prompts differ from one to train on in case or white space alone, and are left out"
                notes.append(f"{out} of {len(apart)} {said}")
        else:
            self._training = problems
            self._held_out, left_out = filtered(section.held_out_path, section)
            notes += left_out
            kept_apart = {normalized(problem.text) for problem in self._held_out}
            if shared := [problem.text for problem in problems if normalized(problem.text) in kept_apart]:
                raise RecipeError(
                    f"{section.path} and {section.held_out_path} share {len(shared)} prompts, the first "
                    f"{quoted(shared[0])}; evaluation would measure memory: remove them from one of the two"
                )
        self.notes = tuple(notes)
        self.num_prompts, self.num_held_out = len(self._training), len(self._held_out)
        if not self._training or not self._held_out:
            raise RecipeError(
                f"{section.path}: {len(problems)} problems leave {len(self._training)} to train on and "
                f"{len(self._held_out)} held out (1 in {HELD_OUT_ONE_IN} by prompt text), expected some of both; "
                "set task.held_out_path"
            )

    def problem(self, index: int) -> Problem:
        check_index(index, self.num_prompts, "problem")
        return self._training[index]

    def held_out(self, index: int) -> Problem:
        check_index(index, self.num_held_out, "held-out problem")
        return self._held_out[index]


_MISSING = object()
_KIND = {"dict": "an object", "list": "a list", "bool": "true or false", "float": "a number", "int": "a number"}


def problem_of(row: Row, section: DataTask, keeps: Callable[..., bool] | None = None) -> Problem | None:
    """Return the problem in a row; None where `keeps`, called with prompt, answer (None where they are null) and
    metadata, returns False. Raises RecipeError that names the row and its keys."""
    columns = section.columns
    name = columns.prompt or ("messages" if "messages" in row.values and "prompt" not in row.values else "prompt")
    text, messages = _prompt(row, name, section)
    answer = _answer(row, section)
    used = {name, columns.answer}
    metadata = {key: plain(value) for key, value in row.values.items() if key not in used}
    if keeps is not None and not keeps(prompt=text, answer=answer, metadata=metadata):
        return None
    if text is None or answer is None:
        what, column = ("prompt", name) if text is None else ("answer", columns.answer)
        raise RecipeError(
            f"{row.where} has no {what}: {one_line(column, 60)} is null, expected a value; remove the row, or leave it "
            "out by task.filter"
        )
    if not text:
        raise RecipeError(f"{row.where}: {name} is empty, expected text; remove the row")
    return Problem(text=text, answer=answer, messages=messages, metadata=metadata, where=row.where)


def _prompt(row: Row, name: str, section: DataTask) -> tuple[str | None, tuple[dict[str, Any], ...]]:
    """Return a row's prompt text, None where it is null, and its conversation, empty for text without a system prompt.
    The system prompt is the row's, or if null or empty the task's. Raises RecipeError for an invalid prompt, a
    conversation in which the model has no turn, and a row without the column of system prompts."""
    found, column, text = _found(row, name), section.columns.system_prompt, None
    if column is not None:
        text = _found(row, column)
        if not isinstance(text, str | None):
            raise _unfit(row, section, "system_prompt", column, text, "text, or null for the task's system_prompt")
    text = text or section.system_prompt
    system = () if text is None else (dict(role="system", content=text),)
    if not isinstance(found, list):
        if not isinstance(found, str | None):
            raise _unfit(row, section, "prompt", name, found, "text or messages")
        return found, (*system, dict(role="user", content=found)) if system else ()
    for one in found:
        if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("role", "content")):
            raise _unfit(row, section, "prompt", name, found, 'text or messages {"role": …, "content": text}')
    messages = tuple({key: value for key, value in one.items() if value is not None} for one in found)
    if not section.chat_template:
        raise RecipeError(
            f"{row.where}: {name} holds messages, which a chat template writes; set task.chat_template=true"
        )
    if not messages or messages[-1]["role"] in ("assistant", "system"):
        last = f"ends with the {messages[-1]['role']}'s message" if messages else "holds no messages"
        raise RecipeError(f"{row.where}: {name} {last}, so that there is nothing to answer; end it with the user's")
    if messages[0]["role"] != "system":
        messages = (*system, *messages)
    return "\n\n".join(str(one["content"]) for one in messages if one["role"] != "system"), messages


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: dates and other types of Parquet as text, NaN and infinity as null."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return _number(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def _answer(row: Row, section: DataTask) -> str | None:
    """Return a row's answer as text, empty where the data has no answers, None where it is null. Numbers are written as
    JSON writes them, but without an exponent: verifiers read 5e-05 as 5·e - 5."""
    if (name := section.columns.answer) is None:
        return ""
    value = _found(row, name)
    if isinstance(value, str | None):
        return value
    if isinstance(value, Decimal) and value.is_finite():
        return _number(value)
    if isinstance(value, dict | list):
        path = [name] if name in row.values else name.split(".")
        kind, kept = _KIND[type(value).__name__], "".join(f"[{quoted(part)}]" for part in path)
        names = isinstance(value, dict) and bool(value) and all(isinstance(key, str) for key in value)
        raise RecipeError(
            f"{row.where}: {one_line(name, 60)} is {quoted(value)}, {kind}, expected text or a number; set "
            f"task.columns.answer to null and read metadata{kept} in a reward function (docs/rewards.md)"
            + (f", or name a part of it, as in {one_line(name, 60)}.{one_line(min(value), 60)}" if names else "")
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _unfit(row, section, "answer", name, value, "text or a number")
    text = json.dumps(value)
    return format(Decimal(text), "f") if "e" in text else text


def _number(value: Decimal) -> str:
    """Return all digits of a number, without zeros at its end: 12.50 as 12.5, and 4E+1 as 40."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _found(row: Row, name: str) -> Any:
    """Return the value of a column, or _MISSING. `a.b` is b of the object a, unless a column has that name."""
    if name in row.values:
        return row.values[name]
    value: Any = row.values
    for part in name.split("."):
        if value is not None:  # a part of null is null
            value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _unfit(row: Row, section: DataTask, what: str, name: str, value: Any, expected: str) -> RecipeError:
    if value is not _MISSING:
        got = f"{quoted(value)}, {_KIND.get(type(value).__name__, type(value).__name__)}"
        return RecipeError(f"{row.where}: {one_line(name, 60)} is {got}, expected {expected}; correct the row")
    keys = listed([one_line(key, 40) for key in row.values], most=12, between=", ") or "none"
    if row.unread:
        others = [f"{one_line(key, 40)} ({one_line(kind, 40)})" for key, kind in row.unread.items()]
        keys += f"; not read: {listed(others, most=12, between=', ')}"
    no_answers = ", or to null where there are no answers" if what == "answer" else ""
    alike = "" if section.held_out_path is None else "; path and held_out_path need the same columns"
    return RecipeError(
        f"{row.where}: {one_line(name, 60)} is nothing, expected {expected}; keys found: {keys}; set "
        f"task.columns.{what} to one of them{no_answers}{alike}"
    )


GIVEN = ("prompt", "answer", "metadata")
"""Parameters that a filter may have."""


def filtered(path: Path, section: DataTask) -> tuple[list[Problem], list[str]]:
    """Return the problems of a file, and notes on rows that were left out. Raises RecipeError, with file and row, for a
    row that is not a problem, and for a filter that cannot be imported, fails, or returns no truth value."""
    asked = _asked(path, section)
    problems = [problem for problem in asked if problem is not None]
    out = len(asked) - len(problems)
    return problems, [f"{path}: {out} of {len(asked)} rows are left out by {section.filter}"] if out else []


def _asked(path: Path, section: DataTask) -> list[Problem | None]:
    """Return the problem of each row, None where the filter leaves it out."""
    if section.filter is None:
        return [problem_of(row, section) for row in read_rows(path)]
    name, (function, names) = section.filter, own_function("task.filter", section.filter, GIVEN)

    def keeps(row: Row, **every: Any) -> bool:
        given = {key: value for key, value in every.items() if key in names}
        null = "".join(f" where {key} is null" for key, value in given.items() if value is None)
        try:
            returned = function(**given)
        except Exception as error:
            raise RecipeError(
                f"{row.where}: task.filter {name} failed{null} ({type(error).__name__}: {one_line(error, 200)}); "
                "correct it"
            ) from error
        if (truth := truth_of(returned)) is None:
            raise RecipeError(
                f"{row.where}: task.filter {name} returned {quoted(returned)}, expected True or False; correct it"
            )
        return truth

    return [problem_of(row, section, partial(keeps, row)) for row in read_rows(path)]


DIGEST_KEYS = frozenset(("task.sha256", "task.template_sha256"))
"""Keys that `with_digest` adds to a recipe."""


def with_digest(recipe: Recipe, run: RunDirectory | None) -> Recipe:
    """Return the recipe with `task.sha256` and `task.template_sha256`, from the frozen recipe of a run with batches,
    else computed now. Raises RecipeError for data that cannot be read, ModelError for a tokenizer that cannot."""
    task = recipe.task
    if not isinstance(task, DataTask):
        return recipe
    if run is not None and os.path.lexists(run.path / "recipe.yaml") and run.num_settled():
        frozen = run.recipe().task
        names = [name for name in ("sha256", "template_sha256") if getattr(task, name) is None]
        known = {name: getattr(frozen, name) for name in names} if isinstance(frozen, DataTask) else {}
        return recipe.model_copy(update=dict(task=task.model_copy(update=known)))
    template = Tokenizer.load(recipe.model.path).template_sha256 if task.chat_template else None
    found = dict(
        sha256=digest(task) if task.sha256 is None else task.sha256,
        template_sha256=template if task.template_sha256 is None else task.template_sha256,
    )
    return recipe.model_copy(update=dict(task=task.model_copy(update=found)))


def check_template(section: object, tokenizer: Tokenizer) -> None:
    """Raise RecipeError when the chat template is not that of `section.template_sha256`."""
    if not isinstance(section, DataTask) or section.template_sha256 is None:
        return
    if (found := tokenizer.template_sha256) != section.template_sha256:
        raise RecipeError(
            f"the chat template of {tokenizer.folder} is not that of this run (sha256 {found[:12]}, expected "
            f"{section.template_sha256[:12]}); put it back, or begin another run.name with it"
        )


def check_digest(section: DataTask) -> None:
    """Raise RecipeError when the data is not that of `section.sha256`."""
    if section.sha256 is not None and (found := digest(section)) != section.sha256:
        paths = listed([one_line(path, 200) for path in data_paths(section)], between=" or ")
        or_kept = ", or task.filter keeps other rows of it" if any(part.filter for part in _parts(section)) else ""
        raise RecipeError(
            f"{paths} is not the data of this run{or_kept} (sha256 {found[:12]}, expected "
            f"{section.sha256[:12]}); put it back, or begin another run.name with it"
        )


def digest(section: DataTask) -> str:
    """Return the digest of all data of the section, training before held out, and of the rows that its filters keep.
    Raises RecipeError as `filtered` does, and for files that cannot be read."""
    data = digest_of_data(*data_paths(section))
    filtering = [(path, part) for part in _parts(section) if part.filter for path in data_paths(part)]
    kept = [bytes(problem is not None for problem in _asked(*each)) for each in filtering]
    return data if not kept else hashlib.sha256(b"\n".join([data.encode(), *kept])).hexdigest()


def digest_of_data(*paths: Path) -> str:
    """Return the SHA-256 of a file's bytes, as sha256sum prints it; of several files, that of their digests. Raises
    RecipeError for files that cannot be read."""
    digests: list[bytes] = []
    for path in paths:
        with refusing_unreadable(path):
            for file in data_files(path):
                with file.open("rb") as opened:
                    digests.append(hashlib.file_digest(opened, "sha256").digest())
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def data_paths(section: DataTask) -> list[Path]:
    """Return the files and folders of each source, training before held out."""
    both = [(part.path, part.held_out_path) for part in _parts(section)]
    return [path for paths in both for path in paths if path is not None]


def _parts(section: DataTask) -> list[DataTask]:
    return [section.of(source) for source in section.sources] or [section]
