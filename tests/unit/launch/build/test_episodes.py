"""What a run's episodes are built of, as the recipe names it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import tests.support
from launch.build.episodes import build_episodes
from pipeline.config.loader import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.data.event_log import EventLog, read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.tasks.tokenizer import Tokenizer
from tests.support.chat_folders import write_chat_folder
from tests.support.sandboxes import sandbox_of

SERVER = str(Path(tests.support.__file__).with_name("mcp_server.py"))


def with_episodes(**section: Any) -> Recipe:
    return Recipe.model_validate({**load_recipe(Path("demo")).model_dump(mode="json"), "episode": section})


@pytest.mark.slow
def test_servers_that_the_recipe_names_are_tools_in_the_sandbox_of_the_run(tmp_path: Path) -> None:
    sandbox_of("bubblewrap")
    recipe = with_episodes(mcp=dict(words=dict(command=["python", SERVER])), step_s=120.0)
    tokenizer = Tokenizer.load(write_chat_folder(tmp_path / "model", "characters"))
    run = RunDirectory(tmp_path / "runs" / "words")
    run.path.mkdir(parents=True)

    async def called() -> str:
        async with build_episodes(run, recipe, tokenizer, EventLog(run.path, "collector-000001")) as runner:
            assert runner is not None
            assert runner.tools is not None
            workspace = runner.tools.open()
            try:
                return (await workspace.call("count", json.dumps(dict(word="sea")))).text
            finally:
                await workspace.close()

    assert asyncio.run(called()) == "sea has 3 letters call 1"
    assert [event["rung"] for event in read_events(run.path, "sandbox")] == ["bubblewrap"]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (dict(mcp={}), "none of environment, agent, command, tools and mcp is given"),
        (dict(mcp=dict(words=dict(command=["w"])), command=["a"]), "tools and mcp are not for episode.command"),
        (dict(mcp=dict(words=dict(command=[]))), "at least 1 item"),
    ],
)
def test_servers_that_nobody_could_call_are_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_episodes(**section)
