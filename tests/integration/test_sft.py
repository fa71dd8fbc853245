"""`evenkeel sft` on conversations of the user's own: a real learner learns the answers, and what is held out tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.data.event_log import read_metrics
from tests.support.runs import evenkeel


@pytest.mark.slow
def test_own_conversations_are_learned(tmp_path: Path) -> None:
    recipe, rows, base = tmp_path / "sft.yaml", tmp_path / "rows.jsonl", tmp_path / "base"
    sections: dict[str, Any] = dict(
        run=dict(name="own", root=str(tmp_path), steps=1),
        model=dict(path=str(base)),
        task=dict(name="sort_digits", min_digits=2, max_digits=4),
        rollout=dict(precision="fp32", max_new_tokens=8, context_tokens=24),
        learner=dict(precision="fp32", micro_batch_tokens=512),
    )
    recipe.write_text(yaml.safe_dump(sections))
    assert evenkeel("model", "new", base, "--layers", "1", in_process=False).returncode == 0
    (base / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ '=' if m.role == 'user' else '' }}{% endfor %}"
    )
    turns = [[(str(n), str(n + 1)[-1]), (str(2 * n), "7")] for n in range(100, 300)]  # the last digit, then always a 7
    with rows.open("w") as file:
        for row in turns:
            said = [(("user", asked), ("assistant", answer)) for asked, answer in row]
            messages = [dict(role=role, content=content) for turn in said for role, content in turn]
            file.write(json.dumps(dict(messages=messages)) + "\n")
        file.write(json.dumps(dict(messages=[dict(role="user", content="1" * 30), messages[1]])) + "\n")
    words = (
        "sft",
        recipe,
        "--data",
        rows,
        "--held-out",
        "0.1",
        "--batch-size",
        "16",
        "--lr",
        "3e-3",
        "--warmup-steps",
        "3",
    )
    done = evenkeel(
        *words, "--out", tmp_path / "model", "--steps", "30", "--warmup-steps", "3", "--json", in_process=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["held_out_loss"] < 1.2 < 2.0 < found["held_out_loss_before"], found
    assert "1 of 201 rows" in done.stderr
    assert "100=»1«200=»7«" in done.stderr
    measured = [line["step"] for line in read_metrics(tmp_path / "own-sft") if "held_out_loss" in line]
    assert measured == [0, 29]
    assert read_metrics(tmp_path / "own-sft")[0]["num_tokens"] == 32, "two answers of one token a row"
    with rows.open("a") as file:
        file.write('{"prompt": "1=", "response": "2"}\n')
    other = evenkeel(*words, "--out", tmp_path / "other", "--steps", "30", in_process=False)
    assert other.returncode != 0
    assert "was begun with sha256" in other.stderr
