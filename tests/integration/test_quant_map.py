"""Real SGLang servers with mixed maps serve the map that they are given, and the audit finds one that does not."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.attribution.engine import audit_engine
from megatron_bridge.hf.folders import write_policy
from megatron_bridge.hf.tensor_files import TensorFolder
from pipeline.errors import EngineUnavailableError
from pipeline.ports.weights import WeightCheck
from precision.formats.audit import Misheld, formats_of
from precision.formats.quant_map import QuantMap
from precision.formats.weight_statistics import emulated_modules
from rollout_sglang.client import EngineClient
from rollout_sglang.server.start import EngineSpec, free_port
from rollout_sglang.weights.expected_checksums import ExpectedChecksums
from tests.doubles.tiny_model import reference_logprobs, reference_model, write_checkpoint
from tests.support.engine_forks import start_engine
from tests.support.engines import KEY, ROWS, TinyEngine
from tests.support.fleets import fleet_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

DOWN = "model.layers.1.mlp.down_proj"
FULL = ("model.layers.0.self_attn.qkv_proj", DOWN)
MAPS = {name: QuantMap.for_decoder(2, name).promoted(FULL) for name in ("fp8_block", "fp8_tensor")}


class Served:
    """A running server of one map, and its policies 0 and 1."""

    def __init__(self, root: Path, name: str, quant_map: QuantMap, checkpoints: tuple[Path, Path]) -> None:
        self.quant_map, self.checkpoints, self.root = quant_map, checkpoints, root / name
        folders = tuple(self.publish(version, self.root / str(version)) for version in (0, 1))
        spec = EngineSpec(
            model=folders[0],
            port=free_port(),
            precision=str(quant_map.rollout_format),  # type: ignore[arg-type]
            dtype="float32",
            log=self.root / "engine.log",
            version=0,
            api_key=KEY,
            full_precision=quant_map.ignored_layers(),
        )
        self.engine = TinyEngine(start_engine(spec), spec, (folders[0], folders[1]), checkpoints, None)

    def publish(self, version: int, folder: Path, quant_map: QuantMap | None = None) -> Path:
        """As a learner publishes a policy: the folder, what its checksums and its formats should be."""
        quant_map = quant_map or self.quant_map
        source, digests = self.checkpoints[version], ExpectedChecksums(dtype=torch.float32, num_kv_heads=2)
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_policy(TensorFolder(source).tensors(), source, folder, quant_map, digests=digests)
        formats = formats_of(quant_map, "float32")
        WeightCheck(version=version, digests=digests.digests(), formats=formats).save(folder)
        return folder

    def load(self, version: int, folder: Path, check: WeightCheck | None = None) -> None:
        """As a publish over the disk, with all that is verified."""
        asyncio.run(fleet_of(self.root, [self.engine.spec.url], key=KEY).load(version, folder, check))

    def put(self, version: int, folder: Path) -> None:
        """Without any verification."""

        async def put(client: EngineClient) -> None:
            await client.pause()
            await client.update_from_disk(version, folder, deadline_s=60)
            await client.name(version)
            await client.resume()

        self.engine.ask(put)

    def audit(self, quant_map: QuantMap | None = None, version: int = 0) -> list[Misheld]:
        """With the policy folder and with what the learner would emulate."""
        quant_map = quant_map or self.quant_map
        emulated = emulated_modules(TensorFolder(self.checkpoints[version]).tensors(), quant_map)
        published = self.root / str(version)
        return self.engine.ask(
            lambda client: audit_engine(client, quant_map, "float32", published=published, emulated=emulated)
        )

    def scores(self, version: int) -> float:
        """Largest difference from transformers with the map emulated, in nats."""
        model = reference_model(self.checkpoints[version], self.quant_map)
        expected = [reference_logprobs(model, row) for row in ROWS]
        return max(float(np.abs(a - b).max()) for a, b in zip(self.engine.scores(), expected, strict=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    root = tmp_path_factory.mktemp("maps")
    checkpoints = (write_checkpoint(root / "a", 0), write_checkpoint(root / "b", 1))
    with ExitStack() as stack:
        found = {name: Served(root, name, each, checkpoints) for name, each in MAPS.items()}
        for one in found.values():
            stack.callback(one.engine.process.kill)
        for one in found.values():
            one.engine.process.wait_ready(300)
        yield found


@pytest.mark.parametrize("name", list(MAPS))
def test_an_engine_serves_its_map_before_and_after_an_update(served: dict[str, Served], name: str) -> None:
    one = served[name]
    for version in (0, 1, 0):
        one.load(version, one.root / str(version))
        assert one.scores(version) < 1e-4
        assert one.audit(version=version) == []
    uniform = reference_model(one.checkpoints[0], QuantMap.for_decoder(2, "fp8_block"))
    gaps = [
        np.abs(a - reference_logprobs(uniform, row)).max() for a, row in zip(one.engine.scores(), ROWS, strict=True)
    ]
    assert max(gaps) > 1e-3  # the exceptions are exceptions


def test_a_layer_in_another_format_than_the_map_is_named(served: dict[str, Served]) -> None:
    one = served["fp8_block"]
    demoted = one.quant_map.promoted([DOWN], to="fp8_block")
    kinds = {(finding.module, finding.kind) for finding in one.audit(demoted)}
    assert (DOWN, "format") in kinds
    assert {module for module, _ in kinds} == {DOWN}
    check = WeightCheck(version=0, formats=formats_of(demoted, "float32"))
    with pytest.raises(
        EngineUnavailableError, match=rf"1 modules .*{DOWN}: it is fp8_block in the quant map, but the en"
    ):
        one.load(0, one.root / "0", check)
    one.load(0, one.root / "0")


@pytest.mark.parametrize("name", list(MAPS))
def test_a_wrong_scale_names_its_module(served: dict[str, Served], tmp_path: Path, name: str) -> None:
    """×1.25 in one module, in what the engine loads: its checksum is not asked here."""
    one, module = served[name], "model.layers.0.mlp.down_proj"
    wrong = tmp_path / "wrong"
    shutil.copytree(one.root / "0", wrong)
    (shard,) = wrong.glob("*.safetensors")
    tensors = load_file(shard)
    tensors[f"{module}.weight_scale_inv" if name == "fp8_block" else f"{module}.weight"] *= 1.25
    save_file(tensors, shard, metadata={"format": "pt"})
    one.put(0, wrong)
    try:
        assert {finding.module for finding in one.audit()} == {module}
        assert ", expected " in str(one.audit()[0])
        with pytest.raises(EngineUnavailableError, match=rf"first {module}"):
            one.load(0, wrong, WeightCheck.load(one.root / "0", 0))
    finally:
        one.load(0, one.root / "0")


def test_a_policy_in_another_map_is_not_served(served: dict[str, Served], tmp_path: Path) -> None:
    """An engine keeps the formats that it was started with: full-precision weights do not fit its e4m3 parameters."""
    one = served["fp8_block"]
    folder = one.publish(0, tmp_path / "other", one.quant_map.promoted(["model.layers.0.mlp.down_proj"]))
    with pytest.raises(EngineUnavailableError, match=r"model\.layers\.0\.mlp\.down_proj"):
        one.load(0, folder)
    one.load(0, one.root / "0")
    assert one.audit() == []


ASK_SGLANG = """
import json, sys
from rollout_sglang.cpu.cpu_server import prepare
prepare()
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped
config, prefixes = json.load(sys.stdin)
ignored = Fp8Config.from_config(config).ignored_layers
print(json.dumps([prefix for prefix in prefixes if is_layer_skipped(prefix, ignored, {})]))
"""


@pytest.mark.parametrize(
    ("experts", "full"),
    [
        (None, ("model.layers.1.self_attn.o_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.11.mlp.down_proj")),
        (12, ("model.layers.1.mlp.experts", "model.layers.10.self_attn.qkv_proj")),
    ],
)
def test_sglang_leaves_exactly_the_exceptions_as_they_are(experts: int | None, full: tuple[str, ...]) -> None:
    """Its own comparison of names, over twelve layers: 1 is not taken for 10 or 11, and no router for an exception."""
    quant_map = QuantMap.for_decoder(12, "fp8_block", experts).promoted(full)
    prefixes = [*quant_map.groups, *(f"model.layers.{layer}.mlp.gate" for layer in range(12))]
    asked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK_SGLANG],
        input=json.dumps([quant_map.to_hf_quantization_config(), prefixes]),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert asked.returncode == 0, asked.stderr
    assert set(json.loads(asked.stdout.splitlines()[-1])) == set(full)
