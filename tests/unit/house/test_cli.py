"""The command line: its golden list of commands and options, its help, and its one-line errors."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from launch.cli import app
from tests.support.runs import evenkeel

ROOT = Path(__file__).parents[3]


def options(command: Any, path: str = "evenkeel") -> list[str]:
    """`command: parameter parameter …`, depth first."""
    if hasattr(command, "commands"):
        return [line for name, sub in sorted(command.commands.items()) for line in options(sub, f"{path} {name}")]
    names = [max(p.opts, key=len) for p in command.params if p.name != "help"]
    return [f"{path}: {' '.join(sorted(names))}".rstrip()]


def test_commands_and_options_are_listed() -> None:
    """A new option is a decision, so it must be added to the golden list too."""
    golden = (ROOT / "tests/golden/cli_options.txt").read_text().splitlines()
    assert options(typer.main.get_command(app)) == golden


def test_every_command_and_option_has_a_help_text() -> None:
    def walk(command: Any) -> None:
        assert command.help, command.name
        for sub in getattr(command, "commands", {}).values():
            walk(sub)
        for parameter in command.params:
            if not isinstance(parameter, click.Argument) and hasattr(parameter, "help"):
                assert parameter.help, f"{command.name} {parameter.name}"

    walk(typer.main.get_command(app))


def test_the_module_is_a_program() -> None:
    """What the other tests call in their own process, as a shell would."""
    assert "Usage" in evenkeel("--help", in_process=False).stdout
    refused = evenkeel("train", in_process=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: give a recipe")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "error: give a recipe"),
        (["train", "nowhere.yaml"], "error: cannot read recipe nowhere.yaml"),
        (["recipe"], "error: give a recipe, or --schema"),
        (["verify", "parity", "--layouts", "XP2"], "error: layout 'XP2': 'XP2' is not one of TPn"),
        (["trajectories", "show", "nowhere", "0"], "error: nowhere"),
    ],
)
def test_one_line_errors(arguments: list[str], message: str) -> None:
    done = evenkeel(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_missing_stack_is_named_in_one_line(tmp_path: Path) -> None:
    """As where only the core is installed, to plan runs and to read them."""
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['evenkeel', 'model', 'new', 'x']\n"
    code += "from launch.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, env=environment
    )
    assert (done.returncode, done.stderr) == (
        1,
        "error: this command needs torch: pip install 'torch>=2.11' (on a CPU: `make install` in the source folder)\n",
    )


def test_the_version_is_that_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert evenkeel("--version").stdout == f"evenkeel {version}\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("evenkeel traj", ["trajectories"]),
        ("evenkeel train scalerl_", ["scalerl_32b"]),
        ("evenkeel sft --war", ["--warmup-steps"]),
    ],
)
def test_shells_complete_words(words: str, completed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_EVENKEEL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert evenkeel().stdout.split() == completed


def test_a_recipe_prints_with_its_defaults() -> None:
    done = evenkeel("recipe", "pipeline/recipes/demo.yaml", "--set", "run.seed=7")
    assert "seed: 7" in done.stdout
    assert "weight_decay: 0.01" in done.stdout
