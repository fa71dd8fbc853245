"""`evenkeel launch`: files with which a scheduler runs a recipe."""

from __future__ import annotations

import typer

from launch.schedulers.kubernetes.command import kubernetes
from launch.schedulers.slurm.command import slurm

launch_app = typer.Typer(help="Render what a cluster's scheduler needs to run a recipe.", no_args_is_help=True)
launch_app.command("slurm")(slurm)
launch_app.command("kubernetes")(kubernetes)
