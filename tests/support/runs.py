"""Recipes for tests, and small real runs: a random model, a JSONL task with a dense reward, the real command line."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe

ROOT = Path(__file__).parents[2]
RUN_DEADLINE_S = 280


def make_model(folder: Path, layers: int = 2) -> Path:
    """A random Qwen3 of half a million parameters."""
    from launch.convert.new_model import new_model

    new_model(folder, layers=layers)
    return folder


def make_prompts(path: Path, count: int = 200) -> Path:
    """Prompts of 3 to 9 digits."""
    rng = random.Random(0)
    lines = [
        json.dumps(dict(prompt="".join(rng.choice("0123456789") for _ in range(rng.randint(3, 9))) + "=", answer="1"))
        for _ in range(count)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def a_recipe(folder: Path | str = "runs", **sections: Any) -> Recipe:
    """A recipe of run `r` below `folder` that nobody trains, its model `m`; each section is added to the least one."""
    least: dict[str, Any] = dict(
        run=dict(name="r", root=str(folder), steps=8), model=dict(path="m"), task=dict(name="sort_digits")
    )
    return recipe_from({**least, **_added(least, sections)}, source="test")


def _added(base: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """Sections whose keys join those of `base`; one that chooses by name replaces what is there."""
    joined = {}
    for name, keys in sections.items():
        joins = isinstance(keys, dict) and ("name" not in keys or name == "run")
        joined[name] = {**base.get(name, {}), **keys} if joins else keys
    return joined


def make_recipe(folder: Path, model: Path, name: str, **sections: dict[str, Any]) -> Path:
    """A recipe file in `folder`; each section updates the defaults below."""
    data: dict[str, dict[str, Any]] = dict(
        run=dict(name=name, root=str(folder / "runs"), steps=4),
        model=dict(path=str(model)),
        task=dict(
            name="data",
            path=str(make_prompts(folder / "prompts.jsonl")),
            reward="tests.support.rewards:digit_share",
        ),
        rollout=dict(
            precision="fp32",
            prompts_per_batch=4,
            group_size=4,
            max_new_tokens=12,
            context_tokens=64,
            request_deadline_s=300,
        ),
        learner=dict(precision="fp32", micro_batch_tokens=256, optimizer=dict(lr=1e-3, warmup_steps=0)),
        checkpoint=dict(every=2),
        evaluation=dict(every=100, prompts=4, samples=2),
    )
    data |= _added(data, sections)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def trained(folder: Path, model: Path, name: str, **sections: dict[str, Any]) -> Path:
    """The directory of a run that `evenkeel train` has finished, with engines and ranks that are forked."""
    from tests.support.engine_forks import forked_engines
    from tests.support.rank_programs import forked_programs

    recipe = make_recipe(folder, model, name, **sections)
    with forked_engines(), forked_programs():
        assert evenkeel_json("train", recipe)["state"] == "finished"
    run = folder / "runs" / name
    assert evenkeel_json("verify", "history", run)["ok"]
    return run


def environment() -> dict[str, str]:
    """One thread a process, and the repository on the path so that recipes can name the tests' rewards."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    returncode: int
    stdout: str
    stderr: str


def evenkeel(*arguments: str | Path, in_process: bool = True, timeout: float = RUN_DEADLINE_S) -> Done:
    """Run the command line to its end: `launch.cli.main` in this process, or in one of its own.

    An interpreter takes seconds to import what a command needs, so most tests call main here. What it starts (engines,
    ranks, a collector) are processes all the same. `timeout` holds for a process; here, pytest's own ends a test.
    """
    return _call_main(*arguments) if in_process else _start_main(*arguments, timeout=timeout)


def evenkeel_json(*arguments: str | Path, in_process: bool = True, timeout: float = RUN_DEADLINE_S) -> dict[str, Any]:
    """Run with --json; the last line of stdout as an object. Fails with both streams when the command does."""
    done = evenkeel(*arguments, "--json", in_process=in_process, timeout=timeout)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _call_main(*arguments: str | Path) -> Done:
    from launch.cli import main

    stdout, stderr = io.StringIO(), io.StringIO()
    status: object = None
    with (
        patch.dict(os.environ, environment()),
        patch.object(sys, "argv", ["evenkeel", *map(str, arguments)]),
        chdir(ROOT),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code
    return Done(status if isinstance(status, int) else int(status is not None), stdout.getvalue(), stderr.getvalue())


def _start_main(*arguments: str | Path, timeout: float) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    return Done(done.returncode, done.stdout, done.stderr)
