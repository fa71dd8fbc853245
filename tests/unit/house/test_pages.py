"""Every page: its commands exist and do what they say, its links lead somewhere, its recipes load, the site shows it.

The site itself is built by `make docs`, strictly; here only what it is made of is looked at, which takes no generator.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.convert.new_model import new_model
from launch.run.sft import fill_in
from ops.docs.hooks import DOCS, FROM_REPOSITORY, MADE, extra_pages
from pipeline.config.loader import SHIPPED, load_recipe
from pipeline.config.meant_keys import known_keys
from pipeline.config.recipe import Recipe
from pipeline.data.batch_format import SCHEMA_VERSION
from pipeline.data.event_log import EventLog
from pipeline.data.store import BatchStore
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.support import pages, runs
from tests.support.batches import CONTRACT, batch_of_rewards
from tests.support.pages import PAGES, ROOT, fenced_commands, name_of, words_of
from tests.support.runs import evenkeel
from tests.support.whole_runs import finish, whole_run

SITE = yaml.safe_load((ROOT / "ops/docs/mkdocs.yml").read_text())
ROOMS = ("docs", "launch", "megatron_bridge", "ops", "pipeline", "precision", "rollout_sglang", "tests")
CHOSEN = ("task", "objective", "correction", "advantage", "schedule")
"""Sections of which another choice has other keys."""
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=name_of)
RUN_BY_ITS_TEST = ("own-run.md", "distillation.md")
"""Pages whose commands are run one after the other, as they stand, by integration tests."""
COMMANDS = sorted({one for page in PAGES if page.name not in RUN_BY_ITS_TEST for one in fenced_commands(page)})
UPON_A_RUN = re.compile(
    "evenkeel (runs (show|list|compare)|report|trajectories|verify history|repair|fork|export|model new"
    "|convert inspect|doctor$)"
)
NAMES = {
    **dict.fromkeys(("RUN", "/shared/runs/qwen3-32b", "runs/one-gpu", "runs/eight"), "runs/demo"),
    "pipeline/recipes/models/qwen3-0.6b": str(ROOT / "pipeline/recipes/models/demo"),
    "/models/qwen3-8b-fp8": "model",
    "/tmp/my-wandb": "my-wandb",
}
"""What a page says → what there is here, of a size for a test."""


def in_navigation(entry: Any = SITE["nav"]) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from in_navigation(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    of_docs = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(in_navigation()) == sorted(of_docs | MADE.keys() | set(FROM_REPOSITORY))


@EVERY_PAGE
def test_commands_exist_with_their_options(page: Path) -> None:
    named = [one for one in pages.commands(page) if "COMMAND" not in one]
    assert {one: unknown for one in named if (unknown := pages.unknown_options(one))} == {}
    for command in fenced_commands(page):
        if "…" not in command and "COMMAND" not in command:
            pages.parse(command)


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    made = extra_pages()
    for target, anchor in pages.links(page):
        there = page if target == "" else (page.parent / target).resolve()
        place = str(there.relative_to(DOCS)) if there.is_relative_to(DOCS) else None
        assert there.exists() or place in MADE, f"{name_of(page)}: {target}"
        if anchor:
            text = made[place] if place in MADE else there.read_text()
            assert anchor in pages.anchors(text), f"{name_of(page)}: {target}#{anchor}"


@EVERY_PAGE
def test_paths_modules_targets_and_recipe_keys_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]+)`", text)
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []
    modules = [name.replace(".", "/") for name in re.findall(r"python -m ((?:ops|tests)\.[\w.]+)", text)]
    assert [name for name in modules if not ((ROOT / name).is_dir() or (ROOT / f"{name}.py").exists())] == []
    assert {name for name in re.findall(r"`make ([a-z-]+)", text)} <= targets
    keys = re.findall(rf"`(?:--set )?((?:{'|'.join(Recipe.model_fields)})(?:\.[a-z_0-9]+)+)(?:[=:][^`]*)?`", text)
    assert sorted({key for key in keys if key not in known_keys() and not key.startswith("model.layers")}) == []


@EVERY_PAGE
def test_code_on_a_page_is_valid(page: Path) -> None:
    """Python parses; a whole recipe loads as it stands, a part of one upon the demo's."""
    for text in pages.blocks(page, "python"):
        ast.parse(text)
    for text in pages.blocks(page, "yaml"):
        data = yaml.safe_load(text)
        if isinstance(data, dict) and data.keys() <= {*Recipe.model_fields, "extends"} and "class:" not in text:
            if page.name == "sft.md":
                fill_in(data, steps=300, rows=Path("rows.jsonl"))  # as the command of the page says
            load_part(data)


