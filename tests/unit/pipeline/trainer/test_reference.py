"""A run keeps its reference: its digest is recorded at the first start and compared at the next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.data.checksums import read_sealed_json
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RunConflictError
from pipeline.trainer.reference import require_same_reference

RANK_ZERO: Any = SimpleNamespace(is_rank_zero=True, tell=lambda action: action())


def test_other_weights_are_refused_and_the_same_ones_again_are_not(tmp_path: Path) -> None:
    run, model = RunDirectory(tmp_path / "run"), tmp_path / "model"
    run.path.mkdir()
    model.mkdir()
    for name in ("a", "b"):
        (model / f"{name}.safetensors").write_bytes(name.encode())
    require_same_reference(run, RANK_ZERO, model)
    assert set(read_sealed_json(run.reference_file, "")) == {"a.safetensors", "b.safetensors"}
    require_same_reference(run, RANK_ZERO, model)
    (model / "b.safetensors").write_bytes(b"B")
    with pytest.raises(RunConflictError, match=r"holds other weights than the reference.*put them back"):
        require_same_reference(run, RANK_ZERO, model)
