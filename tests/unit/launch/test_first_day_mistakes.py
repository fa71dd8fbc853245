"""Mistakes of somebody's first day: each gets one line that names cause and remedy, and nothing is started or written.

A row is a command line, made in a workshop with a small model and a JSONL file, and what its one line must say.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch.run import train
from pipeline.config.loader import load_recipe
from pipeline.data.run_directory import RunDirectory
from tests.support.runs import evenkeel, make_model, make_prompts, make_recipe

GOOD_LINES = "".join(json.dumps(dict(prompt=f"{number}=", answer="1")) + "\n" for number in range(100, 164))


@dataclass
class Workshop:
    """What a new user has: a model, data, a recipe, each in a folder of its own."""

    folder: Path
    model: Path
    patch: pytest.MonkeyPatch
    listener: socket.socket

    def train(self, *sets: str, **sections: dict[str, Any]) -> list[str]:
        """`evenkeel train` of a recipe that is right but for `sections` and `--set`."""
        recipe = make_recipe(self.folder, self.model, "day", **sections)
        return ["train", str(recipe), *(word for one in sets for word in ("--set", one))]

    def train_text(self, text: str) -> list[str]:
        """… of a recipe file of this text."""
        (self.folder / "own.yaml").write_text(text)
        return ["train", str(self.folder / "own.yaml")]

    def train_on(self, data: str | bytes, **task: Any) -> list[str]:
        """… on a prompts file of these bytes."""
        command = self.train()
        (self.folder / "prompts.jsonl").write_bytes(data if isinstance(data, bytes) else data.encode())
        return [*command, *(word for key, value in task.items() for word in ("--set", f"task.{key}={value}"))]

    def train_model(self, change: Callable[[Path], object]) -> list[str]:
        """… of a copy of the model that was changed."""
        self.model = Path(shutil.copytree(self.model, self.folder / "model"))
        change(self.model)
        return self.train()

    def begun(self, *sets: str) -> list[str]:
        """… of a run that has a batch, with other values."""
        command, run = self.train(), RunDirectory(self.folder / "runs/day")
        run.freeze(load_recipe(Path(command[1])))
        (run.batches / "000000.zarr.zip").touch()
        return [*command, *(word for one in sets for word in ("--set", one))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("first-day") / "model")


@pytest.fixture
def shop(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    def started(*_: object) -> None:
        pytest.fail("a run was started")

    monkeypatch.setattr(train, "_supervise", started)
    monkeypatch.setattr(train, "seed_policy", started)
    monkeypatch.setattr("launch.run.sft.run_ranks", started)
    with socket.socket() as listener:
        yield Workshop(tmp_path, model, monkeypatch, listener)


def config(**changes: Any) -> Callable[[Path], object]:
    """Change config.json of a model folder."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def cut_in_half(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)


def without(package: str) -> Callable[[Workshop], list[str]]:
    def make(shop: Workshop) -> list[str]:
        shop.patch.setattr("pipeline.importing.find_spec", lambda name: None if name == package else name)
        return shop.train()

    return make


def without_sglang(shop: Workshop) -> list[str]:
    shop.patch.setattr("rollout_sglang.server.rollout_python.sglang_version", lambda: None)
    return shop.train()


def full_disk(shop: Workshop) -> list[str]:
    found = os.statvfs(shop.folder)
    full = os.statvfs_result((found.f_bsize, found.f_frsize, found.f_blocks, 0, 0, *tuple(found)[5:10]))
    shop.patch.setattr(os, "statvfs", lambda path: full)
    return shop.train()


def read_only(shop: Workshop) -> list[str]:
    found = os.statvfs(shop.folder)
    mounted = os.statvfs_result((*tuple(found)[:8], found.f_flag | os.ST_RDONLY, found.f_namemax))
    shop.patch.setattr(os, "statvfs", lambda path: mounted)
    return shop.train()


def taken_metrics_port(shop: Workshop, place: int) -> list[str]:
    """… with the port taken that is `place` behind --metrics-port."""
    first = free_ports(4)
    shop.listener.bind(("127.0.0.1", first + place))
    shop.listener.listen()
    return [*shop.train(), "--metrics-port", str(first)]


