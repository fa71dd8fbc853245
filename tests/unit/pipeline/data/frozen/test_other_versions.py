"""A run of an earlier or a later version of Even Keel can be looked at; what is not known of it is said in one line."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipeline.config.loader import recipe_to_show
from pipeline.data.event_log import read_metrics
from pipeline.data.frozen.recipes import shown_recipe
from pipeline.data.frozen.run_format import RUN_FORMAT, is_sealed
from pipeline.data.integrity.sealed import seal
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError, StoreError
from pipeline.tasks.character_tokenizer import write_character_tokenizer
from pipeline.tasks.tokenizer import Tokenizer
from tests.support.batches import CONTRACT
from tests.support.runs import evenkeel, evenkeel_json
from tests.support.whole_runs import whole_run

FORMAT_1 = Path(__file__).parents[4] / "golden" / "store" / "run_format_1.yaml"
COMMANDS = (
    ("runs", "show", "RUN"),
    ("report", "RUN"),
    ("verify", "history", "RUN"),
    ("trajectories", "show", "RUN", "0"),
)


def readable_run(folder: Path) -> RunDirectory:
    """A run with a tokenizer that knows the tokens of its batches."""
    write_character_tokenizer(folder / "m", "".join(map(chr, range(0x4E00, 0x4F00))))
    contract = replace(CONTRACT, tokenizer_sha256=Tokenizer.load(folder / "m").sha256)
    run = whole_run(folder, saved=(2, 4), published=5, contract=contract)
    shutil.rmtree(run.logprobs)  # they are those of other batches
    (folder / "m").rename(run.model)
    return run


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """A run of the next format, whose recipe has a section, a key and an objective that do not exist yet."""
    run = readable_run(tmp_path)
    data = yaml.safe_load((run.path / "recipe.yaml").read_text())
    data |= dict(novelty=dict(weight=1), objective=dict(name="p9o", power=3))
    data["rollout"]["speculative"] = True
    (run.path / "recipe.yaml").write_text(seal(yaml.safe_dump(data)))
    (run.path / "FORMAT").write_text(seal(f"{RUN_FORMAT + 1}\n"))
    return run.path


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run of format 4, whose files had no checksums."""
    run = readable_run(tmp_path).path
    for path in (*run.rglob("*.jsonl"), run / "recipe.yaml"):
        text = re.sub(r', "crc32": "[0-9a-f]{8}"\}', "}", path.read_text())
        path.write_text(re.sub(r"# crc32 [0-9a-f]{8}\n", "", text))
    (run / "FORMAT").write_text("4\n")
    return run


def test_a_later_run_is_shown_and_what_is_unknown_is_named(later: Path) -> None:
    for command in COMMANDS:
        done = evenkeel(*(later if word == "RUN" else word for word in command))
        warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
        assert len(warnings) == 2, (command, done.stderr)
        assert f"a later version of Even Keel (run format {RUN_FORMAT + 1}" in warnings[0]
        assert all(name in warnings[1] for name in ("novelty", "rollout.speculative", "objective"))
        assert "error" not in done.stderr, (command, done.stderr)
    assert evenkeel_json("runs", "show", later)["steps"] == 5
    assert shown_recipe(later).rollout.group_size == 2


def test_an_earlier_run_without_checksums_is_shown(earlier: Path) -> None:
    assert not is_sealed(earlier)
    assert [line["step"] for line in read_metrics(earlier)] == [0, 1, 2, 3, 4]
    assert evenkeel_json("runs", "show", earlier)["steps"] == 5
    for command in COMMANDS:
        done = evenkeel(*(earlier if word == "RUN" else word for word in command))
        assert "an earlier version of Even Keel (run format 4" in done.stderr, command
        assert "error" not in done.stderr, (command, done.stderr)
    assert (earlier / "report.html").exists()


def test_other_versions_are_still_not_gone_on_with(later: Path) -> None:
    with pytest.raises(StoreError, match="made by a later version"):
        RunDirectory(later).recipe()


def test_a_recipe_of_format_1_is_known_in_part(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(FORMAT_1, tmp_path / "run" / "recipe.yaml")
    assert shown_recipe(tmp_path / "run").run.steps == 2


def test_this_versions_runs_are_read_strictly(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    (run.path / "recipe.yaml").write_text("run: {}\n")
    with pytest.raises(StoreError, match="does not end in its checksum"):
        shown_recipe(run.path)


def test_what_is_no_recipe_is_refused_all_the_same() -> None:
    with pytest.raises(RecipeError, match="run"):
        recipe_to_show(dict(objective=dict(name="p9o")), source="x", say=lambda _: None)
