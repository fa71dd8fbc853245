"""`evenkeel plugins`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from launch.terminal import AsJson, emit


def plugins(
    modules: Annotated[
        list[str] | None, typer.Argument(help="Modules of your own, such as mypackage.rewards.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what a recipe can name: objectives, corrections, advantages, tasks, rewards, filters of rows and of groups.

    Without a module: what comes with Even Keel, and what one of your own would have to be. With modules: what they
    define, as a recipe names it, and what a class still lacks. A module is imported, from the working folder too.

    For example:  evenkeel plugins my_rewards
    """
    from launch.plugins.listing import ASKED, key_of, of_modules, shipped

    found = of_modules(modules) if modules else shipped()
    if as_json:
        emit(dict(plugins=[asdict(plugin) for plugin in found], own=ASKED))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("recipe key", "value", "what it is"):
        table.add_column(heading, overflow="fold")
    for plugin in found:
        table.add_row(plugin.key, Text(plugin.value), Text(f"NOT YET: {plugin.lacks}" if plugin.lacks else plugin.says))
    if not modules:
        table.add_section()
        for kind, asked in ASKED.items():
            table.add_row(key_of(kind), "package.module:Name", Text(f"yours: {asked}"))
    Console().print(table)
