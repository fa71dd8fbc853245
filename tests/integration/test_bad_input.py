"""Bad input through the command line: one clear line, a non-zero exit, no traceback, nothing started or lost."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from tests.support.runs import evenkeel, make_model, make_recipe


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    make_model(folder / "model")
    return folder


def refused(*arguments: str | Path, in_process: bool = True) -> str:
    """The one line that the command says."""
    done = evenkeel(*arguments, in_process=in_process, timeout=100)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.strip().splitlines() if line]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("error: ")


def test_unknown_recipe_key(workshop: Path) -> None:
    recipe = make_recipe(workshop, workshop / "model", "key", rollout=dict(max_tokens=3))
    assert "unknown key rollout.max_tokens" in refused("train", recipe, in_process=False)


def test_missing_model_folder(workshop: Path) -> None:
    recipe = make_recipe(workshop, workshop / "nowhere", "missing")
    assert f"{workshop / 'nowhere'} is not a folder" in refused("train", recipe)


def test_tokenizer_with_more_tokens_than_the_model(workshop: Path) -> None:
    model = workshop / "foreign"
    shutil.copytree(workshop / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 16}))
    message = refused("train", make_recipe(workshop, model, "vocabulary"))
    assert "token id" in message
    assert "16 rows" in message


def test_weights_that_are_not_of_the_configured_shape(workshop: Path) -> None:
    model = workshop / "misshapen"
    shutil.copytree(workshop / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    message = refused("train", make_recipe(workshop, model, "shapes"))
    assert "model.layers.0.mlp." in message


def test_missing_tokenizer(workshop: Path) -> None:
    model = workshop / "speechless"
    shutil.copytree(workshop / "model", model)
    (model / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused("train", make_recipe(workshop, model, "tokenizer"))


def test_a_prompt_with_characters_that_the_tokenizer_lacks(workshop: Path) -> None:
    recipe = make_recipe(workshop, workshop / "model", "characters")
    lines = [json.dumps(dict(prompt=f"Ünïcode {i}?", answer="1")) for i in range(64)]
    (workshop / "prompts.jsonl").write_text("\n".join(lines))
    assert "character" in refused("train", recipe)


def test_tensor_parallel_that_does_not_divide_the_heads(workshop: Path) -> None:
    recipe = make_recipe(workshop, workshop / "model", "heads", learner=dict(tensor_parallel=3))
    message = refused("train", recipe)
    assert "3" in message
    assert "heads" in message


def test_a_port_in_use(workshop: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        recipe = make_recipe(workshop, workshop / "model", "port", rollout=dict(port=port))
        message = refused("train", recipe)
    assert str(port) in message
    assert "in use" in message


@pytest.mark.slow
def test_an_engine_that_never_comes_up_shows_the_end_of_its_log(workshop: Path) -> None:
    recipe = make_recipe(
        workshop, workshop / "model", "engine", rollout=dict(extra_args=["--no-such-option"], start_deadline_s=90)
    )
    assert "--no-such-option" in refused("train", recipe)


def test_a_run_directory_that_is_none(workshop: Path) -> None:
    for command in (("runs", "show"), ("report",), ("verify", "history")):
        assert str(workshop) in refused(*command, workshop)


def test_a_jsonl_line_that_is_not_json(workshop: Path) -> None:
    recipe = make_recipe(workshop, workshop / "model", "lines")
    (workshop / "prompts.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n{oops\n')
    assert "2" in refused("train", recipe)


def test_a_reward_that_cannot_be_imported(workshop: Path) -> None:
    recipe = make_recipe(workshop, workshop / "model", "reward")
    recipe.write_text(recipe.read_text().replace("tests.support.rewards:digit_share", "no.such:reward"))
    assert "no.such" in refused("train", recipe)
