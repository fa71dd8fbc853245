"""Attributions with known terms: what is found in them, what is said, and that the page shows it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.analysis.mismatch import EngineCheck, findings
from tests.support.attributions import TOKENS, measured

FULL = "full:model.layers.0.self_attn.qkv_proj"
SCALE = "scale:model.layers.1.mlp.down_proj"


def causes(**changes: Any) -> list[str]:
    return [one.cause for one in findings(measured(**changes).result())]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(), ["quantization"]),
        (dict(sizes=dict(quantization=0.0)), []),
        (dict(sizes=dict(quantization=0.0), rollout_precision="fp32"), []),
        (dict(sizes=dict(staleness=0.1)), ["staleness", "quantization"]),
        (dict(sizes=dict(kernels=0.03)), ["kernels", "quantization"]),
        (dict(sizes=dict(kernels=0.002)), ["quantization", "kernels"]),  # rounding luck
        (dict(sizes=dict(kernels=0.003), engine_dtype="bfloat16", learner_precision="bf16"), []),
        (dict(effects={FULL: 1.0, SCALE: 0.0}), [FULL, "quantization"]),
        (dict(effects={FULL: 0.0, SCALE: 2.5}), [SCALE, "quantization"]),
        (dict(effects={FULL: 0.05, SCALE: 0.0}), [FULL, "quantization"]),  # small, and yet it has a pattern
        (dict(sizes=dict(kernels=0.1), effects={FULL: 1.0}), ["kernels", "quantization"]),  # drowned by another
        (dict(sizes=dict(decoding=0.03)), ["decoding", "quantization"]),
        (dict(tempered=0.2), ["temperature", "quantization"]),
        (dict(prefilled=False), ["quantization"]),
        (dict(prefilled=False, sizes=dict(kernels=0.03)), ["kernels or decoding", "quantization"]),
        (dict(prefilled=False, sizes=dict(decoding=0.03)), ["kernels or decoding", "quantization"]),
        (dict(prefilled=False, effects={FULL: 0.0, SCALE: 2.5}), [SCALE, "quantization"]),
        (dict(prefilled=False, tempered=0.2), ["temperature", "quantization"]),
    ],
)
def test_causes(changes: dict[str, Any], expected: list[str]) -> None:
    assert causes(**changes) == expected


def test_the_checksums_come_first_and_name_the_parameters() -> None:
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    result = measured(effects={SCALE: 2.5}, audit=EngineCheck(compared=30, differing=(name,))).result()
    first, second, _ = findings(result)
    assert (first.cause, first.where) == ("checksums", (name,))
    assert (second.cause, second.where) == (SCALE, ("model.layers.1.mlp.down_proj",))
    assert "multiplied by about 1.25" in second.text


@pytest.mark.parametrize(("luck", "kind"), [(0.003, "expected"), (0.03, "fault")])
@pytest.mark.parametrize("term", ["kernels", "decoding"])
def test_luck_of_a_learner_that_trains_with_the_formats_is_no_fault(term: str, luck: float, kind: str) -> None:
    """An FP8 engine of 16 layers differs from itself by about 0.003; the quantization term cannot say so."""
    (found,) = findings(measured({"quantization": 0.0, term: luck}, trains_formats=True).result())
    assert (found.term, found.kind) == (term, kind)


def test_terms_layers_and_buckets_of_the_result() -> None:
    result = measured().result()
    assert result["largest_error"] < 1e-12
    assert sum(term["share"] for term in result["terms"].values()) == pytest.approx(1.0)
    assert [layer["layer"] for layer in result["layers"]] == [0, 1]
    assert [layer["share"] for layer in result["layers"]] == pytest.approx([0.4, 0.6])
    for name in ("by_position", "by_entropy"):
        assert sum(result[name]["num_tokens"]) == TOKENS
        assert len(result[name]["labels"]) == len(result[name]["mean_abs"]["total"])
    assert result["measured"] == dict(staleness=True, quantization=True, routing=False, kernels=True, decoding=True)
    assert json.loads(json.dumps(result, allow_nan=False))["num_tokens"] == TOKENS
