"""Where the mismatch of learner and engine comes from: scores of tokens as an attribution of plain values, ready for
JSON and for a page; then findings, the most urgent first, and one paragraph that a person can act on.

A fault is a term that is larger than the precision of both sides explains. How large that is rests on the formats: two
float32 programs differ by rounding, 16-bit ones by more, and where formats are emulated, activations that lie between
two FP8 values are rounded to different sides now and then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from precision.formats.rollout_format import RolloutFormat
from precision.mismatch.attribution import (
    LEAST_SCALE,
    TRIED_SCALE,
    TokenScores,
    attribute,
    by_bucket,
    split_by_layer,
    suspects,
    term_statistics,
)
from precision.mismatch.statistics import SPLITS
from precision.torch_on_use import Tensor, torch

MOST_SUSPECTS = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was compared, in words that the page prints."""

    source: str
    kind: str
    """fresh or recorded"""
    rollout_precision: str
    learner_precision: str
    engine_dtype: str
    temperature: float
    """Of the learner's policy."""
    sampled_at: float
    """The engine's."""
    versions: tuple[int, ...]
    trains_formats: bool = False
    """Whether the learner trains with the rollout's formats emulated: the quantization term is 0 by construction."""
    remarks: tuple[str, ...] = ()
    """What could not be compared, and why."""


@dataclass(frozen=True, kw_only=True)
class Misheld:
    """A module that the engine holds otherwise than it should (precision.formats.audit.Finding)."""

    module: str
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class EngineCheck:
    """Whether the engine holds what it was given."""

    compared: int
    """Parameters, by their checksums."""
    differing: tuple[str, ...]
    """Those of them whose checksums are others."""
    misheld: tuple[Misheld, ...] = ()
    """By formats, scales and values."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything about one set of sampled tokens; arrays are float64 [tokens] where not said."""

    setting: Setting
    scores: TokenScores
    position: NDArray[np.int64]
    """[tokens] place in the response, from 0."""
    entropy: NDArray[np.float64]
    """Of the learner's distribution at the version that sampled, nats."""
    layer_steps: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    """Layer, ascending → log-probabilities with it and those before it in the rollout's formats."""
    searched: NDArray[np.bool_] | None = None
    """[tokens] those on which faults were tried."""
    effects: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Fault → [searched tokens] what it does (launch.attribution.score_ranks)."""
    audit: EngineCheck

    def result(self) -> dict[str, Any]:
        """JSON values."""
        attribution = attribute(self.scores)
        terms = self.scores.terms()
        return dict(
            **asdict(self.setting),
            num_tokens=attribution.num_tokens,
            total=asdict(attribution.total),
            terms={name: asdict(term) for name, term in attribution.terms.items()},
            measured=self._measured(),
            largest_error=attribution.largest_error,
            layers=self._layers(),
            by_position=self._by("position", self.position.astype(np.float64), terms),
            by_entropy=self._by("entropy", self.entropy, terms),
            audit=asdict(self.audit),
            suspects=self._suspects(terms),
        )

    def _measured(self) -> dict[str, bool]:
        """Which terms were taken, and are not 0 for want of a score."""
        scores = self.scores
        return dict(
            staleness=scores.then is not None,
            quantization=scores.quantized is not None,
            routing=scores.routed is not None,
            kernels=scores.prefill is not None,
            decoding=True,
        )

    def _layers(self) -> list[dict[str, Any]]:
        if not self.layer_steps or self.scores.then is None:
            return []
        steps = [self.scores.then, *map(_tensor, self.layer_steps.values())]
        whole, terms = steps[0] - steps[-1], split_by_layer(steps)
        return [
            dict(layer=layer, **asdict(term_statistics(term, whole)))
            for layer, term in zip(self.layer_steps, terms, strict=True)
        ]

    def _by(self, name: str, values: NDArray[np.float64], terms: Mapping[str, Tensor]) -> dict[str, Any]:
        """Mean |term| in each bucket of one of precision.mismatch.statistics, up to the last that has tokens."""
        split = next(one for one in SPLITS if one.name == name)
        bucket = np.digitize(values, split.edges).astype(np.int64)
        return self._buckets(terms, bucket, split.buckets[: int(bucket.max()) + 1])

    def _buckets(self, terms: Mapping[str, Tensor], bucket: NDArray[np.int64], labels: Sequence[str]) -> dict[str, Any]:
        means = by_bucket({**terms, "total": self.scores.total}, torch.from_numpy(bucket), len(labels))
        return dict(
            labels=list(labels),
            num_tokens=np.bincount(bucket, minlength=len(labels)).tolist(),
            mean_abs={name: [None if math.isnan(v) else v for v in values] for name, values in means.items()},
        )

    def _suspects(self, terms: Mapping[str, Tensor]) -> dict[str, list[dict[str, Any]]]:
        """Faults that would explain the engine's terms, the best first."""
        below = self.scores.then if self.scores.quantized is None else self.scores.quantized
        found = {}
        if below is not None:
            # To first order log p at T is log p - (T - 1)(log p + entropy).
            tempered = {"temperature": below + _tensor(self.entropy)}
            found["decoding"] = suspects(terms["decoding"], tempered, {"temperature": -1.0})
        if self.searched is not None and self.effects:
            kernels = terms["kernels"]
            if self.scores.prefill is None:  # then the decoding term holds them
                kernels = kernels + terms["decoding"]
            kernels = kernels[torch.from_numpy(self.searched)]
            tried = {name: _tensor(effect) for name, effect in self.effects.items()}
            found["kernels"] = suspects(
                kernels, tried, {name: LEAST_SCALE for name in tried if name.startswith("scale:")}
            )
        return {term: [asdict(one) for one in every[:MOST_SUSPECTS]] for term, every in found.items()}


