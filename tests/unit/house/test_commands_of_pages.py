"""Every command that a page gives to copy is run: here upon a written run, or by the test that is named, where it takes
engines or learners."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from launch.convert.new_model import new_model
from pipeline.data.event_log import EventLog
from pipeline.data.store import BatchStore
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
from tests.support import runs
from tests.support.batches import CONTRACT
from tests.support.pages import PAGES, ROOT, fenced_commands, words_of
from tests.support.runs import evenkeel
from tests.support.whole_runs import finish, whole_run

HERE = re.compile(
    "evenkeel (runs (show|list|compare)|report|trajectories|verify history|repair|fork|export|model new"
    "|convert inspect|doctor$)"
)
ELSEWHERE = {
    "convert": "tests/integration/test_convert.py",
    "doctor --hosts": "tests/unit/launch/doctor/test_hosts.py",
    "launch": "tests/unit/house/test_cluster_page_commands.py",
    "launch kubernetes": "tests/unit/launch/schedulers/test_kubernetes.py",
    "mismatch": "tests/integration/test_mismatch.py",
    "plan": "tests/unit/house/test_docs_site.py",
    "quant-map suggest": "tests/integration/test_quant_map_suggest.py",
    "recipe": "tests/unit/house/test_docs_site.py",
    "role": "tests/integration/test_images.py",
    "sft": "tests/integration/test_sft.py",
    "trace": "tests/integration/test_loop.py",
    "train": "tests/integration/test_loop.py",
}
"""Beginning of a command → the test that runs commands like it."""
WHOLE = {"own-run.md": "test_own_run_page.py", "distillation.md": "test_distillation_page.py"}
"""Pages whose commands are run one after the other, as they stand."""
NAMES = {
    **dict.fromkeys(("RUN", "/shared/runs/qwen3-32b", "runs/one-gpu", "runs/eight"), "runs/demo"),
    "pipeline/recipes/models/qwen3-0.6b": str(ROOT / "pipeline/recipes/models/demo"),
    "/models/qwen3-8b-fp8": "model",
    "/tmp/my-wandb": "my-wandb",
}
"""What a page says → what there is here, of a size for a test."""
COMMANDS = sorted({one for page in PAGES if page.name not in WHOLE for one in fenced_commands(page)})
RUN_HERE = [one for one in COMMANDS if HERE.match(one)]


def test_each_command_is_run_by_some_test() -> None:
    begins = tuple(f"evenkeel {start}" for start in ELSEWHERE)
    assert [one for one in COMMANDS if one not in RUN_HERE and not one.startswith(begins)] == []
    assert [start for start in begins if not any(one.startswith(start) for one in COMMANDS)] == []
    for start, test in ELSEWHERE.items():
        text = (ROOT / test).read_text()
        assert [word for word in start.split() if word not in text] == [], test
    for page, test in WHOLE.items():
        assert page in (ROOT / "tests/integration" / test).read_text()


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
        run.write_learner_logprobs(step, BatchStore(run.batches).read(step, None).rollout_logprobs)
    EventLog(run.path, "collector-000002").event("evaluated", version=84, pass_at_1=0.5)
    run.write_evaluation(84, dict(pass_at_1=0.5))
    finish(run)
    (folder / "runs").mkdir()
    for name in ("a", "b", "demo"):
        shutil.copytree(run.path, folder / "runs" / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN_HERE)
def test_it_does_what_the_page_says(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ROOT", folder)
    done = evenkeel(*(NAMES.get(word, word) for word in words_of(command)))
    assert (done.returncode, "error:" in done.stderr) == (0, False), done
    assert done.stdout
