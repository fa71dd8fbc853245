"""The map's file: what it may say, exact names, and that a map comes back from its own file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precision.formats.quant_map import QuantMap
from precision.formats.quant_map_file import QuantMapFile
from precision.formats.rollout_format import RolloutFormat
from tests.support.examples import examples

DOWN = "model.layers.1.mlp.down_proj"


def test_a_base_and_named_exceptions(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(f"base: fp8_block\nexceptions:\n  {DOWN}: full\n")
    quant_map = QuantMap.from_file(QuantMapFile.read(path), num_layers=12)
    assert quant_map.ignored_layers() == (DOWN,)
    assert len(quant_map.formats) == 12 * 7 - 1
    assert quant_map.formats["model.layers.11.mlp.down_proj"] is RolloutFormat.FP8_BLOCK


def test_quantized_exceptions_of_an_unquantized_base() -> None:
    quant_map = QuantMap.from_file(QuantMapFile(base="full", exceptions={DOWN: "fp8_block"}), 2)
    assert set(quant_map.formats) == {DOWN}
    assert quant_map.to_file() == QuantMapFile(
        base="fp8_block", exceptions=dict.fromkeys(quant_map.ignored_layers(), "full")
    )


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("model.layers.1.mlp.down_prj", DOWN),
        ("layers.1.mlp.down_proj", DOWN),
        ("model.layers.1.mlp.down_proj.weight", DOWN),
        ("model.layers.2.mlp.down_proj", DOWN),
        ("model.layers.1.mlp", "model.layers.1.mlp"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"no linear layer {name!r}, the nearest name is {nearest}"):
        QuantMap.from_file(QuantMapFile(base="fp8_block", exceptions={name: "full"}), 2)


def test_a_part_of_a_stack_is_refused() -> None:
    file = QuantMapFile(base="fp8_block", exceptions={"model.layers.0.self_attn.k_proj": "full"})
    with pytest.raises(
        ValueError, match=r"k_proj \(full\), .*v_proj \(fp8_block\) are stacked by the engine but differ"
    ):
        QuantMap.from_file(file, 1)


def test_experts_are_named_together_and_not_apart() -> None:
    file = QuantMapFile(base="fp8_block", exceptions={"model.layers.1.mlp.experts": "full"})
    quant_map = QuantMap.from_file(file, 2, num_experts=3)
    assert quant_map.to_file() == file
    assert quant_map.ignored_layers() == ("model.layers.1.mlp.experts",)
    one = QuantMapFile(base="fp8_block", exceptions={"model.layers.1.mlp.experts.0.down_proj": "full"})
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj \(full\).* are one module of the engine"):
        QuantMap.from_file(one, 2, num_experts=3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("base: fp4", "base: Input should be 'full'"),
        ("base: fp8_block\nexceptions: {a: int8}", "exceptions.a: Input should be"),
        ("base: fp8_block\nignore: [a]", "ignore: Extra inputs are not permitted"),
        ("exceptions: {}", "base: Field required"),
        ("- a", "Input should be a valid dictionary"),
        ("a: [", "line 1, column 5: not YAML"),
    ],
)
def test_files_that_say_something_else(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem) as raised:
        QuantMapFile.read(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read quant map .*none\.yaml: No such file"):
        QuantMapFile.read(tmp_path / "none.yaml")


def test_dtypes_must_be_the_engines() -> None:
    file = QuantMapFile(base="fp8_block", exceptions={DOWN: "bf16"})
    file.check_dtype("bfloat16")
    QuantMapFile(base="fp8_block", exceptions={DOWN: "full"}).check_dtype("float32")
    with pytest.raises(ValueError, match=f"{DOWN} is bf16, but the engines of this run compute in float32"):
        file.check_dtype("float32")


GROUPS = tuple(QuantMap.for_decoder(12, None).groups)


@settings(max_examples=examples(50))
@given(st.sets(st.sampled_from(GROUPS)), st.sampled_from(list(RolloutFormat)), st.sampled_from([None, 2]))
def test_every_map_comes_back_from_its_file(full: set[str], base: RolloutFormat, experts: int | None) -> None:
    whole = QuantMap.for_decoder(12, base, experts)
    quant_map = whole.promoted(full & whole.groups.keys())
    file = quant_map.to_file()
    assert QuantMap.from_file(QuantMapFile.model_validate(file.model_dump()), 12, experts) == quant_map


def test_promoting_and_keeping() -> None:
    whole = QuantMap.for_decoder(2, "fp8_block")
    promoted = whole.promoted(["model.layers.0.self_attn.k_proj", DOWN])
    assert promoted.ignored_layers() == (*(f"model.layers.0.self_attn.{part}_proj" for part in "qkv"), DOWN)
    assert promoted.promoted(["model.layers.0.self_attn.qkv_proj", DOWN], to="fp8_block") == whole
    only = whole.only([DOWN])
    assert only.formats == {DOWN: "fp8_block"}
    assert only.fused_groups == whole.fused_groups
    assert whole.only([]).rollout_format is None
    assert whole.only([]).to_hf_quantization_config() is None
    for change in (whole.promoted, whole.only):
        with pytest.raises(ValueError, match=f"nearest name is {DOWN}"):
            change([DOWN + "x"])


@pytest.mark.parametrize("experts", [None, 12])
def test_no_name_of_an_exception_is_a_part_of_another_layers_name(experts: int | None) -> None:
    """Engines that look for substrings (SGLang before 0.5.23) still find the one layer: 1 is not taken for 11."""
    quant_map = QuantMap.for_decoder(12, "fp8_block", experts)
    for name, modules in quant_map.groups.items():
        ignored = quant_map.promoted([name]).ignored_layers()
        assert set(ignored) == ({name} if name.endswith(".experts") else set(modules))
        parts = [part.removeprefix("model.") for part in ignored]  # SGLang adds names without the prefix
        found = {group for group, others in quant_map.groups.items() for part in parts for one in others if part in one}
        assert found == {name}


def test_the_map_needs_no_torch() -> None:
    code = "import sys, precision.formats.quant_map; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
