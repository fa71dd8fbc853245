"""Recipes and training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenkeel.runs import Run
from pipeline.child_process import see_own_classes
from pipeline.config import loader
from pipeline.config.recipe import Recipe


def load_recipe(name: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a YAML file, or the one of that name that comes with Even Keel, with `changes` of its keys:
    {"learner.optimizer.lr": 1e-4}. Raises RecipeError.

    Classes that it names, `package.module:Class`, are looked for in the working folder as well.
    """
    see_own_classes()
    return loader.load_recipe(Path(name), [loader.override_of(*change) for change in (changes or {}).items()])


def train(recipe: Recipe) -> Run:
    """Train as `evenkeel train` does: engines, collector and learner are processes of their own on this machine.

    Returns the run once it is finished, or once it was asked to end by Ctrl-C; the same call then goes on. Progress is
    on stderr. Call it in the main thread. Raises EvenKeelError when the run cannot be begun or finished.
    """
    from launch.run.train import train_run

    train_run(recipe)
    return Run(recipe.directory)


def new_model(folder: str | Path, **sizes: Any) -> Path:
    """A random Qwen3 with a character tokenizer, as `evenkeel model new`: layers=2, hidden=128, seed=0 … Needs torch.
    Raises ModelError."""
    from launch.convert.new_model import new_model as make

    make(Path(folder), **sizes)
    return Path(folder)
