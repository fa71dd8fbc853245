"""docs/notebook.ipynb, cell by cell, in a program of its own: it trains a model, and reads the run as arrays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
AT_ITS_END = """
assert run.summary["state"] == "finished", run.summary
assert metrics["step"].tolist() == [0, 1, 2]
assert 0 < metrics["ess"].min() <= metrics["ess"].max() <= 1
assert np.abs(gap).max() < 1e-4
assert set(best["response"]) <= set("0123456789+-*=,;:abcdefghijklmnopqrstuvwxyz <|endoftext|>")
"""


def cells() -> list[str]:
    """The code of the notebook."""
    return [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]


def test_nothing_was_left_behind_by_running_it() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert all(cell.get("outputs", []) == [] for cell in notebook["cells"])
    for cell in cells():
        compile(cell, str(NOTEBOOK), "exec")


@pytest.mark.slow
@pytest.mark.loop
def test_the_notebook_runs_from_an_empty_folder(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "launch/library")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONPATH": path}
    code = "\n".join([*cells(), AT_ITS_END])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
