"""Every page of the documentation: its commands exist, its links lead somewhere, its recipes load, the site shows it.

The site itself is built by `make docs`, strictly; here only what it is made of is looked at, which takes no generator.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.run.sft import fill_in
from launch.verify.layouts import LAYOUTS, Case, build_cases
from ops.docs.hooks import DOCS, FROM_REPOSITORY, MADE, extra_pages
from pipeline.config.loader import SHIPPED, load_recipe
from pipeline.config.meant_keys import known_keys
from pipeline.config.recipe import Recipe
from pipeline.data.batch_format import OPTIONAL, PER_SAMPLE, PER_TOKEN, SCHEMA_VERSION
from pipeline.data.event_log import EVENT_KINDS
from pipeline.data.store import BatchStore
from tests.support.batches import batch_of_rewards
from tests.support.pages import (
    PAGES,
    ROOT,
    anchors,
    blocks,
    commands,
    fenced_commands,
    links,
    name_of,
    parse,
    unknown_options,
    words_of,
)
from tests.support.runs import evenkeel
from tests.unit.house.test_operations_pages import says

SITE = yaml.safe_load((ROOT / "ops/docs/mkdocs.yml").read_text())
ROOMS = ("docs", "launch", "megatron_bridge", "ops", "pipeline", "precision", "rollout_sglang", "tests")
CHOSEN = ("task", "objective", "correction", "advantage", "schedule")
"""Sections of which another choice has other keys."""
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=name_of)


def in_navigation(entry: Any = SITE["nav"]) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from in_navigation(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    shown = list(in_navigation())
    of_docs = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    others = set(FROM_REPOSITORY)
    missing = sorted((of_docs | MADE.keys() | others) - set(shown))
    assert missing == [], f"add a line for each to `nav` in ops/docs/mkdocs.yml: {missing}"
    assert sorted(shown) == sorted(of_docs | MADE.keys() | others)


@EVERY_PAGE
def test_commands_exist_with_their_options(page: Path) -> None:
    assert {one: unknown for one in commands(page) if "COMMAND" not in one and (unknown := unknown_options(one))} == {}


@EVERY_PAGE
def test_commands_to_copy_are_parsed(page: Path) -> None:
    for command in fenced_commands(page):
        if "…" not in command and "COMMAND" not in command:
            parse(command)


def cheap_commands() -> list[str]:
    """Those that need nothing but a recipe that comes with Even Keel."""
    found = {
        command for page in PAGES for command in fenced_commands(page) if re.match("evenkeel (plan|recipe) ", command)
    }
    shipped = {path.stem for path in SHIPPED.glob("*.yaml")} | {"--schema"}
    return sorted(command for command in found if words_of(command)[1] in shipped and "…" not in command)


@pytest.mark.parametrize("command", cheap_commands())
def test_cheap_commands_do_what_they_say(command: str) -> None:
    done = evenkeel(*words_of(command))
    assert (done.returncode, done.stderr.count("error:")) == (0, 0), done.stderr
    assert done.stdout


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    made = extra_pages()
    for target, anchor in links(page):
        there = page if target == "" else (page.parent / target).resolve()
        place = str(there.relative_to(DOCS)) if there.is_relative_to(DOCS) else None
        assert there.exists() or place in MADE, f"{name_of(page)}: {target}"
        if anchor:
            text = made[place] if place in MADE else there.read_text()
            assert anchor in anchors(text), f"{name_of(page)}: {target}#{anchor}"


def test_the_demo_by_hand_is_that_of_make_demo() -> None:
    makefile = (ROOT / "Makefile").read_text()
    rules = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert rules is not None
    made = rules[1].replace("\\\n", " ").replace("$(DEMO)", "demo")
    called = [f"evenkeel {' '.join(words.split())}" for words in re.findall(r"\$\(BIN\)/evenkeel (.*)", made)]
    by_hand = [" ".join(command.split()) for command in fenced_commands(DOCS / "index.md")]
    assert [command for command in by_hand if command.split()[1] in ("model", "sft", "train")] == called


def test_the_layouts_that_are_counted_are_those_that_are_compared() -> None:
    cases = [case for model in LAYOUTS for case in build_cases(model, None) if case != Case(model, "one")]
    for page in (DOCS / "tested.md", ROOT / "README.md"):
        assert f"{len(cases)} cases" in " ".join(page.read_text().split())


def test_quoted_messages_are_in_the_code() -> None:
    rows = re.findall(r"^\| `([^`]*)` \|", (ROOT / "ops/runbook.md").read_text(), re.MULTILINE)
    quoted = [message for message in rows if " " in message]
    assert len(quoted) > 20
    assert [message for message in quoted if not says(message)] == []


def test_every_kind_of_event_is_explained() -> None:
    page = (DOCS / "file-formats.md").read_text()
    assert [kind for kind in EVENT_KINDS if f"`{kind}`" not in page] == []


def test_every_array_of_a_batch_is_explained() -> None:
    page = (DOCS / "file-formats.md").read_text()
    arrays = (*PER_TOKEN, *PER_SAMPLE, *OPTIONAL, "reward_parts")
    assert [name for name in arrays if f"`{name}`" not in page] == []


def test_a_batch_is_read_by_the_code_of_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(DOCS / "file-formats.md", "python")
    path = BatchStore(tmp_path).commit(batch_of_rewards([[1.0, 0.0]]))
    exec(compile(code.replace("runs/demo/batches/000012.zarr.zip", str(path)), "page", "exec"), {})
    assert capsys.readouterr().out == f"0.5 {SCHEMA_VERSION}\n"


@EVERY_PAGE
def test_paths_modules_and_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]+)`", text)
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []
    modules = [name.replace(".", "/") for name in re.findall(r"python -m ((?:ops|tests)\.[\w.]+)", text)]
    assert [name for name in modules if not ((ROOT / name).is_dir() or (ROOT / f"{name}.py").exists())] == []
    assert {name for name in re.findall(r"`make ([a-z-]+)", text)} <= targets


@EVERY_PAGE
def test_recipe_keys_exist(page: Path) -> None:
    sections = "|".join(Recipe.model_fields)
    named = re.findall(
        rf"`(?:--set )?((?:{sections})(?:\.[a-z_0-9]+)+)(?:[=:][^`]*)?`", page.read_text(encoding="utf-8")
    )
    assert sorted({key for key in named if key not in known_keys() and not key.startswith("model.layers")}) == []


@EVERY_PAGE
def test_no_command_tunes_a_model_into_its_own_folder(page: Path) -> None:
    """Shipped recipes name the model that fine-tuning makes, so the command says which one it begins with."""
    for command in commands(page):
        words = words_of(command)
        if words[0] == "sft" and "--out" in words and (SHIPPED / f"{words[1]}.yaml").exists():
            said = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
            begins = load_recipe(SHIPPED / f"{words[1]}.yaml", said).model.path
            assert Path(words[words.index("--out") + 1]) != begins, command


@EVERY_PAGE
def test_recipes_on_a_page_load(page: Path) -> None:
    """A whole one as it stands, a part of one upon the demo's."""
    for text in blocks(page, "yaml"):
        data = yaml.safe_load(text)
        if isinstance(data, dict) and data.keys() <= {*Recipe.model_fields, "extends"} and "class:" not in text:
            if page.name == "sft.md":
                fill_in(data, steps=300, rows=Path("rows.jsonl"))  # as the command of the page says
            load_part(data)


