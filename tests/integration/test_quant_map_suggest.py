"""`quant-map suggest` on a real learner finds the layer that was planted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.convert.new_model import new_model
from precision.formats.quant_map import QuantMapFile
from tests.support.outliers import plant_outlier_channels
from tests.support.runs import evenkeel

BAD = {"model.layers.2.mlp.gate_up_proj", "model.layers.2.mlp.down_proj"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_emulation_ranks_the_planted_layer_first(tmp_path: Path) -> None:
    new_model(tmp_path / "model", layers=4)
    plant_outlier_channels(tmp_path / "model", layer=2)
    arguments = ["--rows", "16", "--row-tokens", "48", "--ess-floor", "0.9995", "--json"]
    done = evenkeel("quant-map", "suggest", str(tmp_path / "model"), "--out", str(tmp_path / "map.yaml"), *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {one["group"] for one in result["ranking"][:2]} == BAD
    assert result["path"]
    assert {step["group"] for step in result["path"]} <= BAD
    assert result["start"]["ess"] < 0.9995 <= result["gap"]["ess"]
    written = QuantMapFile.read(tmp_path / "map.yaml")
    assert written.base == "fp8_block"
    assert set(written.exceptions.values()) == {"full"}
