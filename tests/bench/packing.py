"""How even the work of ranks and micro-batches is, and how much of it is padding. Plans only; needs no GPU.

Rows as long as a reasoning model's: lognormal of median 4096 tokens, cut at 32768, sixteen samples a prompt, of which
some are thought about longer than others; 256 prompt tokens each. Several seeds; the median, and in brackets the worst.

    ranks       work of the busiest data parallel rank ÷ mean - 1
    equal       the same where each rank takes as many samples as the others, in order
    tokens      the same where longest first evens out tokens: what this replaced
    read        largest share of the batch's tokens that a rank has to read
    micro       tokens of the fullest micro-batch of a rank ÷ mean of its micro-batches - 1
    padding     padded positions ÷ all positions
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_bridge.hf.model_config import ModelConfig, read_config
from megatron_bridge.model.te_precision import token_multiple
from megatron_bridge.step.micro_batches import Plan, Split, TokenRows, plan_micro_batches
from precision.balance import fullest, longest_first, sections
from tests.support.runs import ROOT

SAMPLES, PER_PROMPT, PROMPT_TOKENS = 1024, 16, 256
MEDIAN, LONGEST = 4096, 32768
SEEDS = range(5)


@dataclass(frozen=True)
class Case:
    """A layout, and what fits in a micro-batch of it."""

    name: str
    split: Split
    micro_batch_tokens: int = 65536


CASES = (
    Case("DP 8", Split(data_ranks=8)),
    Case("DP 64", Split(data_ranks=64)),
    Case("DP 8, one longest row fits", Split(data_ranks=8), LONGEST + PROMPT_TOKENS),
    Case("DP 8 CP 4", Split(data_ranks=8, context_ranks=4)),
    Case("DP 8 TP 8 SP", Split(data_ranks=8, sequence_ranks=8)),
    Case("DP 8 TP 4 SP, fp8", Split(data_ranks=8, sequence_ranks=4, token_multiple=token_multiple("fp8"))),
    Case(
        "DP 8 CP 2 TP 4 SP, fp8_block",
        Split(data_ranks=8, context_ranks=2, sequence_ranks=4, token_multiple=token_multiple("fp8_block")),
    ),
    Case("DP 64 CP 8", Split(data_ranks=64, context_ranks=8)),
    Case("DP 8 PP 4 VPP 2", Split(data_ranks=8, count_multiple=4)),
)


def lengths(seed: int) -> NDArray[np.int64]:
    """[SAMPLES] tokens of prompt and answer together."""
    random = np.random.default_rng(seed)
    medians = np.repeat(MEDIAN * np.exp(0.7 * random.standard_normal(SAMPLES // PER_PROMPT)), PER_PROMPT)
    answers = np.minimum(LONGEST, medians * np.exp(0.6 * random.standard_normal(SAMPLES)))
    return PROMPT_TOKENS + np.maximum(1, answers).astype(np.int64)


def measure(case: Case, model: ModelConfig, seed: int) -> dict[str, float]:
    """The figures of one batch."""
    found = lengths(seed)
    rows = TokenRows(tokens=[np.zeros(n, np.int32) for n in found], starts=np.full(SAMPLES, PROMPT_TOKENS))
    split = replace(case.split, attention_parity=model.attention_parity)
    work = split.work(found)
    ranks, tokens = split.data_ranks, found.tolist()
    shares = sections(work, ranks)
    plan = plan_micro_batches(rows, micro_batch_tokens=case.micro_batch_tokens, split=split)
    return dict(
        ranks=uneven(work, shares),
        equal=uneven(work, [part.tolist() for part in np.array_split(np.arange(SAMPLES), ranks)]),
        tokens=uneven(work, longest_first(tokens, ranks)),
        read=max(sum(tokens[part[0] : part[-1] + 1]) for part in shares) / sum(tokens),
        micro=micro_unevenness(plan),
        padding=plan.padding_share,
    )


def uneven(weights: Sequence[int], parts: Sequence[Sequence[int]]) -> float:
    """Heaviest part ÷ mean - 1."""
    return fullest(weights, parts) * len(parts) / sum(weights) - 1


def micro_unevenness(plan: Plan) -> float:
    """Of rank 0."""
    held = [int(micro.row_ends[-1]) for micro in plan.micro_batches]
    return max(held) / statistics.fmean(held) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-32b", help="a folder of pipeline/recipes/models")
    model = ModelConfig.from_hf(read_config(ROOT / "pipeline" / "recipes" / "models" / parser.parse_args().model))
    results = {}
    for case in CASES:
        every = [measure(case, model, seed) for seed in SEEDS]
        results[case.name] = {name: [one[name] for one in every] for name in every[0]}
        told = ", ".join(f"{name} {text(values)}" for name, values in results[case.name].items())
        print(f"{case.name}: {told}")
    print(json.dumps(results))


def text(values: Sequence[float]) -> str:
    """Median, and the worst in brackets."""
    return f"{statistics.median(values):.2%} ({max(values):.2%})"


if __name__ == "__main__":
    main()
