"""Rows of the user's own as the batches that the learner is given."""

from __future__ import annotations

import json
from pathlib import Path

from launch.run.sft import batch_of
from pipeline.demonstrations import Form, read_demonstrations
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.support.batches import CONTRACT


def test_a_batch_holds_the_tokens_of_its_rows_and_what_is_learned(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, "0123456789=")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    said = [
        (("user", "12="), ("assistant", "3"), ("user", "4="), ("assistant", "56")),
        (("user", "="), ("assistant", "7")),
    ]
    rows = [dict(messages=[dict(role=role, content=content) for role, content in row]) for row in said]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = Tokenizer.load(tmp_path)
    form = Form(tokenizer=tokenizer, chat_template=False, system_prompt=None)
    batch = batch_of(3, read_demonstrations(tmp_path / "rows.jsonl", form, longest=20).rows, CONTRACT)
    assert batch.tokens.tolist() == tokenizer.encode("12=34=56" + "=7")
    assert batch.sample_offsets.tolist() == [0, 8, 10]
    assert batch.prompt_lengths.tolist() == [3, 1]
    assert batch.loss_mask.tolist() == [True, False, False, True, True, True]
