"""The study of precision at 32B: its decoder, its readout and its laws, on cases whose answer is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evidence.at_32b.anchor import Estimate, at_32b
from tests.evidence.at_32b.cases import Case, run
from tests.evidence.at_32b.laws import fit
from tests.evidence.at_32b.maps import BF16, ENDS, FORMATS, REFERENCE, UNIFORM, Map
from tests.evidence.at_32b.page import kept_bytes
from tests.evidence.at_32b.readout import ENTROPIES, Head, read
from tests.evidence.at_32b.results import Point, save
from tests.evidence.at_32b.results import read as read_results
from tests.evidence.at_32b.stack import Decoder
from tests.evidence.at_32b.weights import Sizes, Weights

TINY = Sizes(hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16)


def point(depth: int, hidden: int, kl: float) -> Point:
    return Point("depth", "plain-flat", hidden, depth, depth, 0, "fp8_block", error=kl**0.5, kl=kl, chi2=2 * kl)


def streams(maps: tuple[Map, ...], layers: int = 2) -> dict[str, torch.Tensor]:
    decoder = Decoder(Weights(TINY, seed=3), layers, maps)
    found = decoder.embed(1, 12)
    for index in range(layers):
        found = decoder.layer(index, found)
    return found


def test_a_map_that_quantizes_nothing_is_the_reference() -> None:
    kept = Map("kept", "all layers kept", "fp8_block", kept_layers=1)
    found = streams((REFERENCE, kept, UNIFORM[0], BF16))
    assert torch.equal(found["kept"], found["reference"])
    errors = {name: float((found[name] - found["reference"]).norm()) for name in ("fp8_block", "bf16")}
    assert 0 < errors["bf16"] < errors["fp8_block"] / 3


def test_layers_come_out_alike_when_they_are_made_again() -> None:
    first, again = streams((REFERENCE, UNIFORM[0])), streams((REFERENCE, UNIFORM[0]))
    assert torch.equal(first["fp8_block"], again["fp8_block"])


def test_products_in_each_format_are_off_by_what_three_bits_of_mantissa_cost() -> None:
    decoder = Decoder(Weights(TINY, seed=0, plain=True), 1, (REFERENCE, *UNIFORM))
    local: dict[str, float] = {}
    decoder.layer(0, decoder.embed(1, 32), local)
    assert set(local) == {f"{group}.{name}" for group in ("qkv", "o", "gate_up", "down") for name in FORMATS}
    assert all(0.02 < error < 0.05 for error in local.values())


def test_readout_is_the_expectation_over_sampled_tokens() -> None:
    weights = Weights(TINY, seed=1)
    found = streams((REFERENCE, UNIFORM[0]))
    head = Head(weights).matrix()
    gains = torch.ones(TINY.hidden)
    exact = read(found, head, gains)["fp8_block"]
    assert all(float(exact[f"kl@{low}"].mean()) > 0 for low in ENTROPIES)
    assert torch.all(exact[f"chi2@{ENTROPIES[0]}"] >= exact[f"kl@{ENTROPIES[0]}"])
    same = read({name: found["reference"] for name in found}, head, gains)["fp8_block"]
    assert all(float(values.abs().max()) < 1e-12 for values in same.values())


def test_a_law_finds_planted_exponents_and_predicts_them() -> None:
    points = [point(d, h, 1e-3 * d**0.5 * h**-0.25) for d in (4, 8, 16) for h in (128, 512)]
    law = fit(points, "kl")
    assert law.depth[0] == pytest.approx(0.5)
    assert law.width[0] == pytest.approx(-0.25)
    assert law.predict(64, 5120).center == pytest.approx(1e-3 * 64**0.5 * 5120**-0.25)
    with pytest.raises(ValueError, match="measure more"):
        fit(points[:2], "kl")


def test_noise_widens_the_interval() -> None:
    random = np.random.default_rng(0)
    points = [point(d, 256, 1e-3 * d * float(np.exp(random.normal(0, 0.3)))) for d in (4, 8, 16, 32, 64) * 4]
    found = fit(points, "kl").predict(64, 256)
    assert found.low < 1e-3 * 64 < found.high
    assert found.high / found.low > 2


def test_estimates_grow_with_depth_and_fall_with_length() -> None:
    flat, growing = at_32b((0.0, 0.0, 0.0)), at_32b((0.0, 0.5, 1.0))
    assert flat.low == growing.low
    assert growing.high == pytest.approx(2 * flat.high)
    one = Estimate(1e-3, 2e-3, 3e-3)
    assert one.token_ess(2.0)[1] == pytest.approx(1 / 1.004)
    assert one.sequence_ess(2.0, 1000)[1] == pytest.approx(1.004**-1000)


def test_promotions_cost_a_byte_a_weight() -> None:
    assert kept_bytes("fp8_block") == 0
    assert kept_bytes("block_down") == 64 * 5120 * 25600
    layer = 5120 * (64 + 2 * 8) * 128 + 5120 * 64 * 128 + 3 * 5120 * 25600
    assert kept_bytes(ENDS[0].name) == 2 * layer
    assert kept_bytes("bf16") == 64 * layer


def test_a_case_goes_on_where_it_ended_and_its_table_reads_back(tmp_path: Path) -> None:
    case = Case("shapes", "outliers-flat", TINY, 2, (1, 2), (REFERENCE, *UNIFORM[:1]), seed=0, length=16)
    run(case, tmp_path)
    whole = (tmp_path / f"{case.name}.json").read_text()
    run(case, tmp_path)
    assert (tmp_path / f"{case.name}.json").read_text() == whole
    measured = read_results(tmp_path)
    assert [one.depth for one in measured.of("shapes", "fp8_block")] == [1, 2]
    save(measured, tmp_path / "table.json")
    assert read_results(tmp_path / "table.json") == measured
