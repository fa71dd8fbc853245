"""The recipe refuses what cannot work, in one line that names key, value and remedy."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.loader import (
    SHIPPED,
    find_recipe,
    load_recipe,
    recipe_from,
)
from pipeline.config.recipe import Recipe
from pipeline.config.sections import MOST_KEPT
from pipeline.errors import RecipeError
from tests.support.runs import a_recipe

RECIPES = sorted((Path(__file__).parents[4] / "pipeline" / "recipes").glob("*.yaml"))


def data(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = dict(run=dict(name="r", steps=8), model=dict(path="m"), task=dict(name="sort_digits"))
    for key, value in changes.items():
        base[key] = {**base.get(key, {}), **value}
    return base


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (dict(run=dict(stepz=3)), ["run.stepz", "unknown key"]),
        (dict(task=dict(name="nonsense")), ["task", "sort_digits"]),
        (dict(task=dict(min_digits=9, max_digits=4)), ["min_digits 9", "max_digits 4"]),
        (dict(rollout=dict(group_size=1)), ["group_size is 1", "at least 2"]),
        (dict(rollout=dict(prompts_per_batch=1, group_size=2), learner=dict(data_parallel=4)), ["data_parallel 4"]),
        (dict(learner=dict(micro_batch_tokens=256)), ["256", "4096"]),
        (dict(rollout=dict(max_new_tokens=4096)), ["max_new_tokens 4096", "context_tokens"]),
        (dict(learner=dict(optimizer=dict(betas=[0.9, 1.0]))), ["betas", "less than 1"]),
        (dict(learner=dict(optimizer=dict(betas=[1.5, -3]))), ["betas", "less than 1"]),
        (dict(learner=dict(updates_per_batch=5)), ["prompts_per_batch 32", "updates_per_batch 5"]),
        (
            dict(rollout=dict(prompts_per_batch=4, group_size=2), learner=dict(data_parallel=4, updates_per_batch=4)),
            ["1 prompts × 2 samples", "data_parallel 4"],
        ),
        (dict(rollout=dict(top_k=0)), ["top_k is 0"]),
        (dict(schedule=dict(kind="staged", updates_per_stage=9)), ["updates_per_stage 9", "run.steps 8"]),
        (dict(schedule=dict(kind="async", lag=0)), ["schedule.lag", "greater than 0"]),
        (dict(learner=dict(optimizer=dict(lr=float("nan")))), ["learner.optimizer.lr"]),
        (dict(correction=dict(name="tis")), ["correction tis", "objective p3o", "twice", "clipped or gspo"]),
        (
            dict(correction=dict(name="icepop"), objective=dict(name="gspo", anchor="rollout")),
            ["correction icepop", "objective gspo", "objective.anchor=old"],
        ),
        (dict(correction=dict(name="opsm"), objective=dict(name="topr")), ["opsm", "cispo, clipped or gspo", "topr"]),
        (dict(advantage=dict(name="grpo", aggregation="prompt")), ["aggregation is prompt", "objective p3o"]),
        (dict(advantage=dict(name="fade", zero_variance="skip")), ["zero_variance is skip", "objective p3o"]),
        (
            dict(advantage=dict(name="fade", zero_variance="skip"), objective=dict(name="cispo")),
            ["zero_variance is skip", "advantage fade follows the entropy", "to keep, or to exclude"],
        ),
        (dict(objective=dict(name="p3o", ess_unit="sequence", ess_scope="micro_batch")), ["ess_scope step"]),
        (dict(objective=dict(name="mu_grpo", trigger="above")), ["kappa 0.3", "trigger above", "1.5"]),
        (dict(objective=dict(name="decoupled", mismatch_cap=0.5)), ["mismatch_cap", "1"]),
        (dict(objective=dict(name="dppo_tv", threshold=1.5)), ["threshold", "1.5"]),
        (
            dict(objective=dict(name="gspo", anchor="old"), correction=dict(name="icepop", low=5.0)),
            ["low 5.0", "high 5.0"],
        ),
        (dict(learner=dict(fp8_emulation=True)), ["rollout.precision is bf16", "rollout.precision to fp8_block"]),
        (
            dict(learner=dict(fp8_emulation=True, precision="fp8_block"), rollout=dict(precision="fp8_block")),
            ["learner.precision is fp8_block", "learner.precision to bf16 or fp32"],
        ),
        (dict(objective=dict(name="topr", clip_low=2.0)), ["clip_low 2.0", "clip_high 1.0"]),
    ],
)
def test_refusals(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from(data(**changes), source="file.yaml")
    message = str(caught.value)
    assert message.startswith("file.yaml: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_overrides_reach_nested_keys(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(data()))
    recipe = load_recipe(path, ["learner.optimizer.betas=[0.8, 0.9]", "schedule.kind=async", "schedule.lag=2"])
    assert recipe.learner.optimizer.betas == (0.8, 0.9)
    assert recipe.build_schedule().required_version(5) == 3


def test_a_file_extends_another_and_a_new_choice_takes_its_section_whole(tmp_path: Path) -> None:
    """Keys merge at any depth; GRPO's clip is not carried over into CISPO, P3O's estimator stays with P3O."""
    base = data(objective=dict(name="clipped", clip_low=0.1), schedule=dict(kind="async", lag=3))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "sub").mkdir()
    changes: dict[str, Any] = dict(
        extends="../base.yaml", run=dict(name="other"), objective=dict(name="cispo"), schedule=dict(lag=2)
    )
    (tmp_path / "sub" / "r.yaml").write_text(yaml.safe_dump(changes))
    recipe = load_recipe(tmp_path / "sub" / "r.yaml")
    assert (recipe.run.name, recipe.run.steps) == ("other", 8)
    assert recipe.objective.name == "cispo"
    assert recipe.build_schedule().required_version(5) == 3


def test_an_override_of_the_choice_clears_the_section_whatever_the_order(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(data(objective=dict(name="p3o", kl_estimator="importance"))))
    overrides = ["objective.clip_low=0.5", "objective.name=clipped"]
    for order in (overrides, overrides[::-1]):
        objective = load_recipe(path, order).objective
        assert (objective.name, getattr(objective, "clip_low", None)) == ("clipped", 0.5)
    assert load_recipe(path, ["objective.name=p3o"]).objective == load_recipe(path).objective


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        (dict(r=dict(extends="gone.yaml")), ["gone.yaml", "extended by", "r.yaml"]),
        (dict(r=dict(extends="a.yaml"), a=dict(extends="r.yaml")), ["a.yaml", "extends 'r.yaml'", "circle"]),
        (dict(r=dict(extends=3)), ["r.yaml", "extends is 3"]),
    ],
)
def test_bad_bases(tmp_path: Path, files: dict[str, Any], parts: list[str]) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("section", "override"),
    [
        ("controller", "controller.ess_floor=0.9"),
        ("reference", "reference.coefficient=0.1"),
        ("distillation", "distillation.path=teacher"),
        ("rollout.interruption", "rollout.interruption.phrase=stop"),
        ("reward.overlong", "reward.overlong.penalty=0.5"),
    ],
)
def test_an_override_opens_a_section_that_a_resolved_recipe_does_not_have(
    tmp_path: Path, section: str, override: str
) -> None:
    resolved, plain = tmp_path / "resolved.yaml", tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(data()))
    resolved.write_text(load_recipe(plain).to_yaml())
    assert operator.attrgetter(section)(load_recipe(resolved)) is None
    assert _told(resolved, override) == _told(plain, override)


def _told(path: Path, override: str) -> str:
    """The recipe, or what is said of it."""
    try:
        return load_recipe(path, [override]).to_yaml()
    except RecipeError as error:
        return str(error).replace(str(path), "")


@pytest.mark.parametrize("override", ["run.steps", "=3", "run.steps.deep=3"])
def test_bad_overrides(tmp_path: Path, override: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(data()))
    with pytest.raises(RecipeError, match="--set"):
        load_recipe(path, [override])


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "3"])
def test_files_that_are_no_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"r\.yaml"):
        load_recipe(path)


def test_a_shipped_recipe_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program is installed, nobody knows in which folder its recipes lie."""
    monkeypatch.chdir(tmp_path)
    assert find_recipe(Path("demo")) == find_recipe(Path("demo.yaml")) == SHIPPED / "demo.yaml"
    assert find_recipe(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "mine.yaml").write_text("extends: demo\nrun: {name: mine}\n")
    assert load_recipe(Path("mine.yaml")).rollout == load_recipe(Path("demo")).rollout


