"""pass@k and its uncertainty, and what was rewarded, from n samples of each held-out prompt.

A sample whose verifier failed is neither right nor wrong: no estimate counts it, and `verifier_failures` says how many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.data.batch import SOLVED_REWARD, TEACHER_FAILED, Completion, Prompt, Sample, is_solved
from precision.text import one_line

_Z_95 = 1.959963984540054
MOST_SHORT = 0.1
"""Of the prompts of an estimate of pass@k: the share that may have fewer than k samples with a verdict."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from the n there are, is correct.

    1 - C(n - c, k) / C(n, k), unbiased (Chen et al. 2021, arXiv 2107.03374), as a product of n - c + 1 … n factors
    so that no binomial overflows. Raises ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_correct} correct among {num_samples} is undefined, expected 1 ≤ k ≤ samples"
        )
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def evaluate(answers: Sequence[Sequence[Sample]], solved_at: float = SOLVED_REWARD) -> dict[str, Any]:
    """Scores from the samples of each prompt, as many of each; plain values, ready for a file.

    `prompts`, `samples` of each, `correct` and `judged` [prompts], and what `summarize` and `rewards` find.
    """
    judged = [[sample for sample in each if sample.judged] for each in answers]
    correct, known = (
        [int(is_solved([sample.reward for sample in each], solved_at).sum()) for each in judged],
        [len(each) for each in judged],
    )
    samples = max(map(len, answers), default=0)
    counts = dict(prompts=len(answers), samples=samples, correct=correct, judged=known)
    return counts | summarize(correct, known) | rewards([sample for each in answers for sample in each])


def summarize(num_correct: Sequence[int], num_judged: Sequence[int]) -> dict[str, Any]:
    """`pass_at_1` with its 95 % bounds `pass_at_1_low` and `pass_at_1_high`, and `pass_at_k`: {"1": …, "2": …, "4": …}
    up to the most samples of a prompt; from the correct and the judged samples of each prompt.

    Means over the prompts of which a sample was judged, the same ones for every k; empty where none was. A prompt with
    fewer than k judged samples counts with all that it has, which is at most its pass@k; a k of which more than
    MOST_SHORT of the prompts are short is left out. Raises ValueError when there is no prompt.
    """
    if len(num_correct) == 0:
        raise ValueError("there are no prompts to summarize, expected at least one")
    counts = [(correct, judged) for correct, judged in zip(num_correct, num_judged, strict=True) if judged]
    most = max(num_judged)
    curve = {}
    for k in sorted({*(1 << i for i in range(most.bit_length())), most}) if counts else ():
        if sum(judged < k for _, judged in counts) <= MOST_SHORT * len(counts):
            curve[str(k)] = float(np.mean([pass_at_k(judged, correct, min(k, judged)) for correct, judged in counts]))
    if not curve:
        return {}
    low, high = clustered_wilson(*zip(*counts, strict=True))
    return {"pass_at_1": curve["1"], "pass_at_1_low": low, "pass_at_1_high": high, "pass_at_k": curve}


def clustered_wilson(num_correct: Sequence[int], num_judged: Sequence[int]) -> tuple[float, float]:
    """95 % Wilson interval for pass@1 from the correct and the judged samples of each prompt, at least one of each.

    Samples of a prompt resemble one another, so they are not prompts × samples independent trials. Wilson's formula is
    given the effective number of trials, p (1 - p) / var(mean), where the variance comes from the spread between
    prompts (Kish's design effect); it lies between the number of prompts and that of samples. Unlike a bootstrap it is
    deterministic, and wider than a point when all samples agree.
    """
    prompts = len(num_correct)
    rates = np.asarray(num_correct) / np.asarray(num_judged)
    p = float(rates.mean())
    trials = float(prompts)
    if prompts > 1 and 0.0 < p < 1.0:
        variance = float(rates.var(ddof=1)) / prompts
        most = float(sum(num_judged))
        trials = min(most, max(trials, p * (1.0 - p) / variance)) if variance > 0.0 else most
    denominator = 1.0 + _Z_95**2 / trials
    center = (p + _Z_95**2 / (2.0 * trials)) / denominator
    half = _Z_95 * math.sqrt(p * (1.0 - p) / trials + _Z_95**2 / (4.0 * trials**2)) / denominator
    return max(0.0, center - half), min(1.0, center + half)


