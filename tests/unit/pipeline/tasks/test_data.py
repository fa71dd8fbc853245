"""Problems from the data that people have: what is read, what is refused, and what is said about it."""

from __future__ import annotations

import codecs
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.task_sections import DataTask
from pipeline.errors import RecipeError
from pipeline.tasks import Problem, Task, build_task
from pipeline.tasks.data import digest_of_data
from pipeline.tasks.rows import read_rows
from pipeline.tasks.task import is_held_out


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"What is {i}+1?", "answer": str(i + 1)} for i in range(start, start + count)]


def test_jsonl_splits_by_prompt_text(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *rows(300), "\n", {"prompt": "é?", "answer": "è", "source": "metadata"})
    task = build_task(DataTask(name="data", path=path), seed=3)
    training = [task.problem(i) for i in range(task.num_prompts)]
    held_out = [task.held_out(i) for i in range(task.num_held_out)]
    assert len(training) + len(held_out) == 301
    assert [p.text for p in held_out] == [r["prompt"] for r in rows(300) if is_held_out(r["prompt"])]
    assert Problem(text="What is 5+1?", answer="6") in training + held_out
    assert Problem(text="é?", answer="è", metadata=dict(source="metadata")) in training + held_out
    assert (task.reward, task.characters, task.demonstration(0)) == (
        "pipeline.rewards.verifiers:math_verify",
        None,
        None,
    )


def test_jsonl_with_its_own_held_out_file(tmp_path: Path) -> None:
    path, other = write(tmp_path / "p.jsonl", *rows(5)), write(tmp_path / "h.jsonl", *rows(2, start=5))
    section = DataTask(name="data", path=path, held_out_path=other, reward="my.rewards:score", chat_template=True)
    task = build_task(section, seed=0)
    assert (task.num_prompts, task.num_held_out, task.chat_template) == (5, 2, True)
    assert (task.problem(4).answer, task.held_out(1).answer, task.reward) == ("5", "7", "my.rewards:score")
    with pytest.raises(IndexError, match="expected 0 to 1"):
        task.held_out(2)


def test_jsonl_refuses_held_out_prompts_that_are_trained(tmp_path: Path) -> None:
    path, other = write(tmp_path / "p.jsonl", *rows(5)), write(tmp_path / "h.jsonl", *rows(2, start=4))
    with pytest.raises(RecipeError, match=r"share 1 prompts, the first 'What is 4\+1\?'"):
        build_task(DataTask(name="data", path=path, held_out_path=other), seed=0)


@pytest.mark.parametrize("spelt", ["what is 4+1?", " What  is\n4+1? ", "What\u00a0is 4+1?"])
def test_another_spelling_of_a_trained_prompt_is_no_held_out_one(tmp_path: Path, spelt: str) -> None:
    path, other = write(tmp_path / "p.jsonl", *rows(5)), write(tmp_path / "h.jsonl", dict(prompt=spelt, answer="5"))
    with pytest.raises(RecipeError, match=r"share 1 prompts, the first 'What is 4\+1\?'"):
        build_task(DataTask(name="data", path=path, held_out_path=other), seed=0)
    write(other, dict(prompt="What is 4²+1?", answer="17"), dict(prompt="What is 4+1 ?", answer="5"))
    assert build_task(DataTask(name="data", path=path, held_out_path=other), seed=0).num_held_out == 2


def test_a_split_by_text_parts_no_two_spellings_of_a_prompt(tmp_path: Path) -> None:
    plain, both = rows(300), [dict(row, prompt=row["prompt"] + end) for row in rows(300) for end in ("", " ")]
    before = build_task(DataTask(name="data", path=write(tmp_path / "a.jsonl", *plain, *plain)), seed=0)
    task = build_task(DataTask(name="data", path=write(tmp_path / "b.jsonl", *both)), seed=0)
    trained = {task.problem(index).text.strip() for index in range(task.num_prompts)}
    held_out = {task.held_out(index).text.strip() for index in range(task.num_held_out)}
    assert held_out
    assert not trained & held_out
    assert any("are left out" in note for note in task.notes)
    assert not any("are left out" in note for note in before.notes)