def test_resolved_recipe_reads_back_as_itself() -> None:
    recipe = recipe_from(data(), source="t")
    again = recipe_from(yaml.safe_load(recipe.to_yaml()), source="t")
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert isinstance(load_recipe(path), Recipe)


def test_every_key_is_listed() -> None:
    """The golden list of recipe keys: a new key is a decision, so it must be added here too."""
    golden = (Path(__file__).parents[3] / "golden" / "recipe_keys.txt").read_text().split()
    assert sorted(keys(Recipe.model_json_schema())) == golden


def keys(schema: dict[str, Any]) -> set[str]:
    """section.key of every definition in a JSON schema."""
    definitions = {**schema["$defs"], "Recipe": schema}
    return {f"{name}.{key}" for name, body in definitions.items() for key in body.get("properties", {})}


OLD = dict(name="clipped", anchor="old")


@pytest.mark.parametrize("cut", [dict(top_p=0.8), dict(top_k=20), dict(top_p=0.9, top_k=20)])
@pytest.mark.parametrize(
    ("sections", "who"),
    [
        (dict(), "objective p3o"),
        (dict(objective=dict(name="cispo")), "objective cispo"),
        (dict(objective=dict(name="clipped")), "objective clipped"),
        (dict(objective=OLD, correction=dict(name="tis")), "correction tis"),
        (dict(objective=OLD, correction=dict(name="opsm")), "correction opsm"),
    ],
)
def test_a_cut_vocabulary_is_refused_where_stored_probabilities_weigh(
    sections: dict[str, Any], who: str, cut: dict[str, Any]
) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from(data(rollout=cut | {"kept_set": False}, **sections), source="t")
    key, value = next(iter(cut.items()))
    remedies = ("set rollout.kept_set=true", f"rollout.{key}=", "clipped or gspo with anchor old")
    for part in (f"rollout.{key} is {value}", who, "biased", *remedies):
        assert part in str(caught.value)