def _tensor(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float64))


ROUNDING_NATS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Mean |term| that the rounding of two implementations may cause, by the coarser dtype of activations."""
ROUNDING_LUCK = 0.25
"""Of the quantization term's mean |term|, what may be left in the terms after it."""
EMULATED_LUCK_NATS = 5e-3
"""The same where the learner trains with the formats and has no quantization term: twice the largest luck that an FP8
engine alone was measured with, 2.4e-3 with 16 layers (docs/precision.md)."""
EXPLAINED = 0.4
"""A fault is named when it alone accounts for so much of a term's sum of squares; chance gives below a hundredth."""
TIED = 0.02
"""Suspects that explain so little less than the best are named beside it."""
ESS_FINE, ESS_LOW = 0.98, 0.9
"""From the first on nothing need be done. Below the second a tenth of the batch is lost to reweighting."""

_WORDS = {
    "staleness": "staleness (the weights moved since the tokens were sampled)",
    "quantization": "quantization (the rollout's formats)",
    "routing": "routing (the engine chose other experts)",
    "kernels": "kernels (the engine computes otherwise than the learner with the same formats)",
    "decoding": "decoding (the engine samples otherwise than it scores)",
}
_TOGETHER = "kernels and decoding together (they cannot be told apart here: the engine did not score what it sampled)"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that the attribution says."""

    term: str
    kind: Literal["fault", "expected"]
    cause: str
    """Short and stable, for programs: `checksums`, `audit`, a fault of launch.attribution.score_ranks, `temperature`,
    the term, or `kernels or decoding`."""
    where: tuple[str, ...]
    """Modules, layers or the engine's parameters."""
    text: str


def findings(result: Mapping[str, Any]) -> list[Finding]:
    """Of `Measured.result()`: faults first, then terms by their share of the total."""
    faults = [*_kernels(result), *_decoding(result)] if result["measured"]["kernels"] else _together(result)
    faults.sort(key=lambda one: -result["terms"][one.term]["mean_abs"])
    by_share = sorted(result["terms"], key=lambda term: -abs(result["terms"][term]["share"]))
    faulty = {one.term for one in faults}
    expected = [
        _expected(result, term)
        for term in by_share
        if term not in faulty and result["terms"][term]["mean_abs"] > _rounding(result)
    ]
    return [*_audit(result), *faults, *expected]


def verdict(result: Mapping[str, Any], found: list[Finding]) -> str:
    """One paragraph: how large, from what, and what to do."""
    total = result["total"]
    size = (
        f"Learner and engine differ by {total['mean_abs']:.2g} nats a token in the mean, over {result['num_tokens']:,} "
        f"sampled tokens; the ESS is {total['ess']:.4f}."
    )
    if not found:
        return " ".join([size, "That is rounding, and nothing need be done.", *result["remarks"]])
    shares = [
        f"{100 * statistics['share']:.0f} % {_words(result, term)}"
        for term, statistics in sorted(result["terms"].items(), key=lambda item: -abs(item[1]["share"]))
        if abs(statistics["share"]) >= 0.005
    ]
    return " ".join(
        [size, f"Of the squared gap, {', '.join(shares)}.", *(one.text for one in found), *result["remarks"]]
    )


def _words(result: Mapping[str, Any], term: str) -> str:
    return _TOGETHER if term == "decoding" and not result["measured"]["kernels"] else _WORDS[term]


def _audit(result: Mapping[str, Any]) -> list[Finding]:
    """What the engine itself says about what it loaded."""
    return [*_checksums(result), *_formats(result)]