def test_decimals_are_exact_numbers(tmp_path: Path) -> None:
    given = ["12.50", "42.00", "-0.000000120", "12345678901234567890.10", "0.00", "100"]
    table = pa.table(
        dict(
            prompt=[f"{i}?" for i in range(len(given) * 8)],
            answer=pa.array([Decimal(one) for one in given * 8], pa.decimal128(38, 12)),
        )
    )
    pq.write_table(table, tmp_path / "d.parquet")
    found = {problem.text: problem.answer for problem in all_of(task_of(tmp_path / "d.parquet"))}
    expected = ["12.5", "42", "-0.00000012", "12345678901234567890.1", "0", "100"]
    assert [found[f"{i}?"] for i in range(len(given))] == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", r"line 3: not JSON \(.* column"),
        ("[1]\n", "line 3: a list, expected an object"),
        (
            '{"prompt": "x"}\n',
            r"line 3: answer is nothing, expected text or a number; keys found: prompt; set task\.columns\.answer",
        ),
        (
            '{"prompt": "x", "answer": null}\n',
            r"line 3 has no answer: answer is null, expected a value; remove the row",
        ),
        (
            '{"prompt": null, "answer": "7"}\n',
            r"line 3 has no prompt: prompt is null, expected a value; remove the row",
        ),
        ('{"prompt": "x", "answer": true}\n', "line 3: answer is True, true or false, expected text or a number"),
        (
            '{"prompt": "x", "answer": [1]}\n',
            r"line 3: answer is \[1\], a list, expected text or a number; set task\.columns\.answer to null and read "
            r"metadata\['answer'\] in a reward function",
        ),
        (
            '{"prompt": "x", "answer": {"target": 24, "numbers": [1, 2]}}\n',
            r"read metadata\['answer'\] in a reward function .*, or name a part of it, as in answer\.numbers",
        ),
        ('{"prompt": ["x"], "answer": "7"}\n', r"line 3: prompt is \['x'\], a list, expected text"),
        ('{"question": "x", "answer": "7"}\n', "line 3: prompt is nothing, .* keys found: question, answer; set task"),
        ('{"prompt": "", "answer": "7"}\n', "line 3: prompt is empty"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "p.jsonl", rows(1)[0], "\n", line, *rows(40))
    with pytest.raises(RecipeError, match=message):
        build_task(DataTask(name="data", path=path), seed=0)


def test_jsonl_names_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff", "answer": ""}\n')
    with pytest.raises(RecipeError, match=r"p\.jsonl, line 1: not UTF-8 at byte 12"):
        build_task(DataTask(name="data", path=tmp_path / "p.jsonl"), seed=0)


def test_jsonl_needs_a_file_and_two_sides(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot read .*none\.jsonl: No such file"):
        build_task(DataTask(name="data", path=tmp_path / "none.jsonl"), seed=0)
    path = write(tmp_path / "p.jsonl", *rows(2))
    with pytest.raises(RecipeError, match=r"2 problems leave 2 to train on and 0 held out .* set task\.held_out_path"):
        build_task(DataTask(name="data", path=path), seed=0)


def task_of(path: Path, **keys: Any) -> Task:
    return build_task(DataTask.model_validate(dict(name="data", path=path, **keys)), seed=0)


def all_of(task: Task) -> list[Problem]:
    training = [task.problem(i) for i in range(task.num_prompts)]
    return sorted(training + [task.held_out(i) for i in range(task.num_held_out)], key=lambda problem: problem.text)


QUESTIONS = [dict(question=f"What is {i:02}?", solution=dict(value=i), picture=b"...") for i in range(40)]
COLUMNS = dict(prompt="question", answer="solution.value")
EXPECTED = [(f"What is {i:02}?", str(i)) for i in range(40)]


def parquet(path: Path, rows: list[dict[str, Any]] = QUESTIONS) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def saved(folder: Path, shards: int) -> Path:
    """As `Dataset.save_to_disk` of datasets 5.2 writes it: Arrow streams, which state.json names in their order."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{shards:05}.arrow" for number in range(shards)]
    share = len(QUESTIONS) // shards
    for number, name in enumerate(names):
        table = pa.Table.from_pylist(QUESTIONS[number * share : (number + 1) * share])
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    state = dict(_data_files=[dict(filename=name) for name in names], _fingerprint="1", _split=None)
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def shards(folder: Path) -> Path:
    """As the hub of Hugging Face keeps one split."""
    folder.mkdir()
    for number in range(2):
        parquet(folder / f"train-{number:05}-of-00002.parquet", QUESTIONS[number * 20 : number * 20 + 20])
    return folder


def arrow_file(path: Path) -> Path:
    table = pa.Table.from_pylist(QUESTIONS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return path


@pytest.mark.parametrize("form", ["parquet", "renamed", "saved", "sharded", "hub", "arrow"])
def test_the_same_problems_whatever_the_file(tmp_path: Path, form: str) -> None:
    """Columns by name, one inside another; numbers become text; pictures are not read."""
    path = {
        "parquet": lambda: parquet(tmp_path / "d.parquet"),
        "renamed": lambda: parquet(tmp_path / "d.jsonl"),
        "saved": lambda: saved(tmp_path / "saved", 1),
        "sharded": lambda: saved(tmp_path / "saved", 4),
        "hub": lambda: shards(tmp_path / "hub"),
        "arrow": lambda: arrow_file(tmp_path / "d.arrow"),
    }[form]()
    problems = all_of(task_of(path, columns=COLUMNS))
    assert [(problem.text, problem.answer) for problem in problems] == EXPECTED
    assert problems[7].metadata == dict(solution=dict(value=7))


NUMBERS = [0.00005, 5e-324, 1.5e-7, 1e16, 1.7976931348623157e308, -2.5e-9, 0.1, 7.0, 123456.789, 6.02214076e23]


def jsonl_of(path: Path, numbers: list[Any]) -> Path:
    return write(path, *(dict(prompt=f"{i:02}?", answer=number) for i, number in enumerate(numbers)))


def columns_of(path: Path, numbers: list[Any], kind: pa.DataType) -> Path:
    texts = [f"{i:02}?" for i in range(len(numbers))]
    pq.write_table(pa.table(dict(prompt=texts, answer=pa.array(numbers, kind))), path)
    return path


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_number_reaches_the_reward_without_an_exponent(tmp_path: Path, form: str) -> None:
    """5e-05 is read as 5·e - 5 by math-verify."""
    rows = [NUMBERS[index % len(NUMBERS)] for index in range(40)]
    path = jsonl_of(tmp_path / "d", rows) if form == "jsonl" else columns_of(tmp_path / "d", rows, pa.float64())
    answers = [problem.answer for problem in all_of(task_of(path))]
    assert [float(answer) for answer in answers] == rows
    assert not [answer for answer in answers if "e" in answer.lower()]
    assert answers[:3:2] + answers[6:9] == ["0.00005", "0.00000015", "0.1", "7.0", "123456.789"]


def test_a_float_of_32_bits_is_the_number_of_its_shortest_digits(tmp_path: Path) -> None:
    numbers = [0.1, 0.00005, 1e20, 16777216.0] * 10
    plain = columns_of(tmp_path / "plain", numbers, pa.float32())
    assert [problem.answer for problem in all_of(task_of(plain))][:4] == [
        "0.1",
        "0.00005",
        "100000000000000000000",
        "16777216.0",
    ]
    inside = columns_of(tmp_path / "in", [dict(v=one) for one in numbers], pa.struct([("v", pa.float32())]))
    assert all_of(task_of(inside, columns=dict(answer="answer.v")))[0].answer == "0.1"
    named = pa.table(dict(answer=pa.array(numbers, pa.float32()).dictionary_encode(), list=pa.array([[0.1]] * 40)))
    named = named.set_column(1, "list", named["list"].cast(pa.list_(pa.float32())))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, named.schema) as writer:
        writer.write_table(named)
    assert next(iter(read_rows(tmp_path / "a.arrow"))).values == dict(answer=0.1, list=[0.1])


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"BZh9", "bunzip2 it"),
        (b"\xfd7zXZ\x00", "unxz it"),
        (b"\x04\x22\x4d\x18", "unlz4 it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n", "git lfs pull"),
    ],
)
def test_what_holds_no_rows_yet_is_refused_with_the_command_that_brings_them(
    tmp_path: Path, content: bytes, remedy: str
) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(RecipeError, match=remedy):
        next(iter(read_rows(tmp_path / "d.jsonl")))


def test_integers_keep_every_digit(tmp_path: Path) -> None:
    numbers = [2**53 + 1, -(2**63), 10**30, 0] * 10
    assert [problem.answer for problem in all_of(task_of(jsonl_of(tmp_path / "j", numbers)))] == list(map(str, numbers))
    small = [2**53 + 1, -(2**63), 0] * 14
    path = columns_of(tmp_path / "p", small, pa.int64())
    assert [problem.answer for problem in all_of(task_of(path))] == list(map(str, small))


def test_a_folder_of_several_splits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    saved(tmp_path / "train", 1)
    with pytest.raises(
        RecipeError, match=r"several splits \(train, test\); set task.path to one of them, as in \S+/train, and"
    ):
        task_of(tmp_path)
    (tmp_path / "dataset_dict.json").unlink()
    for split in ("train-00000-of-00001", "test-00000-of-00001"):
        parquet(tmp_path / f"{split}.parquet")
    with pytest.raises(
        RecipeError, match=r"several splits \(test, train\); set task.path to one of them, as in \S+/train, and"
    ):
        task_of(tmp_path)


def test_a_split_of_a_folder_is_all_its_files(tmp_path: Path) -> None:
    """The advice of the refusal above loses no rows."""
    hub = shards(tmp_path / "hub")
    parquet(hub / "test-00000-of-00001.parquet", [dict(question="Held out?", solution=dict(value=1))])
    task = task_of(hub / "train", held_out_path=hub / "test", columns=COLUMNS)
    assert [(task.problem(i).text, task.problem(i).answer) for i in range(task.num_prompts)] == EXPECTED
    assert [task.held_out(i).text for i in range(task.num_held_out)] == ["Held out?"]
    assert digest_of_data(hub / "train") == digest_of_data(shards(tmp_path / "alone"))
    with pytest.raises(RecipeError, match=r"cannot read \S+/tra: No such file"):
        task_of(hub / "tra")


def test_numbers_and_a_bom(tmp_path: Path) -> None:
    lines = [dict(prompt=f"{i}?", answer=answer) for i, answer in enumerate((7, -2.5, 1e20, "07") * 10)]
    path = tmp_path / "p.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + write(path, *lines).read_bytes())
    answers = {problem.text: problem.answer for problem in all_of(task_of(path))}
    assert [answers[f"{i}?"] for i in range(4)] == ["7", "-2.5", "100000000000000000000", "07"]


def test_a_key_with_a_dot_is_a_key(tmp_path: Path) -> None:
    lines = [{"prompt": f"{i}?", "a.b": "with a dot", "a": {"b": "inside"}} for i in range(40)]
    problems = all_of(task_of(write(tmp_path / "p.jsonl", *lines), columns=dict(answer="a.b")))
    assert {problem.answer for problem in problems} == {"with a dot"}


def test_repeated_prompts_stay_and_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *rows(100))
    assert task_of(path).notes == ()
    path = write(tmp_path / "p.jsonl", *rows(100), *rows(3), dict(prompt="What is 0+1?", answer="one"))
    task = task_of(path)
    assert len(all_of(task)) == 104
    (note,) = task.notes
    assert "4 of 104 rows repeat the prompt of another; 1 prompts come with different answers" in note
    assert "'What is 0+1?' comes 3 times in an epoch" in note


def asked(content: str, role: str = "user") -> dict[str, str]:
    return dict(role=role, content=content)


SYSTEM = asked("Be brief.", "system")


@pytest.mark.parametrize(
    ("key", "prompt", "messages", "text"),
    [
        ("prompt", "2+{}?", [SYSTEM, asked("2+{}?")], "2+{}?"),
        ("messages", [asked("2+{}?")], [SYSTEM, asked("2+{}?")], "2+{}?"),
        ("prompt", [asked("Own.", "system"), asked("2+{}?")], [asked("Own.", "system"), asked("2+{}?")], "2+{}?"),
        (
            "prompt",
            [asked("2+{}?"), asked("?", "assistant"), asked("Well?")],
            [SYSTEM, asked("2+{}?"), asked("?", "assistant"), asked("Well?")],
            "2+{}?\n\n?\n\nWell?",
        ),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_conversations(tmp_path: Path, form: str, key: str, prompt: Any, messages: Any, text: str) -> None:
    def numbered(one: Any, number: int) -> Any:
        return json.loads(json.dumps(one).replace("{}", str(number)))

    lines = [dict(answer=i, level="easy", **{key: numbered(prompt, i)}) for i in range(100, 140)]
    path = parquet(tmp_path / "p", lines) if form == "parquet" else write(tmp_path / "p", *lines)
    problems = all_of(task_of(path, chat_template=True, system_prompt="Be brief."))
    assert [list(problem.messages) for problem in problems] == [numbered(messages, i) for i in range(100, 140)]
    assert problems[5].text == numbered(text, 105)
    assert problems[5].metadata == dict(level="easy")


@pytest.mark.parametrize(
    ("messages", "chat_template", "message"),
    [
        ([asked("x")], False, r"prompt holds messages, .*; set task\.chat_template=true"),
        ([asked("x"), asked("y", "assistant")], True, "ends with the assistant's message, so that there is nothing to"),
        ([], True, "prompt holds no messages"),
        ([dict(role="user", content=[dict(type="text", text="x")])], True, r"expected text or messages \{\"role"),
        ([asked("")], True, "prompt is empty"),
        (["x"], True, "expected text or messages"),
    ],
)
def test_conversations_that_are_none(tmp_path: Path, messages: Any, chat_template: bool, message: str) -> None:
    path = write(tmp_path / "p.jsonl", dict(prompt=messages, answer="1"))
    with pytest.raises(RecipeError, match=f"line 1: {message}|line 1: .*{message}"):
        task_of(path, chat_template=chat_template)


@pytest.mark.parametrize("keys", [dict(system_prompt="Be brief."), dict(columns=dict(system_prompt="system"))])
def test_a_system_prompt_needs_a_template(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"set task\.chat_template to true"):
        task_of(tmp_path, **keys)


@pytest.mark.parametrize("column", ["system", "of.system"])
def test_a_row_may_have_a_system_prompt_of_its_own(tmp_path: Path, column: str) -> None:
    def row(number: int, system: str | None, prompt: Any) -> dict[str, Any]:
        outer, _, inner = column.partition(".")
        return dict(prompt=prompt or f"{number}?", answer="1") | {outer: {inner: system} if inner else system}

    rows = [row(i, ("Own.", None, "")[i % 3], None) for i in range(60)]
    rows += [row(60, "Own.", [asked("60?")]), row(61, "Own.", [SYSTEM, asked("61?")])]
    path = write(tmp_path / "p", *rows)
    problems = all_of(task_of(path, chat_template=True, system_prompt="Task.", columns=dict(system_prompt=column)))
    said = {one.text: one.messages[0]["content"] for one in problems}
    wanted = {f"{i}?": ("Own.", "Task.", "Task.")[i % 3] for i in range(60)}
    assert said == wanted | {"60?": "Own.", "61?": SYSTEM["content"]}
    assert problems[0].metadata == {name: value for name, value in rows[0].items() if name not in ("prompt", "answer")}


def test_metadata_is_plain(tmp_path: Path) -> None:
    import datetime

    more = dict(day=datetime.date(2026, 1, 2), share=float("nan"), tags=["a", None], picture=b"...")
    path = parquet(tmp_path / "p.parquet", [dict(prompt=f"{i}?", answer="1", **more) for i in range(40)])
    metadata = all_of(task_of(path))[0].metadata
    assert json.loads(json.dumps(metadata, allow_nan=False)) == dict(day="2026-01-02", share=None, tags=["a", None])
