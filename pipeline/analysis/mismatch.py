"""Explain the mismatch of learner and engine: an attribution as plain values, findings, a verdict, and an HTML page.

A fault is a term that is larger than the precision of both sides explains. The bound depends on the formats: two
float32 programs differ by rounding, 16-bit programs differ more, and where formats are emulated, activations between
two FP8 values are sometimes rounded to different sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from pipeline.analysis.drawing import COLORS, page, picture, range_label
from pipeline.data.files import write_atomically
from precision.formats.audit import Misheld
from precision.formats.rollout_format import RolloutFormat
from precision.mismatch.attribution import (
    LEAST_SCALE,
    TERMS,
    TRIED_SCALE,
    TokenScores,
    attribute,
    by_bucket,
    suspects,
    term_statistics,
)
from precision.mismatch.statistics import SPLITS
from precision.torch_on_use import Tensor, torch

MOST_SUSPECTS = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A description of the comparison, in words that the page prints."""

    source: str
    kind: str
    """`fresh` or `recorded`."""
    rollout_precision: str
    learner_precision: str
    engine_dtype: str
    temperature: float
    """The learner's."""
    sampled_at: float
    """The engine's."""
    versions: tuple[int, ...]
    trains_formats: bool = False
    """Whether the learner trains with the rollout's formats emulated, which makes the quantization term 0."""
    remarks: tuple[str, ...] = ()
    """Sentences about comparisons that were not possible."""


@dataclass(frozen=True, kw_only=True)
class EngineCheck:
    """The result of checking the weights that an engine holds."""

    compared: int
    """Parameters whose checksums were compared."""
    differing: tuple[str, ...]
    """Parameters whose checksums differ."""
    misheld: tuple[Misheld, ...] = ()
    """Modules with other formats, scales or values than they should have."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All measurements of one set of sampled tokens. Arrays are float64 [tokens] unless stated otherwise."""

    setting: Setting
    scores: TokenScores
    position: NDArray[np.int64]
    """[tokens] index in the response, from 0."""
    entropy: NDArray[np.float64]
    """Entropy of the learner's distribution at the version that sampled, nats."""
    layer_steps: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    """Layer, ascending → log-probabilities with this layer and all before it in the rollout's formats."""
    searched: NDArray[np.bool_] | None = None
    """[tokens] whether faults were tried on a token."""
    effects: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Fault → [searched tokens] its effect (launch.attribution.score_ranks)."""
    audit: EngineCheck

    def result(self) -> dict[str, Any]:
        """Return the attribution as JSON values."""
        attribution, scores, terms = attribute(self.scores), self.scores, self.scores.terms()
        layers: list[dict[str, Any]] = []
        if self.layer_steps and scores.then is not None:
            steps = [scores.then, *map(_tensor, self.layer_steps.values())]
            # Step n has the first n layers quantized. A layer's term is what it adds to the layers below it, so the
            # terms add up to the quantization term.
            layers = [
                dict(layer=layer, **asdict(term_statistics(before - after, steps[0] - steps[-1])))
                for layer, (before, after) in zip(self.layer_steps, pairwise(steps), strict=True)
            ]
        # Mean |term| in each bucket of precision.mismatch.statistics, up to the last that has tokens.
        buckets = {}
        for name, values in (("position", self.position.astype(np.float64)), ("entropy", self.entropy)):
            split = next(one for one in SPLITS if one.name == name)
            bucket = np.digitize(values, split.edges).astype(np.int64)
            labels = split.buckets[: int(bucket.max()) + 1]
            means = by_bucket({**terms, "total": scores.total}, torch.from_numpy(bucket), len(labels))
            buckets[f"by_{name}"] = dict(
                labels=list(labels),
                num_tokens=np.bincount(bucket, minlength=len(labels)).tolist(),
                mean_abs={term: [None if math.isnan(v) else v for v in mean] for term, mean in means.items()},
            )
        # Faults that would explain the engine's terms, the best first.
        explained, below = {}, scores.then if scores.quantized is None else scores.quantized
        if below is not None:
            # To first order log p at T is log p - (T - 1)(log p + entropy).
            tempered = {"temperature": below + _tensor(self.entropy)}
            explained["decoding"] = suspects(terms["decoding"], tempered, {"temperature": -1.0})
        if self.searched is not None and self.effects:
            kernels = terms["kernels"]
            if scores.prefill is None:  # then the decoding term includes kernels
                kernels = kernels + terms["decoding"]
            tried = {name: _tensor(effect) for name, effect in self.effects.items()}
            least = {name: LEAST_SCALE for name in tried if name.startswith("scale:")}
            explained["kernels"] = suspects(kernels[torch.from_numpy(self.searched)], tried, least)
        return dict(
            **asdict(self.setting),
            num_tokens=attribution.num_tokens,
            total=asdict(attribution.total),
            terms={name: asdict(term) for name, term in attribution.terms.items()},
            # Terms that were measured; the others are 0 because a score is missing.
            measured=dict(
                staleness=scores.then is not None,
                quantization=scores.quantized is not None,
                routing=scores.routed is not None,
                kernels=scores.prefill is not None,
                decoding=True,
            ),
            largest_error=attribution.largest_error,
            layers=layers,
            **buckets,
            audit=asdict(self.audit),
            suspects={term: [asdict(one) for one in every[:MOST_SUSPECTS]] for term, every in explained.items()},
        )


def _tensor(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float64))


ROUNDING_NATS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Mean |term| that rounding in two implementations may cause, by the coarser dtype of activations."""
ROUNDING_LUCK = 0.25
"""Share of the quantization term's mean |term| that later terms may have without a fault."""
EMULATED_LUCK_NATS = 5e-3
"""The same in nats, where a learner that trains with the formats has no quantization term: twice the largest value
measured with an FP8 engine alone, 2.4e-3 with 16 layers."""
EXPLAINED = 0.4
"""Least share of a term's sum of squares that a fault must explain alone to be named; chance explains below 0.01."""
TIED = 0.02
"""Suspects that explain at most this much less than the best suspect are named beside it."""
ESS_FINE, ESS_LOW = 0.98, 0.9
"""ESS from which on nothing need be done, and ESS below which a tenth of the batch is lost to reweighting."""

