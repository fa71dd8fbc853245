"""docs/metrics.md explains every name that a line of metrics can hold.

Names are found where they are made: calls whose result is a line, and the literal keys of the files that measure.
tests/integration/test_loop.py compares the lines of a real run as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from launch.run.sft import SFT_METRICS
from pipeline.trainer.loop import MEASURED
from precision.mismatch.alarms import RULES
from precision.mismatch.statistics import Mismatch, StepTokens
from tests.support.glossary import unexplained
from tests.support.pages import ROOT

METHODS = tuple(
    path
    for room in ("precision/objectives", "precision/corrections", "pipeline/advantages/methods")
    for path in sorted((ROOT / room).glob("*.py"))
)


def written_keys(path: Path) -> Iterator[str]:
    """Literal keys of dicts, also those that are set one by one; in an f-string `X` stands for what is filled in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            yield from map(_text, (key for key in node.keys if isinstance(key, ast.Constant | ast.JoinedStr)))
        elif (
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant)
        ):
            yield _text(node.slice)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)


def literal_keys_of(file: str, function: str) -> set[str]:
    """Keyword names and literal keys within one function of a file, or of one of a folder's files."""
    files = (ROOT / file).glob("*.py") if (ROOT / file).is_dir() else [ROOT / file]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    (found,) = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function)
    calls = [node for node in ast.walk(found) if isinstance(node, ast.Call)]
    keys = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
    dicts = [node for node in ast.walk(found) if isinstance(node, ast.Dict)]
    return keys | {_text(key) for one in dicts for key in one.keys if isinstance(key, ast.Constant | ast.JoinedStr)}


def fields_of(file: str, name: str) -> set[str]:
    """Of a dataclass, whose file loads too much to be imported."""
    tree = ast.parse((ROOT / file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_what_methods_measure_is_explained(path: Path) -> None:
    assert unexplained(written_keys(path)) == []


def test_what_is_measured_of_every_token_is_explained() -> None:
    count = 4
    step = StepTokens(
        learner_logprobs=torch.full((count,), -1.0),
        rollout_logprobs=torch.tensor([-1.1, -0.9, -1.0, -1.2]),
        seen=torch.ones(count, dtype=torch.bool),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        entropy=torch.ones(count),
        age=torch.zeros(count),
        offsets=torch.tensor([0, 2, count]),
    )
    mismatch = Mismatch.of_step(step)
    assert len(mismatch.statistics()) > 30
    assert unexplained(mismatch.statistics()) == []
    assert np.isfinite(list(mismatch.statistics().values())).all()


def test_what_the_learner_and_the_loop_add_is_explained() -> None:
    added = literal_keys_of("megatron_bridge/learner.py", "_metrics") | {"grad_norm", "lr", "padding_share"}
    added |= literal_keys_of("pipeline/trainer", "describe")
    added |= literal_keys_of("pipeline/trainer/loop.py", "_record") - {"save"}  # a phase in `seconds`
    added |= literal_keys_of("pipeline/control/loop.py", "after")
    added |= {"num_updated_tokens", "num_model_tokens"}
    added |= fields_of("megatron_bridge/step/expert_replay.py", "Replayed") | set(SFT_METRICS)
    added |= {f"{measure}_{which}_replay" for measure in MEASURED for which in ("with", "without")}
    assert unexplained(added) == []


def test_what_an_alarm_watches_is_explained() -> None:
    assert unexplained(rule.path[0] for rule in RULES) == []
