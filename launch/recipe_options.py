"""Arguments and options of every command that takes a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RECIPE_HELP = "YAML file, or the name of a recipe that comes with Even Keel, such as demo."
RecipePath = Annotated[Path, typer.Argument(help=RECIPE_HELP, show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key; repeat at will.")
]
SizesFolder = Annotated[
    Path | None, typer.Option(help="Folder with the model's config.json, where model.path is not on this machine.")
]
