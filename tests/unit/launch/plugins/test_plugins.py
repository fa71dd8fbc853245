"""`evenkeel plugins`: whatever it lists can be named in a recipe just so, and whatever it calls unfinished cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from launch.plugins.listing import Kind, Plugin, of_modules, shipped
from pipeline.config.algorithm import ADVANTAGES, CORRECTIONS, OBJECTIVES
from pipeline.config.loader import load_recipe
from pipeline.errors import RecipeError
from pipeline.tasks import build_task

MINE = '''
from typing import Literal
from pydantic import BaseModel
from pipeline.advantages.methods import Advantage
from pipeline.tasks.task import GeneratedTask, Problem
from precision.corrections import Correction
from precision.objectives.objective import Objective

class Plain(Objective):
    """Plain policy gradient."""
    name: Literal["plain"] = "plain"
    def loss(self, logprobs, batch, context):
        return logprobs.sum(), {}

class Half(Correction):
    """Half of everything.

    And more about it."""
    name: Literal["half"] = "half"
    def factor(self, step):
        return step.advantages, {}

class Centered(Advantage):
    name: Literal["centered"] = "centered"
    def advantages(self, reward, group):
        return reward

class Nameless(Advantage):
    def advantages(self, reward, group):
        return reward

class Lossless(Objective):
    name: Literal["lossless"] = "lossless"

class Double(GeneratedTask):
    """Twice a number."""
    characters, reward = "0123456789=", "pipeline.rewards.verifiers:exact_match"
    def __init__(self, seed):
        super().__init__(name="double", seed=seed, num_prompts=1000)
    def draw(self, rng):
        number = int(rng.random() * 100)
        return Problem(text=f"{number}=", answer=str(2 * number))

def length(prompt, response):
    """How long it is."""
    return len(response)

def first(responses, **rest):
    return [1.0] * len(responses)

def short(answer):
    """Short answers."""
    return len(answer) < 3

def mixed(rewards, responses):
    """Groups with a contrast."""
    return len({*rewards}) > 1

def helper(number): ...
def _hidden(response): ...
class Other(BaseModel): ...
VALUE = 3
'''


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "plugins_of_mine.py").write_text(MINE)
    (tmp_path / "holds_nothing.py").write_text("VALUE = 3\n")
    (tmp_path / "cannot_be_imported.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    import sys

    sys.modules.pop("plugins_of_mine", None)


def named_in_a_recipe(plugin: Plugin, folder: Path) -> None:
    """Load a recipe that names it, and make its task."""
    rows = [json.dumps(dict(prompt=f"{n}=", answer=str(n))) for n in range(400)]
    (folder / "p.jsonl").write_text("\n".join(rows) + "\n")
    overrides = [f"{plugin.key}={plugin.value}"]
    if plugin.key in ("task.reward", "task.filter") or plugin.value == "data":
        overrides += ["task.name=data", f"task.path={folder / 'p.jsonl'}"]
    if plugin.kind == "correction":
        overrides.append("objective.anchor=old")
    recipe = load_recipe(Path("grpo"), list(dict.fromkeys(overrides)))
    if plugin.kind in ("task", "filter"):
        assert build_task(recipe.task, 0).num_prompts > 0


def test_all_of_mine_are_found_as_a_recipe_names_them(tmp_path: Path) -> None:
    found = {plugin.value.partition(":")[2]: plugin for plugin in of_modules(["plugins_of_mine"])}
    assert {name: plugin.kind for name, plugin in found.items()} == {
        "Plain": "objective",
        "Half": "correction",
        "Centered": "advantage",
        "Nameless": "advantage",
        "Lossless": "objective",
        "Double": "task",
        "length": "reward",
        "first": "reward",
        "short": "filter",
        "mixed": "group_filter",
    }
    assert {plugin.kind for plugin in found.values()} == {*get_args(Kind)}
    assert (found["Half"].says, found["Half"].key) == ("Half of everything.", "correction.class")
    assert found["Lossless"].lacks == "it lacks loss"
    assert "write in the class" in found["Nameless"].lacks
    for plugin in found.values():
        if plugin.lacks:
            with pytest.raises(RecipeError):
                named_in_a_recipe(plugin, tmp_path)
        else:
            named_in_a_recipe(plugin, tmp_path)


def test_what_comes_with_it_is_listed_whole() -> None:
    found = shipped()
    for kind, named in (("objective", OBJECTIVES), ("correction", CORRECTIONS), ("advantage", ADVANTAGES)):
        assert [plugin.value for plugin in found if plugin.kind == kind] == list(named)
    assert [plugin.value for plugin in found if plugin.kind == "reward"] == [
        "math_verify",
        "python_tests",
        "exact_match",
    ]
    assert all(plugin.says and not plugin.lacks for plugin in found)
    assert len({plugin.says for plugin in found}) == len(found)
    assert [plugin.value for plugin in found if "…" in plugin.says] == []
