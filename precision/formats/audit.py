"""Compares what an engine holds with the quant map, and with what the learner published or emulates. Needs no torch.

    map       a module is held in another format than the map says; ranks of an engine differ; a router or a head is
              quantized that the map leaves alone
    weights   the scales, or the values that the engine multiplies by, are others than those expected

Statistics stand for the weights: the number, the smallest, the largest and the sum of a module's scales, and the sum of
the squares of the values after quantization. They are sums, so they add up over the ranks of an engine and hold for any
layout that a kernel asks for. An engine's answer is small, and one wrong scale among thousands changes a sum.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from precision.formats.quant_map import QuantMap

Kind = Literal["missing", "two formats", "format", "shape", "scales", "values"]
SCALE_TOLERANCE = 1e-4
"""Relative. Scales are sent as they are; sums are made in other orders."""
VALUE_TOLERANCE = 2e-3
"""Relative, of the root of the sum of squares: dequantized values may be rounded to the engine's dtype."""
REQUANTIZED_TOLERANCE = 3e-2
"""The same where the engine chooses scales itself (fp8_tensor; one scale a row on a GPU, one a shard)."""
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate|up|down)_proj")
KV_CACHE = "fp8_kv_cache"
"""The layout of an attention layer whose keys and values are kept in FP8, by one scale each."""
FULL = "full"
"""The layout of what is not quantized."""
_SERVED_AS = {"fp8_tensor": ("fp8_tensor", "fp8_channel")}
"""A map's format → what engines make of it, where that is not the same: on a GPU, SGLang gives each row a scale."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Statistics of the weight scales of a module."""

    count: int
    smallest: float
    largest: float
    total: float

    def plus(self, other: Scales) -> Scales:
        """Of both."""
        return Scales(
            count=self.count + other.count,
            smallest=min(self.smallest, other.smallest),
            largest=max(self.largest, other.largest),
            total=self.total + other.total,
        )


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one rank of an engine holds of a module, or what is expected of a whole engine."""

    layout: str
    """full, a RolloutFormat, or the name of another method of SGLang."""
    dtype: str
    """In which the weight is stored, as torch names it without its prefix."""
    num_values: int
    squares: float | None = None
    """Sum of the squares of the values that the engine multiplies by; None where it is not known."""
    scales: Scales | None = None
    """None where there are none, or where they are packed."""

    @property
    def served_as(self) -> str:
        """The format, or the dtype of what is not quantized."""
        return self.dtype if self.layout == FULL else self.layout

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Held:
        """Raises ValueError for anything but what `to_json` made."""
        try:
            data: dict[str, Any] = json.loads(text)
            scales = data.pop("scales", None)
            return cls(**data, scales=None if scales is None else Scales(**scales))
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{text[:80]!r} is no description of a module ({error})") from error

    def plus(self, other: Held) -> Held:
        """Both together, in this one's format."""
        both_squares = None if self.squares is None or other.squares is None else self.squares + other.squares
        both = self.scales.plus(other.scales) if self.scales and other.scales else None
        return Held(
            layout=self.layout,
            dtype=self.dtype,
            num_values=self.num_values + other.num_values,
            squares=both_squares,
            scales=both,
        )


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    module: str
    kind: Kind
    message: str
    """A sentence without the module."""

    def __str__(self) -> str:
        return f"{self.module}: {self.message}"


def audited_name(module: str) -> str:
    """The name under which a module is audited: its own; for an expert, that of the experts' stack of its layer."""
    match = _EXPERT.fullmatch(module)
    if match is None:
        return module
    return f"{match[1]}.{'down_proj' if match[2] == 'down' else 'gate_up_proj'}"


def formats_of(quant_map: QuantMap | None, dtype: str) -> dict[str, str]:
    """What an engine that computes in `dtype` ("bfloat16") should hold: audited name of each module of the map → its
    format, or `dtype` where it is not quantized. Empty where nothing is."""
    if quant_map is None:
        return {}
    modules = (module for group in quant_map.fused_groups for module in group)
    return {audited_name(module): str(quant_map.formats.get(module, dtype)) for module in modules}