def load_part(data: dict[str, Any]) -> Recipe:
    """The recipe that the data are, upon the demo's where sections lack. Raises ValidationError."""
    if {"run", "model", "task"} <= data.keys():
        return Recipe.model_validate(data)
    base = load_recipe(SHIPPED / "demo.yaml").model_dump(mode="json")
    if "extends" in data:
        base = load_recipe(SHIPPED / f"{Path(data.pop('extends')).stem}.yaml").model_dump(mode="json")
    for section, keys in data.items():
        inherited = base[section] if section not in CHOSEN and isinstance(keys, dict) else None
        base[section] = {**inherited, **keys} if inherited else keys
    return Recipe.model_validate(base)


@EVERY_PAGE
def test_python_on_a_page_is_python(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)


def test_the_page_of_recipe_keys_has_every_key() -> None:
    page = extra_pages()["reference/recipe.md"]
    shown = {name.rpartition(".")[2] for name in re.findall(r'<a id="([^"]+)"', page)}
    assert {key.rpartition(".")[2] for key in known_keys()} - shown - {"name", "kind", *Recipe.model_fields} == set()
    assert "P3O: policy optimization capped and anchored" in page  # what the file of a method says at its head


def test_the_page_of_commands_has_every_command() -> None:
    page = extra_pages()["reference/cli.md"]
    golden = [line.partition(":") for line in (ROOT / "tests/golden/cli_options.txt").read_text().splitlines()]
    assert sorted(re.findall(r"^## (evenkeel .*) \{", page, re.MULTILINE)) == sorted(name for name, *_ in golden)
    assert [option for *_, names in golden for option in names.split() if option not in page] == []
