"""docs/notebook.ipynb, cell by cell, in a kernel of its own: it trains a model, and reads the run as arrays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
KERNEL = """
import asyncio, json, sys
from IPython.core.interactiveshell import InteractiveShell

async def main():  # as in Jupyter, an event loop runs while a cell does
    shell = InteractiveShell.instance()
    for cell in json.loads(sys.argv[1]):
        shell.run_cell(cell).raise_error()

asyncio.run(main())
"""
AT_ITS_END = """
assert tuned.metrics["loss"].shape == (20,) and tuned.metrics["loss"][-1] < tuned.metrics["loss"][0]
assert run.summary["state"] == "finished", run.summary
assert metrics["step"].tolist() == [0, 1, 2]
assert 0 < metrics["ess"].min() <= metrics["ess"].max() <= 1
assert np.abs(gap).max() < 1e-4
assert set(best["response"]) <= set("0123456789+-*=,;:abcdefghijklmnopqrstuvwxyz <|endoftext|>")
answer = {row["prompt"]: row["answer"] for row in rows}[best["prompt"]]
assert best["reward"] == score(best["response"].removesuffix("<|endoftext|>"), answer)["reward"] > 0
assert [run.path.name for run in evenkeel.list_runs("runs")] == ["notebook", "notebook-sft"]
"""


def cells() -> list[str]:
    """The code of the notebook."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_nothing_was_left_behind_by_running_it() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(cell.get("outputs", []) == [] for cell in notebook["cells"])
    for cell in cells():
        compile(cell, str(NOTEBOOK), "exec")


@pytest.mark.slow
@pytest.mark.loop
def test_the_notebook_runs_from_an_empty_folder(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "launch/library")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONPATH": path}
    command = [sys.executable, "-c", KERNEL, json.dumps([*cells(), AT_ITS_END])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