def _checksums(result: Mapping[str, Any]) -> list[Finding]:
    compared, differing = result["audit"]["compared"], tuple(result["audit"]["differing"])
    if not differing:
        return []
    if len(differing) > compared / 2:
        text = (
            f"The engine holds other weights: {len(differing)} of {compared} parameters differ from what was "
            "published. Give it the weights again, and find out why the update left them."
        )
    else:
        text = (
            f"The engine holds {len(differing)} of {compared} parameters otherwise than they were published: "
            f"{_listed(differing)}. Give it the weights again; if they come out the same, its loader is at fault."
        )
    return [Finding(term="kernels", kind="fault", cause="checksums", where=differing, text=text)]


def _formats(result: Mapping[str, Any]) -> list[Finding]:
    misheld = result["audit"]["misheld"]
    if not misheld:
        return []
    modules = tuple(dict.fromkeys(one["module"] for one in misheld))
    first = misheld[0]
    text = (
        f"The engine's own account of {_listed(modules)} is not what the quant map and the published folder say: "
        f"{first['module']}: {first['message']}. Start it from the published folder, without arguments of its own "
        "about quantization."
    )
    return [Finding(term="kernels", kind="fault", cause="audit", where=modules, text=text)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _kernels(result: Mapping[str, Any]) -> list[Finding]:
    size = result["terms"]["kernels"]["mean_abs"]
    if size <= _rounding(result):
        return []
    if alike := tied_suspects(result):
        return [_suspected(alike, "kernels", "the kernels term")]
    if size <= _luck(result):
        return []
    text = (
        "The kernels term is larger than rounding explains, and no fault of a single module has its pattern: compare "
        "what all layers share, such as config.json, RoPE, the norms' epsilon and the attention kernel."
    )
    if not result["measured"]["quantization"] and result["rollout_precision"] in tuple(RolloutFormat):
        text = "The formats could not be emulated here: the kernels term holds them too."
    return [Finding(term="kernels", kind="fault", cause="kernels", where=(), text=text)]


def _suspected(alike: Sequence[Mapping[str, Any]], term: str, what: str) -> Finding:
    best, *others = alike
    where, text = _named(best)
    text = f"{text} ({100 * best['explained']:.0f} % of {what} is explained by it alone)."
    if others:
        names = " or ".join(one["name"] for one in others)
        text += f" The scores cannot tell that from {names}."
        where += tuple(module for one in others for module in _named(one)[0])
    return Finding(term=term, kind="fault", cause=best["name"], where=where, text=text)


def tied_suspects(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The best suspects of the kernels term, or of kernels and decoding where they are one term: those that explain it
    equally well; none where none explains enough.

    Some faults are the same function: attention is linear in v, so that a scale of v_proj is one of o_proj.
    """
    every = result["suspects"].get("kernels") or [{"explained": 0.0}]
    if every[0]["explained"] < EXPLAINED:
        return []
    return [one for one in every if one["explained"] >= every[0]["explained"] - TIED]


def _named(suspect: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Where, and a sentence without its end."""
    kind, _, module = suspect["name"].partition(":")
    amount = suspect["amount"]
    if kind == "scale":
        factor = 1.0 + (TRIED_SCALE - 1.0) * amount
        return (module,), (
            f"In the engine, {module} behaves as if its weights were multiplied by about {factor:.2f}: look at its "
            "scales"
        )
    if kind == "full" and module == "all":
        return (), "The engine behaves as if nothing were quantized: it was started without the formats of the recipe"
    if kind == "full":
        return (module,), (
            f"The engine behaves as if {module} were not quantized, though the quant map says it is: compare the map "
            "with the engine's list of ignored layers"
        )
    if kind == "quantized":
        return (module,), (
            f"The engine behaves as if {module} were quantized, though the quant map leaves it out: compare the map "
            "with the engine's list of ignored layers"
        )
    if kind == "format":
        return (), f"The engine behaves as if all weights were in {module}: it was started with another format"
    if kind == "weights_only":
        return (), "The engine behaves as if only weights were quantized, and activations not: look at its FP8 kernels"
    if kind == "bf16":
        return (module,), f"The engine behaves as if {module} were in bfloat16: keep it in float32 on both sides"
    return (), "The engine behaves as if it held the weights of the version before: its update was lost"


def _decoding(result: Mapping[str, Any]) -> list[Finding]:
    size = result["terms"]["decoding"]["mean_abs"]
    if size <= max(_rounding(result), _luck(result)):
        return []
    if (best := _tempered(result)) is not None:
        return [Finding(term="decoding", kind="fault", cause="temperature", where=(), text=_temperature(result, best))]
    text = (
        "The engine gives its own samples other probabilities when it scores them again. Look at the KV cache (its "
        "format, and prefixes that were kept across a weight update) and at the decoding attention kernel."
    )
    if not result["measured"]["kernels"]:  # it did not score them again
        text = (
            "The decoding term is larger than rounding explains. Here it holds the kernels too, and of mixtures the "
            "routing of tokens without known experts; these cannot be told apart."
        )
    return [Finding(term="decoding", kind="fault", cause="decoding", where=(), text=text)]


def _tempered(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Another sampling temperature, where it explains enough of the decoding term."""
    best = next(iter(result["suspects"].get("decoding", ())), None)
    return best if best is not None and best["explained"] >= EXPLAINED else None


def _temperature(result: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    seen = result["temperature"] * (1.0 + best["amount"])
    return (
        f"The engine samples at another temperature: about {seen:.2f} where the learner has "
        f"{result['temperature']:g}. Set rollout.temperature, learner.temperature and the engine's own defaults to "
        "one value, or know that sampling itself is off-policy."
    )


def _together(result: Mapping[str, Any]) -> list[Finding]:
    """Kernels and decoding as one term, the decoding one: the engine did not score what it sampled."""
    size = result["terms"]["decoding"]["mean_abs"]
    if size <= _rounding(result):
        return []
    alike, tempered = tied_suspects(result), _tempered(result)
    larger = size > _luck(result)
    if larger and tempered is not None and (not alike or tempered["explained"] >= alike[0]["explained"] - TIED):
        text = _temperature(result, tempered)
        if others := [one["name"] for one in alike if one["explained"] >= tempered["explained"] - TIED]:
            text += f" The scores cannot tell that from {' or '.join(others)}."
        return [Finding(term="decoding", kind="fault", cause="temperature", where=(), text=text)]
    if alike:
        return [_suspected(alike, "decoding", "kernels and decoding together")]
    if not larger:
        return []
    text = (
        "What the engine said as it sampled is not what the learner says with the same weights, by more than rounding "
        "explains, and no fault that was tried has its pattern. Kernels and decoding cannot be told apart here: "
        "compare config.json, RoPE and the attention kernel, and look at the KV cache."
    )
    if not result["measured"]["quantization"] and result["rollout_precision"] in tuple(RolloutFormat):
        text = "The formats could not be emulated here: the term of kernels and decoding together holds them too."
    return [Finding(term="decoding", kind="fault", cause="kernels or decoding", where=(), text=text)]


def _expected(result: Mapping[str, Any], term: str) -> Finding:
    ess = result["terms"][term]["ess"]
    where: tuple[str, ...] = ()
    if term == "staleness":
        text = f"Staleness alone would leave an ESS of {ess:.4f}{_advice(ess, 'lower the lag or the learning rate')}."
    elif term == "quantization":
        layers = sorted(result["layers"], key=lambda layer: -layer["share"])
        where = tuple(f"model.layers.{layer['layer']}" for layer in layers[:2])
        worst = " and ".join(f"layer {layer['layer']} ({100 * layer['share']:.0f} %)" for layer in layers[:2])
        advice = _advice(ess, f"keep {'the layers named' if layers else 'some layers'} in BF16, or roll out in BF16")
        most = f", most of it from {worst}" if layers else ""
        text = f"The formats alone would leave an ESS of {ess:.4f}{most}{advice}."
    elif term == "routing":
        text = f"Routing alone would leave an ESS of {ess:.4f}{_advice(ess, 'set rollout.replay_experts: true')}."
    else:
        name = "decoding" if result["measured"]["kernels"] else "kernels and decoding"
        text = f"The {term if term != 'decoding' else name} term is what rounding to the formats leaves."
    return Finding(term=term, kind="expected", cause=term, where=where, text=text)


def _advice(ess: float, action: str) -> str:
    if ess >= ESS_FINE:
        return "; nothing need be done about it"
    return f"; {action}" if ess < ESS_LOW else f"; if it falls further, {action}"


def _rounding(result: Mapping[str, Any]) -> float:
    exact = result["engine_dtype"] == "float32" and result["learner_precision"] == "fp32"
    return ROUNDING_NATS["float32" if exact else "bfloat16"]


def _luck(result: Mapping[str, Any]) -> float:
    """What formats whose emulation is not exact may leave."""
    luck = ROUNDING_LUCK * float(result["terms"]["quantization"]["mean_abs"])
    return max(_rounding(result), EMULATED_LUCK_NATS if result["trains_formats"] else luck)