def rewards(samples: Sequence[Sample]) -> dict[str, Any]:
    """`reward_mean`, `reward_parts` {part: mean over the samples that have it} and `verifier_failures`.

    Samples whose verifier failed are counted in the last one alone; where no other is left there is no mean.
    """
    judged = [sample for sample in samples if sample.judged]
    parts: dict[str, list[float]] = {}
    for sample in judged:
        for name, value in sample.reward_parts.items():
            if name != TEACHER_FAILED:
                parts.setdefault(name, []).append(value)
    mean = {"reward_mean": float(np.mean([sample.reward for sample in judged]))} if judged else {}
    means = {name: float(np.mean(values)) for name, values in parts.items()}
    return mean | dict(reward_parts=means, verifier_failures=len(samples) - len(judged))


def by_source(
    sources: Sequence[str], answers: Sequence[Sequence[Sample]], solved_at: float = SOLVED_REWARD
) -> dict[str, dict[str, float]]:
    """`prompts`, `verifier_failures` and, where a sample has a reward, `pass_at_1` and `reward_mean` of each source;
    from the source of each prompt and the samples of it."""
    found: dict[str, dict[str, float]] = {}
    for source in dict.fromkeys(sources):
        own = [each for name, each in zip(sources, answers, strict=True) if name == source]
        told = evaluate(own, solved_at)
        names = ("prompts", "pass_at_1", "reward_mean", "verifier_failures")
        found[source] = {name: told[name] for name in names if name in told}
    return found


_PROMPT, _RESPONSE = 300, 600
"""Characters that are told."""


def told_of(prompt: Prompt, sample: Sample, text: str) -> dict[str, Any]:
    """`group`, `prompt`, `response` (which is `text`), `reward` (None: its verifier failed), `reward_parts`, `finish`
    and `response_tokens`."""
    return dict(
        group=prompt.group,
        prompt=one_line(prompt.text, _PROMPT),
        response=one_line(text, _RESPONSE),
        reward=sample.reward if sample.judged else None,
        reward_parts=dict(sample.reward_parts) if sample.judged else {},
        finish=sample.completion.finish,
        response_tokens=len(sample.completion.tokens),
    )


MOST_PROMPTS, MOST_SAMPLES, MOST_CHARACTERS = 8, 4, 4_000
"""Kept of an evaluation: its first prompts, of each the first samples, of each text so many characters at most."""


def kept_responses(
    prompts: Sequence[Prompt], answers: Sequence[Sequence[Sample]], text_of: Callable[[Completion], str]
) -> list[dict[str, Any]]:
    """Of the first held-out prompts, the same in every evaluation: `prompt`, `answer`, `source` and the first `samples`
    with `response`, `reward` (None: the verifier failed) and `finish`."""
    return [
        dict(
            prompt=_cut(prompt.text),
            answer=_cut(prompt.answer),
            source=prompt.source,
            samples=[
                dict(
                    response=_cut(text_of(sample.completion)),
                    reward=sample.reward if sample.judged else None,
                    finish=sample.completion.finish,
                )
                for sample in each[:MOST_SAMPLES]
            ],
        )
        for prompt, each in list(zip(prompts, answers, strict=True))[:MOST_PROMPTS]
    ]


def _cut(text: str) -> str:
    """The two ends of a long text: an answer stands at the end."""
    if len(text) <= MOST_CHARACTERS:
        return text
    head = MOST_CHARACTERS // 2
    return f"{text[:head]} … {text[-(MOST_CHARACTERS - head) :]}"
