"""Writes docs/precision-at-32b.md: what was measured, what is extrapolated from it, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from tests.evidence.at_32b import plots
from tests.evidence.at_32b.anchor import (
    HIDDEN,
    LAYERS,
    PUBLISHED_KL,
    PUBLISHED_LAYERS,
    PUBLISHED_MOE_KL,
    Estimate,
    at_32b,
)
from tests.evidence.at_32b.laws import SATURATED_KL, Law, chi2_per_kl, fit, narrow_law, ratio
from tests.evidence.at_32b.maps import ALONE, BF16, ENDS, GROUPS, KV, PROMOTED, UNIFORM
from tests.evidence.at_32b.results import Measured, read, save
from tests.evidence.at_32b.weights import QWEN3_32B

PAGE = Path("docs/precision-at-32b.md")
TABLE = Path("docs/evidence/precision-at-32b.json")
FIGURES = Path("docs/evidence")
LENGTHS = (1024, 4096, 16384)
TITLES = {one.name: one.title for one in (BF16, *UNIFORM, *PROMOTED, *ENDS, *ALONE, *KV)}
FORMATS = tuple(one.name for one in UNIFORM)
GIB = 2.0**30


def write(results: Path) -> None:
    """The page, its plots and the reduced table beside them; `results` is the folder of `measure`, or that table."""
    measured = read(results)
    save(measured, TABLE)
    plots.growth(measured, FIGURES / "precision-at-32b-growth.png")
    shares = map_ratios(measured)
    plots.maps(
        shares,
        {name: TITLES[name] for name in TITLES if name not in ("bf16", "fp8_block")},
        FIGURES / "precision-at-32b-maps.png",
    )
    estimates, factor = estimates_at_32b(measured), chi2_per_kl(measured)
    shown = {name: estimates[name] for name in ("fp8_block", "block_down_o", "bf16")}
    plots.lengths(measured, shown, TITLES, factor, FIGURES / "precision-at-32b-length.png")
    PAGE.write_text("\n".join(_page(measured, estimates, factor)) + "\n", encoding="utf-8")


def map_ratios(measured: Measured) -> dict[str, dict[str, float]]:
    """Where it was measured → map → squared error, that of blocks everywhere being 1."""
    deepest = max(one.depth for one in measured.of("shapes", "fp8_block"))
    places = {
        f"Qwen3-32B's shapes, {deepest} layers": ("shapes", "outliers-flat"),
        "64 narrow layers, outliers": ("depth", "outliers-flat"),
        "64 narrow layers, first and last kept": ("ends", "outliers-flat"),
    }
    return {
        label: {
            name: ratio(measured, study, name, "fp8_block", kind)
            for name in measured.last(study, kind)
            if name not in ("fp8_block", "bf16")
        }
        for label, (study, kind) in places.items()
        if "fp8_block" in measured.last(study, kind)
    }


def exponents(measured: Measured) -> dict[str, Law]:
    """The laws of KL under blocks, by kind of model; kinds with too few unsaturated points are left out."""
    laws = {}
    for kind in plots.KIND_TITLES:
        try:
            laws[kind] = narrow_law(measured, kind, "fp8_block", "kl")
        except ValueError:
            continue
    return laws


def harshest_exponent(measured: Measured) -> float:
    """Of KL in depth, from the errors of models with outliers in a growing stream, whose KL itself saturates."""
    return 2 * fit([one for one in measured.of("depth", "fp8_block", "outliers-growing")], "error").depth[0]


def estimates_at_32b(measured: Measured) -> dict[str, Estimate]:
    """KL by map. The size is published, its growth with depth lies between that of a flat and of a growing stream."""
    laws = exponents(measured)
    calm, growing = max(0.0, laws["plain-flat"].depth[0]), laws["plain-growing"].depth[0]
    block = at_32b((calm, growing, max(growing, harshest_exponent(measured))))
    shapes = "shapes", "outliers-flat"
    found = {name: block.scaled(ratio(measured, shapes[0], name, "fp8_block", shapes[1])) for name in FORMATS}
    for one in (*PROMOTED, *KV):
        found[one.name] = block.scaled(ratio(measured, shapes[0], one.name, "fp8_block", shapes[1]))
    for one in ENDS:
        if one.name in measured.last("ends"):
            found[one.name] = block.scaled(ratio(measured, "ends", one.name, "fp8_block", "outliers-flat"))
    sixty_four = [
        ratio(measured, "depth", "bf16", "fp8_block", kind)
        for kind in plots.KIND_TITLES
        if measured.last("depth", kind).get("fp8_block") is not None
        and measured.last("depth", kind)["fp8_block"].kl < SATURATED_KL
    ]
    found["bf16"] = Estimate(block.low * min(sixty_four), block.center * sum(sixty_four) / len(sixty_four), 1e-3)
    return found


def kept_bytes(name: str) -> int:
    """What a map costs more than blocks everywhere, in bytes: one for each weight that stays in BF16."""
    s = QWEN3_32B
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    weights = dict(
        qkv=s.hidden * (queries + 2 * keys), o=s.hidden * queries, gate_up=2 * s.hidden * s.ffn, down=s.hidden * s.ffn
    )
    one = next(found for found in (BF16, *UNIFORM, *PROMOTED, *ENDS, *KV) if found.name == name)
    return sum(
        weights[group] for layer in range(LAYERS) for group in GROUPS if one.format_of(layer, LAYERS, group) is None
    )


def _page(measured: Measured, estimates: dict[str, Estimate], factor: float) -> list[str]:
    return [
        *_head(measured, estimates, factor),
        *_ess_table(estimates, factor),
        *_what_to_do(measured, estimates, factor),
        *_growth(measured),
        *_maps(measured),
        *_length(measured),
        *_method(measured),
    ]


def _head(measured: Measured, estimates: dict[str, Estimate], factor: float) -> list[str]:
    block = estimates["fp8_block"]
    low, center, high = block.token_ess(factor)
    deepest = max(one.depth for one in measured.of("shapes", "fp8_block"))
    return [
        "# Precision at 32B: what FP8 rollouts cost a step",
        "",
        "Written by `python -m tests.evidence.at_32b page` from what `… measure` found; the table of all points is",
        "[evidence/precision-at-32b.json](evidence/precision-at-32b.json). No 32B model was run.",
        "",
        f"**Answer.** With all linears of Qwen3-32B in block FP8 and a learner in BF16, the token ESS of a step should "
        f"be {center:.4f} ({low:.4f} to {high:.4f}): the gap is small, and hardly depends on the map. The ESS of whole "
        f"sequences is another matter: at most {_share(block.sequence_ess(factor, 1024)[1])} at 1,024 tokens and "
        f"{_share(block.sequence_ess(factor, 4096)[1])} at 4,096, so no sequence-level importance weight survives FP8.",
        "",
        f"*Measured here:* how the error of random decoders grows with depth (4 to 64 layers), width (128 to 1,024) "
        f"and "
        f"position (to 4,096), and the first {deepest} of 64 layers in Qwen3-32B's own shapes, one at a time. "
        f"*Published by others:* the size of the gap of a trained 9B model. *Extrapolated:* everything about 32B, as "
        f"size (published) × growth with depth (measured) × ratio between maps (measured).",
        "",
    ]


def _ess_table(estimates: dict[str, Estimate], factor: float) -> list[str]:
    order = (*FORMATS, *(one.name for one in (*PROMOTED, *ENDS, *KV)), "bf16")
    header = ["map", "KL, nats a token", "token ESS", *(f"sequence ESS, {n:,} tokens" for n in LENGTHS), "GiB more"]
    lines = ["## The ESS of a 32B step (extrapolated)", "", _row(header), "|---" * len(header) + "|"]
    for name in order:
        if name not in estimates:
            continue
        one = estimates[name]
        ess = one.token_ess(factor)
        sequences = [_share(one.sequence_ess(factor, length)[1]) for length in LENGTHS]
        kl = f"{one.center:.1e} ({one.low:.1e} to {one.high:.1e})"
        cells = [TITLES[name], kl, f"{ess[1]:.4f} ({ess[0]:.4f} to {ess[2]:.4f})", *sequences]
        lines.append(_row([*cells, f"{kept_bytes(name) / GIB:.1f}"]))
    least, most = PUBLISHED_KL
    return [
        *lines,
        "",
        f"Token ESS is 1 / (1 + χ²) with χ² = {factor:.2f} KL, the median of what was measured. Sequence ESS is "
        f"(1 + χ²)^−length: the ratio of each token has mean 1 given those before, so the second moments multiply; "
        f"where χ² differs between sequences it is lower still. The size comes from {least:g} to {most:g} nats, which "
        f"block-FP8 rollouts of a dense 9B model cost in practice (vLLM against Megatron in BF16, [NeMo-RL pull "
        f"request "
        f"2744](https://github.com/NVIDIA-NeMo/RL/pull/2744)), kernels included; for 35B-A3B it names "
        f"{PUBLISHED_MOE_KL[0]:g} to {PUBLISHED_MOE_KL[1]:g}, routing included. The interval spans these figures and "
        f"the exponents in depth below; it is no confidence interval of a 32B model. BF16's upper end is the 1e-3 that "
        f"NeMo-RL allows between two BF16 engines: their kernels differ by more than rounding alone does here.",
        "",
        "![Sequence ESS](evidence/precision-at-32b-length.png)",
        "",
    ]


def _what_to_do(measured: Measured, estimates: dict[str, Estimate], factor: float) -> list[str]:
    block = estimates["fp8_block"]
    half_life = 0.6931 / (factor * block.center)
    formats = sorted(estimates[name].center / block.center for name in FORMATS)
    bought = {
        name: (1 - estimates[name].center / block.center, kept_bytes(name) / GIB)
        for name in (*(one.name for one in PROMOTED), *(one.name for one in ENDS))
        if name in estimates
    }
    cheapest = sorted(bought, key=lambda name: -bought[name][0] / bought[name][1])
    prices = "; ".join(f"{TITLES[name]}: {bought[name][0]:.0%} for {bought[name][1]:.1f} GiB" for name in cheapest)
    return [
        "## What to do about it",
        "",
        "- **Start with `rollout.precision: fp8_block` and a token-level objective or correction.** A token ESS of "
        f"{block.token_ess(factor)[0]:.3f} or more leaves P3O's cap and TIS's bound almost idle.",
        f"- **Never weigh whole sequences.** Their ESS halves every {half_life:,.0f} tokens. A geometric mean over a "
        f"response keeps its ESS, but against the engine's log-probabilities it is shifted by the KL, "
        f"{block.center:.1e}, "
        "several times GSPO's clip of 3e-4: take GSPO's ratio against the learner's own old log-probabilities.",
        f"- **Do not shop for formats.** Rows, tensors, blocks and MXFP8 lie between {formats[0]:.2f} and "
        f"{formats[-1]:.2f} times the KL of blocks in true shapes ({_narrow_range(measured)} on 64 narrow layers, "
        "which scatter more): 3 bits of mantissa set it, not the scales. Take the fastest.",
        f"- **Promotions by rule are dear**, the cheapest first: {prices}. They pay where a layer is broken, not as a "
        "policy: `evenkeel quant-map suggest` finds such layers on the real weights and prices them.",
        "- **If ESS must be higher, emulate.** A learner that computes with the rollout's formats "
        "(`learner.fp8_emulation`, or Transformer Engine's FP8) removes most of the term; promoting every linear "
        "removes it at BF16's memory.",
        f"- **Alarm on the sign of a fault.** A KL above {2 * block.high:.0e} at 32B is no rounding: look for a wrong "
        "scale, a stale policy or a temperature with `evenkeel mismatch`.",
        "",
    ]


def _narrow_range(measured: Measured) -> str:
    found = [ratio(measured, "depth", name, "fp8_block", "outliers-flat") for name in FORMATS]
    return f"{min(found):.2f} to {max(found):.2f}"


def _growth(measured: Measured) -> list[str]:
    header = ["model", "KL ∝ depth to the", "KL ∝ width to the", "predicted error at 64 × 5,120", "predicted KL there"]
    lines = ["## Growth with depth and width (measured)", "", _row(header), "|---" * len(header) + "|"]
    for kind, title in plots.KIND_TITLES.items():
        try:
            law = narrow_law(measured, kind, "fp8_block", "kl")
            error = narrow_law(measured, kind, "fp8_block", "error").predict(LAYERS, HIDDEN)
        except ValueError:
            lines.append(_row([title, "saturated", "–", "–", "–"]))
            continue
        kl = law.predict(LAYERS, HIDDEN)
        lines.append(
            _row(
                [
                    title,
                    f"{law.depth[0]:.2f} ± {2 * law.depth[1]:.2f}",
                    f"{law.width[0]:.2f} ± {2 * law.width[1]:.2f}",
                    f"{error.center:.3f} ({error.low:.3f} to {error.high:.3f})",
                    f"{kl.center:.1e} ({kl.low:.1e} to {kl.high:.1e})",
                ]
            )
        )
    return [
        *lines,
        "",
        *_true_shapes(measured),
        "![Growth of the error](evidence/precision-at-32b-growth.png)",
        "",
        "Dotted: BF16 rounding of every operation. Points: seeds.",
        "",
    ]


def _true_shapes(measured: Measured) -> list[str]:
    points = {one.depth: one for one in measured.of("shapes", "fp8_block", "outliers-flat")}
    deepest = max(points)
    error = points[deepest].error
    at_end = error * (LAYERS / deepest) ** 0.5
    bf16 = next(one for one in measured.of("shapes", "bf16", "outliers-flat") if one.depth == deepest)
    narrow = narrow_law(measured, "outliers-flat", "fp8_block", "error").predict(LAYERS, HIDDEN)
    kl = points[deepest].kl / error**2 * at_end**2
    least, most = PUBLISHED_KL
    return [
        f"**True shapes.** After {deepest} of 64 layers of 5,120 channels the error is {error:.4f} under blocks and "
        f"{bf16.error:.4f} under BF16. It grows as the square root of the layers passed (dashed), as independent "
        f"errors "
        f"in a flat stream must, which makes {at_end:.3f} after 64 (extrapolated); the law of the narrow models says "
        f"{narrow.center:.3f} ({narrow.low:.3f} to {narrow.high:.3f}). Outliers matter less in wide layers: a few "
        f"large channels among 5,120 take a smaller part of what a norm divides by.",
        "",
        f"**Random models overstate the gap.** {at_end:.3f} would be a KL of {kl:.1e} nats, where a trained dense 9B "
        f"model shows {least:g} to {most:g}. Trained heads have margins, and trained layers do not spread an error at "
        f"random. Hence only ratios are taken from random models, and the size from trained ones: the KL of "
        f"{PUBLISHED_LAYERS} layers (assumed of that model), times the measured growth to {LAYERS}.",
        "",
    ]


def _maps(measured: Measured) -> list[str]:
    header = ["group", *(TITLES[name] for name in FORMATS)]
    lines = ["## Ratios between maps (measured)", "", "![Maps](evidence/precision-at-32b-maps.png)", ""]
    lines += ["Relative error of a single product in Qwen3-32B's shapes, on exact input:", ""]
    lines += [_row(header), "|---" * len(header) + "|"]
    for group in GROUPS:
        lines.append(_row([group, *(f"{measured.local[f'{group}.{name}']:.4f}" for name in FORMATS)]))
    alone = {group: ratio(measured, "shapes", f"only_{group}", "fp8_block", "outliers-flat") for group in GROUPS}
    total = sum(alone.values())
    shares = ", ".join(f"{group} {share:.0%}" for group, share in alone.items())
    return [
        *lines,
        "",
        f"Each group alone, as a share of the whole squared error: {shares}; together {total:.0%}, so that groups may "
        "be ranked one at a time.",
        "",
    ]


def _length(measured: Measured) -> list[str]:
    points = measured.of("length", "fp8_block")
    if not points:
        return []
    first, last = (sum(one.parts[place] for one in points) / len(points) for place in (0, -1))
    kv = measured.of("length", "block_kv")
    more = sum(one.kl for one in kv) / sum(one.kl for one in points) - 1
    return [
        "## Length (measured)",
        "",
        f"The KL of a token is {first:.3g} nats in the first sixteenth of 4,096 positions and {last:.3g} in the last "
        f"(8 layers of 256 channels with outliers): a token's gap {_trend(first, last)}. What grows with length is the "
        f"sum over a response. An FP8 KV cache (one scale a tensor) "
        f"changes the KL by {more:+.0%}.",
        "",
    ]


def _trend(first: float, last: float) -> str:
    change = last / first
    return "does not grow with its position" if 0.5 < change < 2 else f"changes by a factor of {change:.1f} over a row"


def _method(measured: Measured) -> list[str]:
    seeds = [len({one.seed for one in measured.of("depth", "fp8_block", kind)}) for kind in plots.KIND_TITLES]
    others = len({one.seed for one in measured.points if one.study != "depth"})
    deepest = max(one.depth for one in measured.of("shapes", "fp8_block"))
    return [
        "## Method, assumptions, limits",
        "",
        "- **Models.** Decoders of Qwen3's form (RMS norms, rotary attention with q and k norms, SwiGLU), random. "
        f"Narrow ones keep Qwen3-32B's proportions; the true one has {QWEN3_32B.hidden:,} channels, ffn "
        f"{QWEN3_32B.ffn:,}, {QWEN3_32B.heads} heads of {QWEN3_32B.head_dim}, {QWEN3_32B.kv_heads} for keys. Formats "
        f"are "
        "the product's own (`precision.formats`), in an FP32 model with BF16 weights.",
        "- **Weights as trained ones** (tests/evidence/at_32b/weights.py): rows and columns of lognormal scale, one "
        "entry "
        "in 10,000 ten times as large; 0.1 % of the residual channels 20 times as large in all layers ([LLM.int8()]"
        "(https://arxiv.org/abs/2208.07339)); 0.05 % of the gated channels spike about 36 times ([activation spikes of "
        "GLU models](https://arxiv.org/abs/2405.14428)); lognormal norm gains. *Flat* streams start at 1 and are "
        "written "
        "1/√(2 layers) of that, as in GPT-2's initialization; *growing* ones are written 1 by each projection. Massive "
        "activations of single tokens ([2402.17762](https://arxiv.org/abs/2402.17762)) are not modelled.",
        "- **Head.** A random head over 4,096 tokens, scaled to 1.5 nats; it stands for the fifth of the tokens that "
        "are "
        "forks ([2506.01939](https://arxiv.org/abs/2506.01939)), and the rest is taken to cost nothing. KL and χ² are "
        "exact expectations over that vocabulary.",
        f"- **Saturation.** Models whose KL exceeds {SATURATED_KL:g} nats are left out of the laws: with outliers "
        f"and a "
        "growing stream, narrow models amplify errors until nothing is left to compare. Published figures show that "
        "trained models do not.",
        f"- **Sizes.** {min(seeds)} to {max(seeds)} seeds a model by depth, {others} elsewhere, "
        f"64 positions a model, 48 for the true shapes, of which {deepest} "
        "layers were measured (`measure` keeps the streams and goes on, at about 45 s of one core a layer). Layers of "
        "one growing stream are read at several depths, so those points are not independent.",
        "- **Not covered.** Trained 32B weights, kernels of GPUs, routing of mixtures, decoding. The first thing to do "
        "with GPUs is `evenkeel mismatch` on Qwen3-32B: it replaces this page's size by a measurement.",
    ]


def _share(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.0e}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
