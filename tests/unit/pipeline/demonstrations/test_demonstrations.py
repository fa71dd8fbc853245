"""Rows of the user's own become tokens of which exactly the answers are learned; what is no demonstration is refused by
its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.batch import Response, given_batch
from pipeline.demonstrations import Demonstrations, Form, pieces_of, read_demonstrations
from pipeline.errors import RecipeError
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.support.batches import CONTRACT

THINKING = (  # as Qwen3 does: thoughts of earlier answers are not repeated, an answer without thoughts gets empty ones
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' and loop.last %}{{ '' if '<t>' in m.content else '<t></t>' }}{{ m.content }}"
    "{% elif m.role == 'assistant' %}{{ m.content.split('</t>')[-1] }}{% else %}{{ m.content }}{% endif %};\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_character_tokenizer(tmp_path / "model", CHARACTERS)
    (tmp_path / "model/chat_template.jinja").write_text(THINKING)
    return Tokenizer.load(tmp_path / "model")


def read(tokenizer: Tokenizer, *rows: Any, longest: int = 200, **form: Any) -> Demonstrations:
    path = tokenizer.folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = Form(tokenizer=tokenizer, **(dict(chat_template=False, system_prompt=None) | form))
    return read_demonstrations(path, settings, longest=longest)


def turns(*contents: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    return dict(messages=[dict(role=role, content=content) for role, content in zip(roles, contents, strict=False)])


def test_a_response_is_learned_to_its_end(tokenizer: Tokenizer) -> None:
    [row] = read(tokenizer, dict(prompt="2+2=", response="4", topic="sums")).rows
    assert row.prompt.tolist() == tokenizer.encode("2+2=")
    assert row.response.tolist() == [*tokenizer.encode("4"), tokenizer.eos_token_id]
    assert row.learned.tolist() == [True, True]


def test_of_a_conversation_the_answers_are_learned(tokenizer: Tokenizer) -> None:
    found = read(tokenizer, turns("a", "B", "c", "D"), system_prompt="S")
    assert found.first == "[system]S;\n[user]a;\n[assistant]»B;«\n[user]c;\n[assistant]»<t></t>D;«"
    [row] = found.rows
    assert tokenizer.decode(row.response[row.learned].tolist()) == "B;<t></t>D;"
    assert tokenizer.decode(row.prompt.tolist()) == "[system]S;\n[user]a;\n[assistant]"
    whole = tokenizer.decode([*row.prompt, *row.response])
    assert tokenizer.conversation(
        [dict(role="system", content="S"), *turns("a", "B", "c", "D")["messages"]]
    ).startswith(whole)


QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI4 = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "contents", "said"),
    [
        (QWEN3, ("a", "B", "c", "hi"), ["B<|im_end|>", "<think>\n\n</think>\n\nhi<|im_end|>"]),
        (QWEN3, ("hi", "i", "i", "hi\n"), ["i<|im_end|>", "<think>\n\n</think>\n\nhi\n<|im_end|>"]),
        (QWEN3, ("a", "think", "think", "im"), ["think<|im_end|>", "<think>\n\n</think>\n\nim<|im_end|>"]),
        (PHI4, ("a", "end", "end", "as"), ["end<|eot|>", "as<|eot|><|endoftext|>"]),
    ],
)
def test_every_turn_is_learned_to_its_end_wherever_its_words_stand_too(
    tokenizer: Tokenizer, template: str, contents: tuple[str, ...], said: list[str]
) -> None:
    (tokenizer.folder / "chat_template.jinja").write_text(template)
    pieces = pieces_of(turns(*contents)["messages"], Tokenizer.load(tokenizer.folder), "row 1")
    assert [text for text, learned in pieces if learned] == said


QWEN3_THOUGHTS = (  # the thoughts of the last answer are parted from it, and written with blank lines of the template's
    "{% for m in messages %}{% set thoughts = '' %}{% set content = m.content %}{% if '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ thoughts }}\n</think>\n\n{% endif %}"
    "{{ content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "content",
    [
        "<think>\nadd\n</think>\n4",
        "<think>add</think>4",
        "\n<think>\nadd\n\n</think>\n\n4",
        "<think>\nadd\n</think>\n\n4",
    ],
)
def test_thoughts_are_learned_with_the_blank_lines_of_the_template(tokenizer: Tokenizer, content: str) -> None:
    (tokenizer.folder / "chat_template.jinja").write_text(QWEN3_THOUGHTS)
    pieces = pieces_of(turns("2+2?", content)["messages"], Tokenizer.load(tokenizer.folder), "row 1")
    assert [text for text, learned in pieces if learned] == ["<think>\nadd\n</think>\n\n4<|im_end|>"]


QWEN3_THINKING = QWEN3_THOUGHTS.replace(  # as Qwen3-*-Thinking-2507: engines are given the beginning of the thoughts
    "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
).replace("{% set thoughts = '' %}", "{% set thoughts = m.reasoning_content or '' %}")
R1 = (  # as DeepSeek-R1-Distill: likewise, and answers in a conversation are written without thoughts
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)


def templated(tokenizer: Tokenizer, template: str) -> Tokenizer:
    (tokenizer.folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(tokenizer.folder)


@pytest.mark.parametrize(
    "answer",
    [
        dict(content="<think>\nadd\n</think>\n\n4"),
        dict(content="add\n</think>\n\n4"),
        dict(content="4", reasoning_content="add"),
    ],
)
def test_thoughts_that_the_template_opens_itself_are_learned_from_there(
    tokenizer: Tokenizer, answer: dict[str, str]
) -> None:
    [asked, said] = turns("2+2?", "")["messages"]
    pieces = pieces_of([asked, said | answer], templated(tokenizer, QWEN3_THINKING), "row 1")
    assert pieces == [
        ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n", False),
        ("add\n</think>\n\n4<|im_end|>", True),
    ]


@pytest.mark.parametrize(
    ("template", "row", "said"),
    [
        (
            R1,
            turns("2+2?", "<think>\nadd\n</think>\n\n4"),
            r"engines answer after '<think>\\n', which .* give the row as",
        ),
        (R1, turns("2+2?", "4"), r"engines answer after '<think>\\n', which .* give the row as prompt and response"),
        (R1.replace("<think>\n", ""), turns("2+2?", "<think>add</think>4"), "remove its thoughts, or give the row as"),
        (QWEN3_THINKING, turns("a", "B", "c", "D"), "writes the first 1 messages otherwise when .*; end the row with"),
        (QWEN3_THOUGHTS, turns("a", "<think>x</think>B", "c", "D"), "not write message 2 as it stands .*; end the row"),
    ],
)
def test_thoughts_that_a_template_leaves_out_are_refused_with_what_helps(
    tokenizer: Tokenizer, template: str, row: Any, said: str
) -> None:
    with pytest.raises(RecipeError, match=f"row 1: .*{said}"):
        pieces_of(row["messages"], templated(tokenizer, template), "row 1")


KNOWN_ROLES = (  # as Qwen3's, a template of branches without one for other roles; as Llama 3's, tools speak JSON
    "{% for m in messages %}{% if m.role in ('system', 'user') %}[{{ m.role }}]{{ m.content | trim }};"
    "{% elif m.role == 'assistant' %}[assistant]{{ m.content }};"
    "{% elif m.role == 'tool' %}[tool]{{ m.content | tojson }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_message_whose_role_the_template_does_not_know_is_refused(tokenizer: Tokenizer) -> None:
    (tokenizer.folder / "chat_template.jinja").write_text(KNOWN_ROLES)
    knowing = Tokenizer.load(tokenizer.folder)
    [user, answer] = turns("2+2? ", "4")["messages"]
    tool = dict(role="tool", content='it\n"said"')
    assert read(knowing, dict(messages=[user, tool, answer])).first == (
        '[user]2+2?;[tool]"it\\n\\"said\\"";[assistant]»4;«'
    )
    human = dict(role="human", content="Why?")
    for number, messages in ((1, [human, answer]), (3, [user, answer, human, answer])):
        with pytest.raises(RecipeError, match=rf"line 2: .* leaves out message {number}, 'Why\?', .* is 'human'; use"):
            read(knowing, dict(messages=[user, answer]), dict(messages=messages))


def test_the_end_of_a_turn_is_the_end_of_sequence_where_the_template_writes_it(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>!\n{% endif %}{% endfor %}"
    (tokenizer.folder / "chat_template.jinja").write_text(template.replace("</s>", tokenizer.eos_token))
    [row] = read(Tokenizer.load(tokenizer.folder), turns("a", "B")).rows
    assert row.response[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(row.response.tolist()) == "B"


def test_rows_that_are_too_long_are_counted(tokenizer: Tokenizer) -> None:
    rows = [dict(prompt="1" * n, response="2") for n in (3, 8, 9)]
    found = read(tokenizer, *rows, longest=10)
    assert [len(row) for row in found.rows] == [5, 10]
    assert found.notes[0].startswith("1 of 3 rows")
    assert "the longest has 11" in found.notes[0]
    with pytest.raises(RecipeError, match=r"3 of 3 rows .* have more than 2 tokens .*up to 11; raise it"):
        read(tokenizer, *rows, longest=2)


def test_rows_of_one_prompt_are_not_parted(tokenizer: Tokenizer) -> None:
    rows = [dict(prompt=f"{number // 2}=", response=f"{number}") for number in range(400)]
    training, held_out = read(tokenizer, *rows).split(0.1)
    prompts = [{row.prompt.tobytes() for row in part.rows} for part in (training, held_out)]
    assert len(training.rows) + len(held_out.rows) == 400
    assert not prompts[0] & prompts[1]
    assert 16 <= len(held_out.rows) <= 70
    with pytest.raises(RecipeError, match=r"leaves 0 to train on|and 0 held out"):
        read(tokenizer, rows[0]).split(0.5)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (dict(question="1", completion="2"), 'expected {"prompt": text, .*keys found: question, completion; rename'),
        (dict(prompt="1"), "keys found: prompt"),
        (dict(prompt="1", response=2), "response is 2, expected text"),
        (dict(prompt="", response="2"), "prompt is empty"),
        (dict(prompt="1", response=""), "response is empty"),
        (dict(messages=[]), "messages are none"),
        (dict(messages="hi"), "messages are 'hi', expected a list"),
        (turns("a"), "messages end with the user's.*no answer to learn"),
        (turns("a", " "), "answer of the assistant is empty"),
        (turns("a", "<t>x</t>B", "c", "D"), "does not write message 2 as it stands"),
        (dict(prompt="é", response="2"), "character 'é' has no token"),
    ],
)
def test_what_is_no_demonstration_is_refused_by_its_row(tokenizer: Tokenizer, row: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=f"(?s)rows.jsonl, line 2: .*{said}"):
        read(tokenizer, dict(prompt="1", response="2"), row)


def test_what_others_say_in_a_conversation_is_not_learned() -> None:
    response = Response((5, 6, 7), (0.0,) * 3, reward=1.0, learned=(True, False, True))
    batch = given_batch(0, [([1], [response, response._replace(learned=None)])], CONTRACT)
    assert batch.loss_mask.tolist() == [True, False, True, True, True, True]
    assert batch.num_sampled_tokens == 5