MEANING = {
    "staleness": "weights moved since",
    "quantization": "the rollout's formats",
    "routing": "other experts",
    "kernels": "engine computes otherwise",
    "decoding": "engine samples otherwise than it scores",
}
_ACTIONS = {
    "staleness": "lower the lag or the learning rate",
    "quantization": "keep the layers with the largest shares in BF16, or roll out in BF16",
    "routing": "set rollout.replay_experts: true",
}
_IGNORED = "compare the quant map with the engine's list of ignored layers"
_SUSPECTS = {
    "scale": "The engine behaves as if {module} were multiplied by about {factor:.2f}: look at its scales",
    "full": f"The engine behaves as if {{module}} were not quantized: {_IGNORED}",
    "quantized": f"The engine behaves as if {{module}} were quantized: {_IGNORED}",
    "format": "The engine behaves as if all weights were in {module}: it was started with another format",
    "weights_only": "The engine behaves as if activations were not quantized: look at its FP8 kernels",
    "bf16": "The engine behaves as if {module} were in bfloat16: keep it in float32 on both sides",
    "stale": "The engine behaves as if it held the weights of the version before: its update was lost",
}
_FAULTS = {
    "kernels": "The kernels term is larger than rounding explains, and no fault of a single module has its pattern: "
    "compare what all layers share, such as config.json, RoPE, the norms' epsilon and the attention kernel.",
    "decoding": "The engine gives its own samples other probabilities when it scores them again: look at the KV cache "
    "(its format, and prefixes kept across a weight update) and at the decoding attention kernel.",
    "kernels or decoding": "The engine did not score what it sampled, so that kernels and decoding cannot be told "
    "apart here. Together they are larger than rounding explains, and no fault that was tried has their pattern: "
    "compare config.json, RoPE and the attention kernel, and look at the KV cache.",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    term: str
    kind: Literal["fault", "expected"]
    cause: str
    """Short and stable name for programs: `checksums`, `audit`, a fault of launch.attribution.score_ranks,
    `temperature`, the term, or `kernels or decoding`."""
    where: tuple[str, ...]
    """Modules, layers or the engine's parameters."""
    text: str


def findings(result: Mapping[str, Any]) -> list[Finding]:
    """Return findings on a `Measured.result()`: wrong weights in the engine, faults, then other terms by share."""
    terms, measured, audit = result["terms"], result["measured"], result["audit"]
    exact = result["engine_dtype"] == "float32" and result["learner_precision"] == "fp32"
    rounding = ROUNDING_NATS["float32" if exact else "bfloat16"]
    # The gap that inexact emulation of formats may leave.
    luck = EMULATED_LUCK_NATS if result["trains_formats"] else ROUNDING_LUCK * float(terms["quantization"]["mean_abs"])
    luck = max(rounding, luck)

    def fault(term: str, cause: str, text: str, where: tuple[str, ...] = ()) -> Finding:
        return Finding(term=term, kind="fault", cause=cause, where=where, text=text)

    found = []
    if differing := tuple(audit["differing"]):
        text = (
            f"The engine holds {len(differing)} of {audit['compared']} parameters otherwise than they were published: "
            f"{_listed(differing)}. Give it the weights again; if they come out the same, its loader is at fault."
        )
        found.append(fault("kernels", "checksums", text, differing))
    if modules := tuple(dict.fromkeys(one["module"] for one in audit["misheld"])):
        text = (
            f"The engine's account of {_listed(modules)} is not what the quant map and the published folder say: "
            f"{modules[0]}: {audit['misheld'][0]['message']}. Start it from the published folder, without arguments "
            "of its own about quantization."
        )
        found.append(fault("kernels", "audit", text, modules))

    faults, apart, alike = [], measured["kernels"], tied_suspects(result)
    tempered = next((one for one in result["suspects"].get("decoding", ()) if one["explained"] >= EXPLAINED), None)
    if terms["decoding"]["mean_abs"] <= luck:
        tempered = None
    if tempered is not None and not apart and alike and tempered["explained"] < alike[0]["explained"] - TIED:
        tempered = None
    term = "kernels" if apart else "decoding"
    if terms[term]["mean_abs"] > rounding and (apart or tempered is None):
        cause = "kernels" if apart else "kernels or decoding"
        if alike:
            texts, where = [], list[str]()
            for one in alike:
                kind, _, module = one["name"].partition(":")
                factor = 1.0 + (TRIED_SCALE - 1.0) * one["amount"]
                texts.append(_SUSPECTS.get(kind, _SUSPECTS["stale"]).format(module=module, factor=factor))
                where += [module] if kind in ("scale", "full", "quantized", "bf16") and module != "all" else []
            text = f"{texts[0]} ({100 * alike[0]['explained']:.0f} % of {cause} is explained by it alone)."
            if names := " or ".join(one["name"] for one in alike[1:]):
                text += f" The scores cannot tell that from {names}."
            faults.append(fault(term, alike[0]["name"], text, tuple(where)))
        elif terms[term]["mean_abs"] > luck:
            text = _FAULTS[cause]
            if not measured["quantization"] and result["rollout_precision"] in tuple(RolloutFormat):
                text = f"The formats could not be emulated here: the term of {cause} holds them too."
            faults.append(fault(term, cause, text))
    if tempered is not None:
        text = (
            "The engine samples at another temperature: about "
            f"{result['temperature'] * (1.0 + tempered['amount']):.2f} where the learner has "
            f"{result['temperature']:g}. Set rollout.temperature, learner.temperature and the engine's own defaults to "
            "one value, or know that sampling itself is off-policy."
        )
        faults.append(fault("decoding", "temperature", text))
    elif apart and terms["decoding"]["mean_abs"] > luck:
        faults.append(fault("decoding", "decoding", _FAULTS["decoding"]))
    found += sorted(faults, key=lambda one: -terms[one.term]["mean_abs"])

    faulty = {one.term for one in faults}
    for term in sorted(terms, key=lambda term: -abs(terms[term]["share"])):
        if term in faulty or terms[term]["mean_abs"] <= rounding:
            continue
        ess, action = terms[term]["ess"], _ACTIONS.get(term)
        layers = sorted(result["layers"], key=lambda one: -one["share"])[:2] if term == "quantization" else []
        text = "What is left of the engine's computation is what rounding to the formats leaves."
        if action is not None:
            advice = action if ess < ESS_LOW else f"if it falls further, {action}"
            worst = " and ".join(f"layer {one['layer']} ({100 * one['share']:.0f} %)" for one in layers)
            text = f"{term.capitalize()} alone would leave an ESS of {ess:.4f}{', most of it ' * bool(worst)}{worst}; "
            text += f"{advice if ess < ESS_FINE else 'nothing need be done about it'}."
        places = tuple(f"model.layers.{one['layer']}" for one in layers)
        found.append(Finding(term=term, kind="expected", cause=term, where=places, text=text))
    return found


def verdict(result: Mapping[str, Any], found: list[Finding]) -> str:
    """Return a paragraph with the size of the mismatch, its causes, and the remedy."""
    total = result["total"]
    size = (
        f"Learner and engine differ by {total['mean_abs']:.2g} nats a token in the mean, over {result['num_tokens']:,} "
        f"sampled tokens; the ESS is {total['ess']:.4f}."
    )
    if not found:
        return " ".join([size, "That is rounding, and nothing need be done.", *result["remarks"]])
    meaning = MEANING
    if not result["measured"]["kernels"]:
        meaning = MEANING | {"decoding": "kernels and decoding together, which cannot be told apart here"}
    by_share = sorted(result["terms"].items(), key=lambda item: -abs(item[1]["share"]))
    shares = [f"{100 * one['share']:.0f} % {t} ({meaning[t]})" for t, one in by_share if abs(one["share"]) >= 0.005]
    texts = [one.text for one in found]
    return " ".join([size, f"Of the squared gap, {', '.join(shares)}.", *texts, *result["remarks"]])


def tied_suspects(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the best suspects of the kernels term (or of kernels and decoding as one term), none where they explain
    too little. Some faults are the same function: attention is linear in v, so a scale of v_proj is a scale of
    o_proj."""
    every = result["suspects"].get("kernels") or [{"explained": 0.0}]
    if every[0]["explained"] < EXPLAINED:
        return []
    return [one for one in every if one["explained"] >= every[0]["explained"] - TIED]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


TERM_COLORS = dict(
    staleness="violet", quantization="orange", routing="teal", kernels="blue", decoding="pink", total="ink"
)
SMALLEST_SHARE = 1e-5
"""Share of the largest bucket's total; a term that stays below it has no line."""
NOTHING_NATS = 1e-9
"""Size up to which a value is rounding of float64 and is not drawn."""
_SIZE = (5.5, 2.6)


def write_page(result: Mapping[str, Any], folder: Path) -> Path:
    """Write mismatch.html, with its figures inside, into `folder`; return its path."""

    def percent(value: float) -> str:
        return f"{round(100 * value, 1) + 0.0:.1f} %"  # never -0.0

    # Routing is shown only where it was measured.
    shown = [term for term in TERMS if term != "routing" or result["measured"]["routing"]]
    shares = [100 * result["terms"][term]["share"] for term in shown]
    low, high = min(0.0, *shares), max(100.0, *shares)
    with picture("shares of the squared gap", _SIZE, left_in=1.9) as drawn:
        axes = drawn.axes
        axes.barh(range(len(shown)), shares, color=[COLORS[TERM_COLORS[term]] for term in shown], height=0.62)
        for row, (term, share) in enumerate(zip(shown, shares, strict=True)):
            text = percent(share / 100) if result["measured"][term] else "not measured"
            axes.text(max(share, 0.0) + 0.015 * (high - low), row, text, va="center")
        axes.set_yticks(range(len(shown)), [f"{term}\n{MEANING[term].split(' than ')[0]}" for term in shown])
        axes.invert_yaxis()
        axes.set_xlim(low * 1.15, high * 1.22)
        axes.set_xlabel("% of the squared gap; the bars add up to 100")
        axes.grid(axis="x")
    figures = [("Where the gap comes from", drawn.svg)]
    if layers := result["layers"]:
        with picture("quantization by layer", _SIZE, left_in=0.9) as drawn:
            axes, sizes = drawn.axes, [one["mean_abs"] for one in layers]
            axes.bar([one["layer"] for one in layers], sizes, color=COLORS["orange"], width=0.7)
            if len(layers) <= 12:
                for one in layers:
                    axes.text(one["layer"], one["mean_abs"], f"{100 * one['share']:.0f} %", ha="center", va="bottom")
                axes.set_xticks([one["layer"] for one in layers])
            axes.set_ylim(top=1.15 * max(NOTHING_NATS, *sizes))
            axes.set_xlabel("decoder layer (%: its share of the term)")
            axes.set_ylabel("mean |nats| that the layer adds")
        figures.append(("Quantization, layer by layer", drawn.svg))
    splits = (
        ("By position", "by_position", "place of the token in the response"),
        ("By entropy (sure → unsure)", "by_entropy", "entropy of the learner's distribution, nats"),
    )
    for title, split, label in splits if result["total"]["mean_abs"] > NOTHING_NATS else ():
        buckets = result[split]
        places = [at for at, count in enumerate(buckets["num_tokens"]) if count]
        least = max(NOTHING_NATS, SMALLEST_SHARE * max(buckets["mean_abs"]["total"][at] for at in places))
        with picture(split, _SIZE, left_in=0.8) as drawn:
            axes = drawn.axes
            for term in [*shown, "total"]:
                values = np.array([buckets["mean_abs"][term][at] for at in places], float)
                if (values > least).any():
                    style = "--" if term == "total" else "-"
                    heights = np.where(values > least, values, np.nan)
                    color = COLORS[TERM_COLORS[term]]
                    axes.plot(range(len(places)), heights, style, marker="o", markersize=4, color=color, label=term)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}".replace("e-0", "e-")))
            axes.set_xticks(range(len(places)), [range_label(buckets["labels"][at]) for at in places], fontsize=7.5)
            axes.set_xlabel(label)
            axes.set_ylabel("mean |nats|")
            axes.legend(loc="best", fontsize=8)
        figures.append((title, drawn.svg))
    rows = [(term, MEANING[term], result["terms"][term]) for term in shown]
    text = page(
        "mismatch.html.j2",
        dict(nats=lambda value: "0" if value == 0 else f"{value:.2g}", percent=percent),
        result=result,
        rows=[*rows, ("total", "all of it", result["total"])],
        figures=figures,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "mismatch.html", text)
    return folder / "mismatch.html"
