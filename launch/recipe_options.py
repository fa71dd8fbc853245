"""Arguments and options of every command that takes a recipe."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Annotated

import typer

RECIPE_HELP = "YAML file, or the name of a recipe that comes with Even Keel, such as demo."


def shipped_names(incomplete: str) -> list[str]:
    """For shells that complete a word: the recipes that come with Even Keel. Where none fits, they take files."""
    from pipeline.config.loader import SHIPPED

    return sorted(path.stem for path in SHIPPED.glob(f"{glob.escape(incomplete)}*.yaml"))


RecipeArgument = typer.Argument(help=RECIPE_HELP, show_default=False, autocompletion=shipped_names)
RecipePath = Annotated[Path, RecipeArgument]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key; repeat at will.")
]
SizesFolder = Annotated[
    Path | None, typer.Option(help="Folder with the model's config.json, where model.path is not on this machine.")
]


def check_recipe_or_run(source: Path) -> None:
    """For commands that take either. Raises RecipeError for what is neither: the loader would say it of a recipe."""
    from pipeline.config.loader import SHIPPED, find_recipe
    from pipeline.errors import RecipeError
    from precision.text import did_you_mean, one_line

    if not (source / "recipe.yaml").is_file() and not find_recipe(source).is_file():
        shipped = did_you_mean(source.name, (path.stem for path in SHIPPED.glob("*.yaml")))
        raise RecipeError(
            f"{one_line(source, 200)}: no recipe and no run directory of that name; `evenkeel runs list` shows runs"
            f"{shipped}"
        )
