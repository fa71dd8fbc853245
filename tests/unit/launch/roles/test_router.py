"""What the router of a run is started with; no router is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest
from sglang_router.router_args import RouterArgs

from launch.roles.engine import run_router
from launch.run.waiting import Stop
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineStartError
from pipeline.resume import go_on_with
from rollout_sglang.server import start
from rollout_sglang.server.start import free_port
from tests.support.whole_runs import whole_run


def with_deadline(recipe: Recipe, seconds: float) -> Recipe:
    return recipe.model_copy(update=dict(rollout=recipe.rollout.model_copy(update=dict(request_deadline_s=seconds))))


def patience_s(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> int:
    """For how long the router of the run's newest recipe waits for an answer, as SGLang reads its arguments."""
    commands = list[Sequence[str]]()

    def note(command: Sequence[str], **_: object) -> None:
        commands.append(command)
        raise EngineStartError("noted")

    monkeypatch.setattr(start, "ServerProcess", note)
    with pytest.raises(EngineStartError, match="noted"):
        run_router(run, Stop(), port=free_port())
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    own = commands[0][commands[0].index("--host") :]
    return RouterArgs.from_cli_args(parser.parse_args(own)).request_timeout_secs


@pytest.mark.parametrize("deadline_s", [0.5, 1800.0, 7200.5])
def test_the_router_waits_for_longer_than_the_recipe_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_s: float
) -> None:
    """The key may change between two starts of a run."""
    run = whole_run(tmp_path, committed=1, published=1, saved=(1,), policies=(1,))
    go_on_with(run, with_deadline(run.recipe(), deadline_s))
    assert patience_s(run, monkeypatch) >= deadline_s + 30
