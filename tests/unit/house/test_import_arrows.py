"""The import arrows of the house: who may import whom, and what must stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = {"precision", "pipeline", "megatron_bridge", "rollout_sglang", "launch"}
ADAPTERS_MAY_USE = {
    *(
        "pipeline.ports.engines",
        "pipeline.data.records",
        "pipeline.errors",
        "pipeline.config.recipe",
        "pipeline.data.run_directory",
        "pipeline.ports.weight_check",
    ),
}
HEAVY = {"torch", "megatron", "sglang", "transformers"}


def imports_of(source: str) -> set[str]:
    """Dotted names of our own modules that a source imports, wherever in the file it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name for name in names if name.split(".")[0] in ROOMS}


def violations(room: str, source: str) -> list[str]:
    """Imports of `source` that a module of `room` must not have."""
    found = []
    for name in sorted(imports_of(source)):
        target = name.split(".")[0]
        allowed = (
            target == room
            or room == "launch"
            or (target == "precision" and room != "precision")
            or (room in ("megatron_bridge", "rollout_sglang") and name in ADAPTERS_MAY_USE)
        )
        if not allowed:
            found.append(name)
    return found


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_arrows(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    broken = {str(file.relative_to(ROOT)): violations(room, file.read_text()) for file in files}
    assert {name: found for name, found in broken.items() if found} == {}


@pytest.mark.parametrize(
    ("room", "source", "broken"),
    [
        ("precision", "from pipeline.errors import NonFiniteError", ["pipeline.errors"]),
        ("pipeline", "def f():\n    import megatron_bridge.learner", ["megatron_bridge.learner"]),
        ("megatron_bridge", "from rollout_sglang.client import EngineClient", ["rollout_sglang.client"]),
        ("rollout_sglang", "from pipeline.data.store import BatchStore", ["pipeline.data.store"]),
        ("pipeline", "from precision.ess import token_ess", []),
        ("rollout_sglang", "from pipeline.ports.engines import Sampling", []),
        ("launch", "import megatron_bridge.learner", []),
    ],
)
def test_a_broken_arrow_is_seen(room: str, source: str, broken: list[str]) -> None:
    assert violations(room, source) == broken


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import pipeline.config.recipe", "import launch.cli", "import pipeline.analysis.html_report"]
)
def test_light_imports(statement: str) -> None:
    assert modules_after(statement) & HEAVY == set()


def test_weight_of_an_import_would_be_seen() -> None:
    assert "torch" in modules_after("import precision.ratios")