def audit(
    ranks: Sequence[Mapping[str, Held]], formats: Mapping[str, str], expected: Mapping[str, Held] | None = None
) -> list[Finding]:
    """What is wrong with an engine, in the order of the map's modules; an empty list when nothing is.

    `ranks`: for each tensor parallel rank, module by its audited name → what it holds. `formats`: as `formats_of` makes
    them; modules that are not among them must not be quantized. `expected`: module → what the ranks should hold
    together, of any modules.
    """
    names = [*formats, *dict.fromkeys(name for rank in ranks for name in rank if name not in formats)]
    found = (_audit_one(name, ranks, formats.get(name), (expected or {}).get(name)) for name in names)
    return [finding for findings in found for finding in findings]


def _audit_one(
    name: str, ranks: Sequence[Mapping[str, Held]], should: str | None, expected: Held | None
) -> Iterator[Finding]:
    held = [rank[name] for rank in ranks if name in rank]
    if len(held) < len(ranks):
        yield Finding(name, "missing", f"{len(ranks) - len(held)} of {len(ranks)} ranks of the engine do not hold it")
        return
    found = sorted({one.served_as for one in held})
    if len(found) > 1:
        yield Finding(name, "two formats", f"the ranks of the engine hold it in different formats: {', '.join(found)}")
    elif should is None and held[0].layout == KV_CACHE:
        scales = held[0].scales
        default = ", SGLang's default, which nobody has calibrated" if scales and scales.total == scales.count else ""
        between = f"scales {scales.smallest:.4g} to {scales.largest:.4g}" if scales else "no scales"
        yield Finding(name, "format", f"the engine keeps keys and values in {held[0].dtype} with {between}{default}")
    elif should is None and held[0].layout != FULL:
        yield Finding(name, "format", f"the quant map leaves it as it is, but the engine holds it as {found[0]}")
    elif should is not None and found[0] not in _SERVED_AS.get(should, (should,)):
        yield Finding(name, "format", f"it is {should} in the quant map, but the engine holds it as {found[0]}")
    elif expected is not None:
        whole = held[0]
        for other in held[1:]:
            whole = whole.plus(other)
        yield from _compare(name, whole, expected, len(ranks))


def _compare(name: str, whole: Held, expected: Held, num_ranks: int) -> Iterator[Finding]:
    copies, left = divmod(whole.num_values, expected.num_values)
    if left or not 1 <= copies <= num_ranks:  # ranks that share a key-value head each have a copy of it
        yield Finding(name, "shape", f"the engine holds {whole.num_values} values, expected {expected.num_values}")
        return
    if whole.scales and expected.scales and (wrong := _wrong_scales(whole.scales, expected.scales, copies)):
        yield Finding(name, "scales", wrong)
    if whole.squares is None or expected.squares is None:
        return
    ours, theirs = math.sqrt(whole.squares / copies), math.sqrt(expected.squares)
    requantized = whole.layout in ("fp8_tensor", "fp8_channel")
    if not math.isclose(ours, theirs, rel_tol=REQUANTIZED_TOLERANCE if requantized else VALUE_TOLERANCE):
        yield Finding(
            name,
            "values",
            f"the norm of the values that the engine multiplies by is {ours:.6g}, {_times(ours, theirs)} the expected "
            f"{theirs:.6g}",
        )


def _wrong_scales(ours: Scales, expected: Scales, copies: int) -> str | None:
    """What differs; None when nothing does."""
    found = (ours.smallest, ours.largest, ours.total / copies if ours.count == copies * expected.count else None)
    for what, one, other in zip(
        ("smallest", "largest", "sum"), found, (expected.smallest, expected.largest, expected.total), strict=True
    ):
        if one is not None and not math.isclose(one, other, rel_tol=SCALE_TOLERANCE):
            return f"the {what} of its weight scales is {one:.6g}, {_times(one, other)} the expected {other:.6g}"
    return None


def _times(ours: float, expected: float) -> str:
    return f"{ours / expected:.4g} times" if expected else "not"
