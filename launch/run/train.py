"""Run `evenkeel train`: check the recipe and this machine, then supervise the run's roles here to its end."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from launch.build.api_key import read_api_key
from launch.build.components import TaskPrompts
from launch.build.engines import check_engines
from launch.build.rewards import check_reward
from launch.run.claim import claimed
from launch.run.live_view import LiveView
from launch.run.metrics import observers_of, shown_metrics
from launch.run.preflight import (
    check_learner_here,
    check_model_here,
    check_ports,
    check_room,
    preflight,
    seed_policy,
    start_warnings,
)
from launch.run.processes import saying_what_is_saved, what_is_saved
from launch.run.starter import LocalStarter, gpu_places, units_of, visible_gpus
from launch.run.supervisor import Outcome, Supervisor
from launch.run.waiting import grace_s
from launch.terminal import going_on
from pipeline.analysis.report import write_last_report
from pipeline.analysis.summary import summary
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import Epoch
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.resume import changes_in_words, changes_to, go_on_with, note_changes, note_outside, nothing_left
from pipeline.tasks.data import with_digest


def train_run(recipe: Recipe, metrics_port: int | None = None, *, source: str = "") -> dict[str, Any]:
    """Start or resume a run, and return its summary, or `stopped` if it was asked to end early. The supervisor shows
    its metrics at `metrics_port`, the roles at the ports after it. `source` says where the recipe is from. Raises
    FatalError."""
    grace_s()  # raises for a bad EVENKEEL_GRACE_S, which at the end would be too late
    run = RunDirectory(recipe.directory)
    with going_on("checking recipe, machine, model, data and reward"):
        recipe, prompts = _checked(run, recipe, metrics_port)
    with claimed(run) as epoch:
        if changes := go_on_with(run.under(epoch), recipe):
            print(changes_in_words(run, changes), file=sys.stderr)
        event_log = EventLog(run.path, epoch.name)
        note_changes(run, event_log)
        for sentence in note_outside(run.under(epoch), recipe, event_log):
            print(f"warning: {sentence}", file=sys.stderr)
        if source:
            print(f"recipe: {source}", file=sys.stderr)
        for sentence in start_warnings(recipe, prompts):
            print(f"warning: {sentence}", file=sys.stderr)
        if not run.is_finished():
            with going_on("writing the model as version 0"):
                seed_policy(run.under(epoch), recipe)  # before the learner's agent, so that engines start beside it
            with saying_what_is_saved(run, recipe.run.steps):
                outcome = _supervise(run, recipe, epoch, metrics_port)
            if outcome == "stopped":
                print(f"stopped; {what_is_saved(run, recipe.run.steps)}", file=sys.stderr)
                return dict(run=str(run.path), stopped=True)
    with going_on("writing the report"):
        report = write_last_report(run.path)
        return {**summary(run.path), **({} if report is None else {"report": str(report)})}


def _checked(run: RunDirectory, recipe: Recipe, metrics_port: int | None) -> tuple[Recipe, TaskPrompts]:
    """Check recipe, machine, model, data and reward. Returns the recipe with its data's digest, and the prompts."""
    check_model_here(recipe)
    recipe = with_digest(recipe, run)
    changes_to(run, recipe)  # raises for changes that a resumed run refuses
    if not nothing_left(run, recipe):
        check_learner_here(recipe)
        if recipe.rollout.started_engines:
            check_engines(recipe)
        gpu_places(recipe, visible_gpus())  # raises if there are too few
        check_ports(recipe, metrics_port)
        check_room(recipe)
    prompts = preflight(recipe)
    if not nothing_left(run, recipe):
        check_reward(run, recipe, prompts.task)
    return recipe, prompts


def _supervise(run: RunDirectory, recipe: Recipe, epoch: Epoch, metrics_port: int | None) -> Outcome:
    metrics = None if metrics_port is None else shown_metrics("supervisor", run.path, metrics_port)
    event_log = EventLog(run.path, epoch.name, observers_of(metrics))
    starter = LocalStarter(run, recipe, read_api_key() or secrets.token_hex(24), metrics_port, visible_gpus())
    with stop_requested() as stop, LiveView.of_run(run.path, recipe) as view:
        with Supervisor(run, recipe, view, event_log, starter.start, units_of(recipe), epoch, stop) as supervisor:
            outcome = supervisor.supervise()
        if outcome == "finished":
            event_log.event("finished", steps=recipe.run.steps)
    return outcome


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether SIGTERM or Ctrl-C arrived. A second Ctrl-C raises KeyboardInterrupt."""
    asked = False

    def ask(number: int, _: object) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        print("\nasked to end: the learner saves at its next step; Ctrl-C again ends it at once", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
