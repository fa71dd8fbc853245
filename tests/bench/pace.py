"""What an asynchronous run (lag 1) loses by waiting: its wall over its longer half, and over what the planner foretold.

The learner has a core of its own; engine and collector share another one. Model, prompts and answers are those of a row
of tests.bench.loop. The engine gets as many prompts at once as a batch has, so that it works on the older batch first:
with more, both batches under way take less of its time together, but the older one is late, and the wall is the same.

Everything is read from the run's own spans (`evenkeel trace`), in the mean of a step, without the first and last steps:

    wall         from the end of a step to that of the next
    generating   some request was with the engine, and it was not paused for a publish
    training     the learner scored or updated
    wall_over_longer     wall ÷ the larger of the two: 1 would mean that the slower side never waits
    wall_over_foretold   wall ÷ what launch.plan.costs makes of generating, training and publishing

Each repetition is a run of its own. Printed are medians, the smallest and the largest value.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from launch.build.api_key import API_KEY_VARIABLE
from launch.plan.costs import Durations, steady_seconds_per_step
from launch.run.processes import child_environment
from pipeline.analysis.run_log import RunLog
from pipeline.analysis.trace import RANK_ZERO, STEP, timeline
from pipeline.child_process import ChildProcess, log_tail
from pipeline.schedule import Schedule
from rollout_sglang.server.start import free_port
from tests.bench.figures import spreads, tell
from tests.bench.loop import ROWS, WARM_STEPS, Row, make_model, recipe_of, write_prompts

LAG_1 = Schedule(kind="async", lag=1, steps=1)
DEADLINE_S = 400.0
_POLL_S = 0.25


def measure(folder: Path, row: Row, steps: int) -> dict[str, float]:
    """One run."""
    make_model(folder / "model", row.end_chance)
    recipe = recipe_of(folder, folder / "model", row, "async", steps)
    recipe["learner"]["data_parallel"] = 1
    recipe["rollout"]["concurrent_prompts"] = row.prompts
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run = Path(recipe["run"]["root"]) / recipe["run"]["name"]
    train(run, path, folder / "logs")
    return figures(run)


def train(run: Path, recipe: Path, logs: Path) -> None:
    """Engine and collector on the first core that this process may use, the learner on the second."""
    shared, own = sorted(os.sched_getaffinity(0))[:2]
    environment = child_environment() | {API_KEY_VARIABLE: secrets.token_hex(16)}
    roles = {
        "learner": (own, [str(run), "--recipe", str(recipe), "--port", str(free_port())]),
        "engine": (shared, [str(run), "0", "--port", str(free_port())]),
        "collector": (shared, [str(run)]),
    }
    with ExitStack() as stack:
        started = {}
        for role, (core, arguments) in roles.items():
            with on_core(core):
                command = [sys.executable, "-P", "-m", "launch.cli", "role", role, *arguments]
                started[role] = ChildProcess(command, logs / f"{role}.log", environment)
            stack.callback(started[role].stop)
        wait(started)


def wait(started: dict[str, ChildProcess]) -> None:
    """Until learner and collector have ended well."""
    deadline = time.monotonic() + DEADLINE_S
    waiting = {"learner", "collector"}
    while waiting:
        for role, process in started.items():
            status = process.poll()
            if status or (status is not None and role not in waiting | {"learner", "collector"}):
                assert process.log is not None
                raise SystemExit(f"error: the {role} ended with {status}: {log_tail(process.log)}")
            waiting -= {role} if status == 0 else set()
        if time.monotonic() > deadline:
            raise SystemExit(f"error: {', '.join(waiting)} did not end within {DEADLINE_S:g} s")
        time.sleep(_POLL_S)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started meanwhile stays on that core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def figures(run: Path) -> dict[str, float]:
    """Of a run that has ended; see the module's head."""
    run_log = RunLog.read(run)
    spans = timeline(run_log, [])
    steps = sorted((s for s in spans if s.part == RANK_ZERO and s.name == STEP), key=lambda span: span.number)
    begin, end, count = steps[WARM_STEPS - 1].end, steps[-2].end, len(steps) - 1 - WARM_STEPS

    def seconds(part: str, lane: str, *names: str) -> float:
        """Of a step, in which at least one such span was under way."""
        chosen = [(s.start, s.end) for s in spans if s.part == part and s.lane == lane and s.name in names]
        return covered(chosen, begin, end) / count

    scoring, updating = seconds(RANK_ZERO, STEP, "logprobs"), seconds(RANK_ZERO, STEP, "update")
    paused = seconds("engine 0", "weights", "pause", "load", "checksum")
    generating = seconds("engine 0", "requests", "request") - paused
    published = [event for event in run_log.of_kind("published") if begin < event["time"] <= end]
    publishing = statistics.mean(event["seconds"] for event in published)
    taking = seconds(RANK_ZERO, "publish", "score", "export", "take")  # until the learner may change its weights
    training, wall = scoring + updating, (end - begin) / count
    trained = dict(score_s=scoring, update_s=updating)
    durations = Durations(rollout_s=generating, **trained, publish_s=publishing, take_s=min(taking, publishing))
    foretold = steady_seconds_per_step(LAG_1, durations)
    return dict(
        wall_s=wall,
        generating_s=generating,
        training_s=training,
        publishing_s=publishing,
        taking_s=taking,
        paused_s=paused,
        waiting_s=seconds(RANK_ZERO, STEP, "wait"),
        learner_publishing_s=seconds(RANK_ZERO, STEP, "publish"),
        recording_s=seconds(RANK_ZERO, STEP, "record"),
        foretold_s=foretold,
        wall_over_longer=wall / max(generating, training),
        wall_over_foretold=wall / foretold,
    )


def covered(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """How much of the time from `begin` to `end` the spans cover together."""
    total, until = 0.0, begin
    for start, stop in sorted(spans):
        start, stop = max(start, until), min(stop, end)
        if stop > start:
            total, until = total + stop - start, stop
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--row", choices=ROWS, default="varying")
    given = parser.parse_args(arguments)
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("error: this process may use one core, and two are needed")
    found = []
    for _ in range(given.repetitions):
        with tempfile.TemporaryDirectory(prefix="evenkeel-pace-") as scratch:
            write_prompts(Path(scratch))
            folder = Path(scratch) / "pace"
            folder.mkdir()
            found.append(measure(folder, ROWS[given.row], given.steps))
        print({name: round(value, 3) for name, value in found[-1].items()}, file=sys.stderr, flush=True)
    tell(spreads(found))


if __name__ == "__main__":
    main()