def load_part(data: dict[str, Any]) -> Recipe:
    """The recipe that the data are, upon the demo's where sections lack. Raises ValidationError."""
    if {"run", "model", "task"} <= data.keys():
        return Recipe.model_validate(data)
    extended = Path(data.pop("extends")).stem if "extends" in data else "demo"
    base = load_recipe(SHIPPED / f"{extended}.yaml").model_dump(mode="json")
    for section, keys in data.items():
        inherited = base[section] if section not in CHOSEN and isinstance(keys, dict) else None
        base[section] = {**inherited, **keys} if inherited else keys
    return Recipe.model_validate(base)


def test_a_batch_is_read_by_the_code_of_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = pages.blocks(DOCS / "file-formats.md", "python")
    path = BatchStore(tmp_path).commit(batch_of_rewards([[1.0, 0.0]]))
    exec(compile(code.replace("runs/demo/batches/000012.zarr.zip", str(path)), "page", "exec"), {})
    assert capsys.readouterr().out == f"0.5 {SCHEMA_VERSION}\n"


@pytest.mark.parametrize("command", [one for one in COMMANDS if re.match("evenkeel (plan|recipe) ", one)])
def test_commands_upon_a_shipped_recipe(command: str) -> None:
    words = words_of(command)
    if words[1] not in {path.stem for path in SHIPPED.glob("*.yaml")} | {"--schema"} or "…" in command:
        pytest.skip("it needs the reader's files")
    done = evenkeel(*words)
    assert (done.returncode, done.stderr.count("error:")) == (0, 0), done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("evenkeel launch ") and "--out" in one])
def test_commands_that_write_files_of_a_scheduler(command: str, tmp_path: Path) -> None:
    """On a machine that has nothing of the model."""
    (tmp_path / "cluster.sh").write_text("module load cuda\n")
    words = shlex.split(command.replace("sha256:…", "sha256:" + "1" * 64))[1:]
    for option in ("--out", "--setup"):
        if option in words:
            words[words.index(option) + 1] = str(tmp_path / Path(words[words.index(option) + 1]).name)
    done = evenkeel(*words)
    assert done.returncode == 0, done.stderr
    assert list(Path(words[words.index("--out") + 1]).iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where somebody stands who has finished runs of 84 steps, and a model."""
    folder = tmp_path_factory.mktemp("pages")
    new_model(folder / "model", hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
    write_character_tokenizer(folder / "m", "".join(map(chr, range(0x4E00, 0x4F00))))  # what the recipe names
    contract = replace(CONTRACT, tokenizer_sha256=Tokenizer.load(folder / "m").sha256)
    run = whole_run(
        folder, committed=84, published=84, saved=(20, 80, 84), policies=(82, 83, 84), steps=84, contract=contract
    )
    for step in range(84):
        run.write_logprobs(step, BatchStore(run.batches).read(step, None).rollout_logprobs)
    EventLog(run.path, "collector-000002").event("evaluated", version=84, pass_at_1=0.5)
    run.write_evaluation(84, dict(pass_at_1=0.5))
    finish(run)
    (folder / "runs").mkdir()
    for name in ("a", "b", "demo"):
        shutil.copytree(run.path, folder / "runs" / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in COMMANDS if UPON_A_RUN.match(one)])
def test_commands_upon_a_run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ROOT", folder)
    done = evenkeel(*(NAMES.get(word, word) for word in words_of(command)))
    assert (done.returncode, "error:" in done.stderr) == (0, False), done
    assert done.stdout
