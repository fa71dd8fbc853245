"""Audit an engine: compare its weights with the quant map and with the learner's weights. Needs no torch.

    map       a module is held in another format than the map says; ranks of an engine differ; a router or a head is
              quantized that the map leaves alone
    weights   the scales, or the values that the engine multiplies by, differ from those published or emulated

Statistics stand for the weights: the number, minimum, maximum and sum of a module's scales, and the sum of the squares
of its values after quantization. Sums add up over the ranks of an engine and hold for any layout that a kernel needs.
An engine's answer is small, and a single wrong scale among thousands changes a sum.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from precision.formats.quant_map import QuantMap

Kind = Literal["missing", "two formats", "format", "shape", "scales", "values"]
SCALE_TOLERANCE = 1e-4
"""Relative. Scales are sent unchanged, but summed in another order."""
VALUE_TOLERANCE = 2e-3
"""Relative, of the root of the sum of squares: dequantized values may be rounded to the engine's dtype."""
REQUANTIZED_TOLERANCE = 3e-2
"""The same where the engine chooses scales itself (fp8_tensor; one scale a row on a GPU, one a shard)."""
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate|up|down)_proj")
KV_CACHE = "fp8_kv_cache"
"""The layout of an attention layer that keeps its keys and values in FP8, with one scale each."""
FULL = "full"
"""The layout of unquantized weights."""
_SERVED_AS = {"fp8_tensor": ("fp8_tensor", "fp8_channel")}
"""A map's format → its formats in engines, where they may differ: on a GPU, SGLang gives each row a scale."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Statistics of the weight scales of a module."""

    count: int
    smallest: float
    largest: float
    total: float


@dataclass(frozen=True, kw_only=True)
class Held:
    """The statistics of a module, as one rank of an engine holds it, or as expected of a whole engine."""

    layout: str
    """full, a RolloutFormat, fp8_kv_cache, or SGLang's name of another method."""
    dtype: str
    """The dtype of the stored weight, as torch names it without its prefix."""
    num_values: int
    squares: float | None = None
    """Sum of the squares of the values that the engine multiplies by; None where it is unknown."""
    scales: Scales | None = None
    """None where there are no scales, or where they are packed."""

    @classmethod
    def from_json(cls, text: str) -> Held:
        """Read a JSON object of the fields. Raises ValueError for anything else."""
        try:
            data: dict[str, Any] = json.loads(text)
            scales = data.pop("scales", None)
            return cls(**data, scales=None if scales is None else Scales(**scales))
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{text[:80]!r} is no description of a module ({error})") from error

    def plus(self, other: Held) -> Held:
        """Add the values of another share of the module, keeping this share's format."""
        scales, more = self.scales, other.scales
        return replace(
            self,
            num_values=self.num_values + other.num_values,
            squares=None if self.squares is None or other.squares is None else self.squares + other.squares,
            scales=Scales(
                count=scales.count + more.count,
                smallest=min(scales.smallest, more.smallest),
                largest=max(scales.largest, more.largest),
                total=scales.total + more.total,
            )
            if scales and more
            else None,
        )


@dataclass(frozen=True)
class Misheld:
    """A difference between a module of an engine and its expected state."""

    module: str
    kind: Kind
    message: str
    """A sentence without the module's name."""

    def __str__(self) -> str:
        return f"{self.module}: {self.message}"


def audited_name(module: str) -> str:
    """Return the audited name of a module: its own, or for an expert the name of its layer's stack of experts."""
    match = _EXPERT.fullmatch(module)
    if match is None:
        return module
    return f"{match[1]}.{'down_proj' if match[2] == 'down' else 'gate_up_proj'}"


def formats_of(quant_map: QuantMap | None, dtype: str) -> dict[str, str]:
    """Return the formats expected of an engine that computes in `dtype` ("bfloat16"): audited name of each module of
    the map → its format, or `dtype` where it is not quantized. Empty without a map."""
    if quant_map is None:
        return {}
    modules = (module for group in quant_map.fused_groups for module in group)
    return {audited_name(module): str(quant_map.formats.get(module, dtype)) for module in modules}


def audit(
    ranks: Sequence[Mapping[str, Held]], formats: Mapping[str, str], expected: Mapping[str, Held] | None = None
) -> list[Misheld]:
    """Return the faults of an engine, in the order of the map's modules; empty when there are none. `ranks`: for each
    tensor parallel rank, audited name → statistics. `formats`: from `formats_of`; other modules must not be quantized.
    `expected`: audited name → statistics of all ranks together, of any modules."""
    findings = []
    for name in [*formats, *dict.fromkeys(name for rank in ranks for name in rank if name not in formats)]:
        held = [rank[name] for rank in ranks if name in rank]
        if len(held) < len(ranks):
            missing = f"{len(ranks) - len(held)} of {len(ranks)} ranks of the engine do not hold it"
            findings.append(Misheld(name, "missing", missing))
            continue
        should, found = formats.get(name), sorted({one.dtype if one.layout == FULL else one.layout for one in held})
        wrong = None
        if len(found) > 1:
            differ = f"the ranks of the engine hold it in different formats: {', '.join(found)}"
            findings.append(Misheld(name, "two formats", differ))
        elif should is None and held[0].layout == KV_CACHE:
            scales = held[0].scales
            default = (
                ", SGLang's default, which nobody has calibrated" if scales and scales.total == scales.count else ""
            )
            between = f"scales {scales.smallest:.4g} to {scales.largest:.4g}" if scales else "no scales"
            wrong = f"the engine keeps keys and values in {held[0].dtype} with {between}{default}"
        elif should is None and held[0].layout != FULL:
            wrong = f"the quant map leaves it as it is, but the engine holds it as {found[0]}"
        elif should is not None and found[0] not in _SERVED_AS.get(should, (should,)):
            wrong = f"it is {should} in the quant map, but the engine holds it as {found[0]}"
        elif expected and name in expected:
            findings += _compare(name, held, expected[name])
        if wrong is not None:
            findings.append(Misheld(name, "format", wrong))
    return findings


def _compare(name: str, held: Sequence[Held], expected: Held) -> Iterator[Misheld]:
    whole = functools.reduce(Held.plus, held)
    copies, left = divmod(whole.num_values, expected.num_values)
    if left or not 1 <= copies <= len(held):  # ranks that share a key-value head each hold a copy
        yield Misheld(name, "shape", f"the engine holds {whole.num_values} values, expected {expected.num_values}")
        return
    if whole.scales and expected.scales:
        ours, theirs = whole.scales, expected.scales
        pairs = {"smallest": (ours.smallest, theirs.smallest), "largest": (ours.largest, theirs.largest)}
        if ours.count == copies * theirs.count:
            pairs["sum"] = ours.total / copies, theirs.total
        for what, (one, other) in pairs.items():
            if not math.isclose(one, other, rel_tol=SCALE_TOLERANCE):
                wrong = f"the {what} of its weight scales is {one:.6g}, expected {other:.6g}"
                yield Misheld(name, "scales", wrong)
                break
    if whole.squares is None or expected.squares is None:
        return
    norm, right = math.sqrt(whole.squares / copies), math.sqrt(expected.squares)
    requantized = whole.layout in ("fp8_tensor", "fp8_channel")
    if not math.isclose(norm, right, rel_tol=REQUANTIZED_TOLERANCE if requantized else VALUE_TOLERANCE):
        wrong = f"the norm of the values that the engine multiplies by is {norm:.6g}, expected {right:.6g}"
        yield Misheld(name, "values", wrong)