def free_ports(count: int) -> int:
    """The first of so many in a row, at none of which another test or program listens."""
    while True:
        with ExitStack() as bound:
            first = bound.enter_context(bound_socket(0)).getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    bound.enter_context(bound_socket(port))
            except (OSError, OverflowError):  # taken, or above the last port
                continue
            return first


@contextmanager
def bound_socket(port: int) -> Iterator[socket.socket]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", port))
        yield one


def taken_port(shop: Workshop) -> list[str]:
    shop.listener.bind(("127.0.0.1", 0))
    shop.listener.listen()
    return shop.train(f"rollout.port={shop.listener.getsockname()[1]}")


def no_pyarrow(shop: Workshop) -> list[str]:
    shop.patch.setitem(sys.modules, "pyarrow", None)
    return shop.train_on(b"PAR1")


def reward(function: str) -> Callable[[Workshop], list[str]]:
    def make(shop: Workshop) -> list[str]:
        examples = Path(__file__).parents[1] / "pipeline/rewards"
        shop.patch.syspath_prepend(examples)
        return shop.train_on(GOOD_LINES, reward=f"reward_examples:{function}")

    return make


MISTAKES: dict[str, tuple[Callable[[Workshop], list[str]], tuple[str, ...]]] = {
    # the command line
    "a command misspelled": (lambda shop: ["trian", "demo"], ("No such command 'trian'", "'train'")),
    "an option misspelled": (lambda shop: ["sft", "demo", "--step", "3"], ("No such option: --step", "--steps")),
    "a key in Hydra's way": (
        lambda shop: [*shop.train(), "run.name=other"],
        ("a recipe's key needs --set before it: --set run.name=other; `evenkeel train --help`",),
    ),
    "a recipe's name misspelled": (lambda shop: ["train", "dmo"], ("cannot read recipe dmo", "did you mean demo?")),
    "sft without --out": (lambda shop: ["sft", "demo"], ("Missing option '--out'", "`evenkeel sft --help`")),
    "sft on data that is not there": (
        lambda shop: ["sft", shop.train()[1], "--out", str(shop.folder / "out"), "--data", "nofile.jsonl"],
        ("cannot read nofile.jsonl: No such file", "give --data a JSON Lines file"),
    ),
    "--set without a value": (lambda shop: shop.train("run.steps"), ("'run.steps' is not section.key=value", "for ex")),
    "a folder that is no run": (lambda shop: ["report", str(shop.model)], ("no recipe.yaml", "runs/NAME")),
    # the recipe
    "a key misspelled": (lambda shop: shop.train("rollout.grup_size=4"), ("did you mean rollout.group_size?",)),
    "a choice misspelled": (
        lambda shop: shop.train("schedule.kind=asynch"),
        ("schedule.kind is 'asynch'", "did you mean async?"),
    ),
    "an advantage for an objective": (
        lambda shop: shop.train("objective.name=grpo"),
        ("grpo is an advantage (advantage.name); its objective is clipped",),
    ),
    "an objective that cannot be imported": (
        lambda shop: shop.train("objective={class: nowhere.mine:Mine}"),
        ("nowhere.mine:Mine cannot be imported", "PYTHONPATH"),
    ),
    "a word for a section": (
        lambda shop: shop.train("schedule=async"),
        ("schedule: expected a section: {kind: async}, got 'async'",),
    ),
    "text for a list": (
        lambda shop: shop.train("rollout.extra_args=--mem-fraction-static 0.8"),
        ('expected a list: ["--mem-fraction-static", "0.8"], got',),
    ),
    "a name with a slash": (
        lambda shop: shop.train("run.name=a/b"),
        ("expected letters, digits, . _ and -", "run.root", "'a/b'"),
    ),
    "a greedy evaluation": (
        lambda shop: shop.train("evaluation.temperature=0"),
        ("evaluation.temperature: there is no greedy evaluation", "use 0.6 or 1"),
    ),
    "no room for a prompt": (
        lambda shop: shop.train("rollout.max_new_tokens=64"),
        ("leaves no room for a prompt", "raise rollout.context_tokens"),
    ),
    "a tab in a recipe": (
        lambda shop: shop.train_text("run:\n\tname: own\n"),
        ("own.yaml: line 2", "indent with spaces"),
    ),
    # data
    "a prompts file that is not there": (
        lambda shop: shop.train_on("", path=shop.folder / "none.jsonl"),
        ("none.jsonl: No such file", "set task.path"),
    ),
    "CSV": (lambda shop: shop.train_on("prompt,answer\n1=,1\n"), ("prompts.jsonl is CSV", "csv.DictReader")),
    "a JSON list": (
        lambda shop: shop.train_on('[{"prompt": "1=", "answer": "1"}]'),
        ("is a JSON array", "jq -c '.[]'"),
    ),
    "Parquet without pyarrow": (no_pyarrow, ("read by pyarrow", "pip install 'pyarrow>=")),
    "characters that the tokenizer lacks": (
        lambda shop: shop.train_on(GOOD_LINES.replace("=", "Ü")),
        ("character",),
    ),
    # the model
    "the demo before its model": (
        lambda shop: ["train", "demo", "--set", f"model.path={shop.folder}/demo", "--set", f"run.root={shop.folder}"],
        ("demo is not a folder", "`evenkeel model new`"),
    ),
    "a model's name on a hub": (
        lambda shop: shop.train("model.path=Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B is not a folder", "downloaded HF model"),
    ),
    "episodes of a model without the characters of messages": (
        lambda shop: shop.train('episode={"command": ["agent"]}'),
        ("'#>:<!' cannot be encoded", "chat_template.jinja"),
    ),
    "a context longer than the model's": (
        lambda shop: shop.train("rollout.context_tokens=5000", "learner.micro_batch_tokens=8192"),
        ("rollout.context_tokens is 5000", "takes 4096 tokens at most", "lower rollout.context_tokens"),
    ),
    "a model without config.json": (
        lambda shop: shop.train_model(lambda folder: (folder / "config.json").unlink()),
        ("has no config.json",),
    ),
    "weights that were cut off": (lambda shop: shop.train_model(cut_in_half), ("safetensors",)),
    "no tokenizer": (
        lambda shop: shop.train_model(lambda folder: (folder / "tokenizer.json").unlink()),
        ("tokenizer.json",),
    ),
    "a tokenizer of another model": (lambda shop: shop.train_model(config(vocab_size=16)), ("token id", "16 rows")),
    "sizes of another model": (lambda shop: shop.train_model(config(intermediate_size=512)), ("model.layers.0.mlp.",)),
    # the machine
    "no torch": (
        without("torch"),
        ("this machine has no torch", "pip install 'torch>=2.11'", "on a CPU: `make install`"),
    ),
    "no SGLang": (
        without_sglang,
        ("has no sglang", "pip install sglang==0.5.23 sglang-router==0.3.2", "--no-deps sglang==0.5.23"),
    ),
    "a GPU's arguments without a GPU": (
        lambda shop: shop.train("rollout.extra_args=[--attention-backend, flashinfer]"),
        ("--attention-backend flashinfer", "for a CUDA GPU"),
    ),
    "a metrics port that is taken": (
        lambda shop: taken_metrics_port(shop, 0),
        ("is taken", "the supervisor shows", "--metrics-port"),
    ),
    "a port that is taken": (taken_port, ("is taken", "set rollout.port to another")),
    "a full disk": (full_disk, ("too full", "free ", "the same command")),
    "a read-only root": (read_only, ("mounted read-only", "set run.root to another folder")),
    # rewards
    "a reward that returns a dict": (reward("gives_a_dict"), ("reward_examples:gives_a_dict", "bad_result", "correct")),
    "a reward's file for its module": (
        lambda shop: shop.train_on(GOOD_LINES, reward="my_rewards.py:score"),
        ("task.reward: is 'my_rewards.py:score', expected a module, not its file; write 'my_rewards:score'",),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_line_names_cause_and_remedy(mistake: str, shop: Workshop) -> None:
    make, parts = MISTAKES[mistake]
    done = evenkeel(*make(shop))
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("note: ")]
    assert done.returncode in (1, 2), done
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in done.stdout + done.stderr
    for part in parts:
        assert part in lines[0], lines[0]


def test_the_recipe_of_the_workshop_is_right(shop: Workshop) -> None:
    """Otherwise a row could be refused for something else."""
    shop.patch.setattr(train, "seed_policy", lambda *_: None)
    shop.patch.setattr(train, "_supervise", lambda *_: "stopped")
    make_prompts(shop.folder / "prompts.jsonl")
    done = evenkeel(*shop.train())
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("holds no checkpoint yet; the same command begins again\n")
