"""The documented example is a user's own class from recipe to gradient; in the folder of its kind it is a named choice,
and no second file would have to be touched."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.build.components import build_objective
from pipeline.advantages.compute import AdvantageComputer
from pipeline.config.algorithm import OBJECTIVES
from pipeline.config.loader import changed_keys, load_recipe, recipe_from
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError
from tests.support.objectives import run, scored_step
from tests.support.own_class import EXAMPLE, SECTION

ROOT = Path(__file__).parents[4]

OTHERS = """
from typing import Literal
import numpy as np
from pipeline.advantages.methods import Advantage
from precision.corrections import Correction
from precision.objectives.objective import Objective

class Centered(Advantage):
    name: Literal["centered"] = "centered"
    center: float = 0.5
    def advantages(self, reward, group):
        return (reward - self.center).astype(np.float32)

class Half(Correction):
    name: Literal["half"] = "half"
    share: float = 0.5
    def factor(self, step):
        return (step.advantages * 0 + self.share).double(), {"correction_factor": self.share}

class Nameless(Advantage):
    def advantages(self, reward, group):
        return reward

class Lossless(Objective):
    name: Literal["lossless"] = "lossless"

VALUE = 3
"""


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "on_path"
    folder.mkdir()
    (folder / "my_objectives.py").write_text(EXAMPLE)
    (folder / "my_others.py").write_text(OTHERS)
    (folder / "my_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(folder))
    for module in ("my_objectives", "my_others"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def data(**sections: Any) -> dict[str, Any]:
    return dict(run=dict(name="r", steps=8), model=dict(path="m"), task=dict(name="sort_digits")) | sections


def recipe(**sections: Any) -> Recipe:
    return recipe_from(data(**sections), source="file.yaml")


def test_the_example_trains_by_its_formula() -> None:
    """Two tokens with rho = 1 and 4 and A = 2 and -1, log pi_b = -1.5."""
    objective = build_objective(recipe(**SECTION))
    step = scored_step([[0.0], [math.log(4.0)]], [2.0, -1.0])
    outcome = run(objective, step)
    weights = [3.0 * math.tanh(1 / 3), 3.0 * math.tanh(4 / 3)]
    learner = [-1.5, -1.5 + math.log(4.0)]
    assert outcome.loss == pytest.approx(-(weights[0] * 2.0 * learner[0] - weights[1] * learner[1]) / 2)
    assert outcome.gradient.tolist() == pytest.approx([-weights[0] * 2.0 / 2, weights[1] / 2])
    assert outcome.sums == {"weight": pytest.approx(sum(weights))}


def test_the_resolved_recipe_is_read_back_and_differences_are_named() -> None:
    ours = recipe(**SECTION)
    written = yaml.safe_load(ours.to_yaml())
    assert written["objective"] == {"class": "my_objectives:SoftCap", "options": {"cap": 3.0}}
    again = recipe_from(written, source="t")
    assert (again, again.to_yaml()) == (ours, ours.to_yaml())
    theirs = recipe(objective={"class": "my_objectives:SoftCap"})
    assert changed_keys(ours, theirs) == {"objective.options.cap": "3.0 → 2.0"}


def test_overrides_reach_its_options_and_its_choice(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(data(**SECTION)))
    assert load_recipe(path, ["objective.options.cap=5"]).objective.model_dump() == dict(name="soft_cap", cap=5.0)
    assert load_recipe(path, ["objective.name=cispo"]).objective == OBJECTIVES["cispo"]()
    path.write_text(yaml.safe_dump(data(objective=dict(name="cispo", cap=4))))
    assert load_recipe(path, ["objective.class=my_objectives:SoftCap"]).objective.model_dump()["cap"] == 2.0


def test_own_corrections_and_advantages() -> None:
    made = recipe(
        objective=dict(name="clipped", anchor="old"),
        correction={"class": "my_others:Half", "options": {"share": 0.25}},
        advantage={"class": "my_others:Centered", "options": {"center": 0.75, "aggregation": "sequence"}},
    )
    outcome = run(build_objective(made), scored_step([[0.0, 0.0]], [2.0]))
    assert outcome.prepared.advantages.tolist() == [0.5, 0.5]
    assert outcome.prepared.measured["correction_factor"] == 0.25
    computer = AdvantageComputer.of(made)
    assert computer.section.aggregation == "sequence"
    assert computer.section.model_dump()["center"] == 0.75
    assert recipe_from(yaml.safe_load(made.to_yaml()), source="t") == made


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        (dict(objective={"class": "gone:Objective"}), ["gone:Objective", "ModuleNotFoundError", "PYTHONPATH"]),
        (dict(objective={"class": "my_broken:Objective"}), ["my_broken:Objective", "ZeroDivisionError"]),
        (dict(objective={"class": "my_objectives"}), ["'my_objectives'", "package.module:Class"]),
        (dict(objective={"class": "my_objectives:Gone"}), ["my_objectives has no 'Gone'"]),
        (dict(objective={"class": "my_objectives:Softcap"}), ["no 'Softcap'; did you mean SoftCap?"]),
        (dict(objective={"class": "my_others:VALUE"}), ["my_others:VALUE", "no subclass"]),
        (dict(objective={"class": "my_others:Centered"}), ["my_others:Centered", "no subclass", "Objective"]),
        (dict(objective={"class": "my_others:Lossless"}), ["my_others:Lossless", "lacks loss"]),
        (dict(advantage={"class": "my_others:Nameless"}), ["my_others:Nameless", "has no name", "Literal"]),
        (
            dict(objective={"class": "my_objectives:SoftCap", "options": {"cap": -1}}),
            ["objective.options.cap: ", "greater than 0", "-1"],
        ),
        (
            dict(objective={"class": "my_objectives:SoftCap", "options": {"cpa": 1}}),
            ["unknown key objective.options.cpa; SoftCap takes cap; did you mean cap?"],
        ),
        (dict(objective={"class": "my_objectives:SoftCap", "cap": 1}), ["unknown key objective.cap"]),
        (dict(objective={"name": "soft_cap"}), ["objective: name is 'soft_cap'", "cispo, clipped", "class: package"]),
        (dict(objective={"cap": 3}), ["objective: name is missing", "cispo, clipped"]),
        (dict(objective="cispo"), ["objective: expected a section: {name: cispo}", "'cispo'"]),
        (dict(objective={"name": "cispo", "cap": 0.5}), ["objective.cap: ", "greater than or equal to 1", "0.5"]),
        (
            dict(objective={"class": "my_objectives:SoftCap"}, correction=dict(name="tis")),
            ["correction tis", "objective soft_cap", "twice"],
        ),
    ],
)
def test_refusals_are_one_line(sections: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(**sections)
    message = str(caught.value)
    assert message.startswith("file.yaml: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


NEW_FILE = textwrap.dedent("""
    import sys
    import precision.objectives
    precision.objectives.__path__.append(sys.argv[1])
    from launch.build.components import build_objective
    from pipeline.analysis.summary import describe_choice
    from pipeline.config.loader import recipe_from
    from pipeline.config.recipe import Recipe
    from pipeline.errors import RecipeError
    base = dict(run=dict(name="r", steps=8), model=dict(path="m"), task=dict(name="sort_digits"))
    recipe = recipe_from(base | dict(objective=dict(name="soft_cap", cap=3)), source="t")
    assert recipe_from(recipe.model_dump(mode="json"), source="t") == recipe
    assert recipe.model_dump()["objective"] == dict(name="soft_cap", cap=3.0)
    assert build_objective(recipe) is recipe.objective
    assert describe_choice(recipe.objective) == "soft_cap (cap 3.0)"
    assert set(Recipe.model_json_schema()["$defs"]["SoftCap"]["properties"]) == {"name", "cap"}
    try:
        recipe_from(base | dict(objective=dict(name="gone")), source="t")
    except RecipeError as error:
        assert ", soft_cap, " in str(error), error
    else:
        raise AssertionError
    assert "torch" not in sys.modules
""")


def test_a_new_file_in_the_folder_is_a_choice_of_every_recipe(tmp_path: Path) -> None:
    """Recipe, schema, message, builder and summary know it, and none of them was told."""
    folder = tmp_path / "more_objectives"
    folder.mkdir()
    (folder / "soft_cap.py").write_text(EXAMPLE)
    done = subprocess.run([sys.executable, "-c", NEW_FILE, str(folder)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


ALSO_WORDS = {"split", "none", "pass_at_k"}
"""Names that mean something else as well."""
