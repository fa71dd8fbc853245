"""Everything below tests/cluster is marked `cluster`: `make test-cluster` runs it, `make test` does not.

A machine that cannot make namespaces fails these tests, with what it lacks; it does not skip them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.rig import Hosts, missing_for
from tests.support.runs import evenkeel, evenkeel_json

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` is looked at."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def able() -> None:
    """Fails where hosts cannot be made."""
    if reason := missing_for():
        pytest.fail(reason, pytrace=False)


@pytest.fixture(scope="module")
def hosts(able: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Four hosts for the tests of a file, with a shared directory `hosts.shared`."""
    shared = tmp_path_factory.mktemp("shared")
    with Hosts(shared, keep=[ROOT]).up(4) as four:
        yield four


TABLE = pytest.StashKey[list[tuple[str, ...]]]()


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> list[tuple[str, ...]]:
    """Rows for the table at the end: fault, time to recover, lost, duplicated, replay."""
    return request.config.stash.setdefault(TABLE, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    rows = config.stash.get(TABLE, [])
    if rows:
        terminalreporter.section("runs over several hosts")
        for row in [("fault", "recovered after", "lost", "duplicated", "replay"), *rows]:
            terminalreporter.write_line(f"{row[0]:<64} {row[1]:<40} {row[2]:<5} {row[3]:<11} {row[4]}")


@pytest.fixture(scope="session")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that half knows how to sort digits, so that its rewards differ."""
    return trained_model(tmp_path_factory.mktemp("sorter"))


def trained_model(folder: Path, *new_options: str, steps: int = 150) -> Path:
    """A small model after some supervised steps of the demo's task."""
    recipe = folder / "sft.yaml"
    recipe.write_text(
        yaml.safe_dump(
            dict(
                run=dict(name="sft", root=str(folder), steps=1),
                model=dict(path=str(folder / "base")),
                task=dict(name="sort_digits", min_digits=2, max_digits=4),
                rollout=dict(precision="fp32", max_new_tokens=8, context_tokens=64),
                learner=dict(precision="fp32", micro_batch_tokens=512, optimizer=dict(lr=4e-4, warmup_steps=5)),
            )
        )
    )
    made = evenkeel("model", "new", folder / "base", *new_options, in_process=False)
    assert made.returncode == 0, made.stderr
    words = ["--out", folder / "model", "--steps", str(steps), "--batch-size", "32"]
    evenkeel_json("sft", recipe, *words, in_process=False)
    return folder / "model"