@pytest.mark.parametrize("cut", [dict(top_p=0.8), dict(top_k=20), dict(top_p=0.9, top_k=MOST_KEPT)])
@pytest.mark.parametrize("sections", [dict(), dict(objective=OLD, correction=dict(name="tis"))])
def test_a_cut_vocabulary_is_fine_with_kept_sets(sections: dict[str, Any], cut: dict[str, Any]) -> None:
    assert recipe_from(data(rollout=cut, **sections), source="t").rollout.asks_for_kept_sets


def test_more_than_an_engine_can_name_is_refused() -> None:
    with pytest.raises(RecipeError, match=f"top_k is {MOST_KEPT + 1}, but engines name at most {MOST_KEPT} tokens"):
        recipe_from(data(rollout=dict(top_k=MOST_KEPT + 1)), source="t")
    assert recipe_from(data(rollout=dict(top_k=MOST_KEPT + 1, kept_set=False), objective=OLD), source="t")


@pytest.mark.parametrize(
    ("sections", "aggregation"),
    [
        (dict(), "token"),
        (dict(objective=dict(name="clipped")), "token"),
        (dict(objective=dict(name="gspo")), "sequence"),
        (dict(objective=dict(name="topr")), "constant"),
        (dict(objective=dict(name="clipped"), advantage=dict(name="dr_grpo")), "constant"),
        (dict(objective=dict(name="gspo"), advantage=dict(name="dr_grpo")), "sequence"),
        (dict(objective=dict(name="p3o"), advantage=dict(name="dr_grpo")), "token"),
        (dict(objective=dict(name="gspo"), advantage=dict(aggregation="token", name="grpo")), "token"),
        (dict(objective=dict(name="topr"), advantage=dict(aggregation="prompt", name="rloo")), "prompt"),
    ],
)
def test_a_paper_s_aggregation_is_the_default(sections: dict[str, Any], aggregation: str) -> None:
    recipe = recipe_from(data(**sections), source="t")
    assert recipe.advantage.aggregation == aggregation
    again = recipe_from(yaml.safe_load(recipe.to_yaml()), source="t")
    assert (again.advantage.aggregation, again.to_yaml()) == (aggregation, recipe.to_yaml())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(weights=dict(channel="broadcast")), "weights.channel is broadcast; use ipc"),
        (dict(schedule=dict(kind="async")), "schedule.kind is async; use sync"),
        (
            dict(rollout=dict(colocated=True, urls=["http://127.0.0.1:1"])),
            "rollout.urls names engines that others share",
        ),
        (
            dict(rollout=dict(colocated=True, precision="fp8_block"), controller={}),
            "controller may have engines started",
        ),
        (
            dict(learner=dict(megatron=dict(transformer=dict(cuda_graph_impl="local")))),
            "cuda_graph_impl keeps addresses of gradients",
        ),
    ],
)
def test_only_one_run_on_one_machine_takes_turns_with_its_engines(changes: dict[str, Any], said: str) -> None:
    whole: dict[str, Any] = dict(rollout=dict(colocated=True), weights=dict(channel="ipc"))
    assert a_recipe(**whole).rollout.colocated
    with pytest.raises(RecipeError, match=said):
        a_recipe(**(whole | changes))
