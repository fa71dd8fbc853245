"""Evaluate held-out prompts: pass@k with its uncertainty, rewards, and kept responses, from n samples of each prompt.

A sample whose verifier failed is neither right nor wrong: no estimate counts it, and `verifier_failures` does.
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
"""The share of an estimate's prompts that may have fewer than k samples with a verdict."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of k samples, drawn without replacement from n, is correct. 1 - C(n - c, k) /
    C(n, k), unbiased (Chen et al. 2021, arXiv 2107.03374), as a product of factors n - c + 1 … n so that no binomial
    overflows. Raises ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n."""
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_correct} correct among {num_samples} is undefined, expected 1 ≤ k ≤ samples"
        )
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def evaluate(answers: Sequence[Sequence[Sample]], solved_at: float = SOLVED_REWARD) -> dict[str, Any]:
    """Return the scores of all prompts, with equally many samples each, as plain values for a file: `prompts`,
    `samples` of each, `correct` and `judged` [prompts], and the results of `summarize` and `rewards`."""
    judged = [[sample for sample in each if sample.judged] for each in answers]
    correct, known = (
        [int(is_solved([sample.reward for sample in each], solved_at).sum()) for each in judged],
        [len(each) for each in judged],
    )
    samples = max(map(len, answers), default=0)
    counts = dict(prompts=len(answers), samples=samples, correct=correct, judged=known)
    return counts | summarize(correct, known) | rewards([sample for each in answers for sample in each])


def answered_by(answers: Sequence[Sequence[Sample]], due: int) -> dict[str, Any]:
    """Return `version`: `due` where that version made all tokens. Otherwise it is the version of the median token, and
    `due` and `answered`, [[version, response tokens], …] ascending, are there too."""
    samples = [sample for each in answers for sample in each]
    rows = [*(sample.completion for sample in samples), *(row.completion for one in samples for row in one.branches)]
    versions = np.concatenate([np.zeros(0, np.int32), *(row.versions for row in rows)])
    if (versions == due).all():
        return dict(version=due)
    counts = [
        [int(version), int(count)] for version, count in zip(*np.unique(versions, return_counts=True), strict=True)
    ]
    median = int(np.quantile(versions, 0.5, method="inverted_cdf"))
    return dict(version=median, due=due, answered=counts)


def summarize(num_correct: Sequence[int], num_judged: Sequence[int]) -> dict[str, Any]:
    """Return `pass_at_1` with its 95 % bounds `pass_at_1_low` and `pass_at_1_high`, and `pass_at_k`: {"1": …, "2": …,
    "4": …} up to the most samples of a prompt; from the correct and the judged samples of each prompt.

    Means over the prompts with a judged sample, the same for every k; empty where there is none. A prompt with fewer
    than k judged samples counts with all of them, at most its pass@k; a k for which more than MOST_SHORT of the prompts
    are short is left out. Raises ValueError without prompts.
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
    """Return the 95 % Wilson interval for pass@1 from each prompt's correct and judged samples, at least one of each.

    Samples of a prompt are correlated, so there are fewer than prompts × samples independent trials. Wilson's formula
    gets the effective number of trials, p (1 - p) / var(mean), with the variance between prompts (Kish's design
    effect); it lies between the numbers of prompts and samples. Unlike a bootstrap it needs no random numbers, and it
    keeps a width when all samples agree.
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
    """Return `reward_mean`, `reward_parts` {part: mean over the samples that have it} and `verifier_failures`. Samples
    whose verifier failed count only in the last; where no others are left there is no mean."""
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
    """Return for each source `prompts`, `verifier_failures` and, where a sample has a reward, `pass_at_1` and
    `reward_mean`; from the source and the samples of each prompt."""
    found: dict[str, dict[str, float]] = {}
    for source in dict.fromkeys(sources):
        own = [each for name, each in zip(sources, answers, strict=True) if name == source]
        told = evaluate(own, solved_at)
        names = ("prompts", "pass_at_1", "reward_mean", "verifier_failures")
        found[source] = {name: told[name] for name in names if name in told}
    return found


_PROMPT, _RESPONSE = 300, 600
"""Characters kept of a prompt, and of a response, in a logged sample."""


def told_of(prompt: Prompt, sample: Sample, text: str) -> dict[str, Any]:
    """Return a sample for the event log: `group`, `prompt`, `response` (`text`), `reward` (None: its verifier failed),
    `reward_parts`, `finish` and `response_tokens`; of an episode also `turns`, `tool_calls` and `stopped`."""
    facts = sample.episode
    of_episode: dict[str, Any] = {}
    if facts is not None:
        of_episode = dict(turns=facts.turns, tool_calls=facts.tool_calls, stopped=facts.stopped.name.lower())
    return dict(
        group=prompt.group,
        prompt=one_line(prompt.text, _PROMPT),
        response=one_line(text, _RESPONSE),
        reward=sample.reward if sample.judged else None,
        reward_parts=dict(sample.reward_parts) if sample.judged else {},
        finish=sample.rows(prompt)[-1].completion.finish,
        response_tokens=sample.answer_tokens,
        **of_episode,
    )


MOST_PROMPTS, MOST_SAMPLES, MOST_CHARACTERS = 8, 4, 4_000
"""Limits of the responses kept of an evaluation: first prompts, first samples of each, characters of each text."""


def kept_responses(
    prompts: Sequence[Prompt], answers: Sequence[Sequence[Sample]], text_of: Callable[[Completion], str]
) -> list[dict[str, Any]]:
    """Return for the first held-out prompts, the same in every evaluation: `prompt`, `answer`, `source` and the first
    `samples` with `response`, `reward` (None: the verifier failed) and `finish`."""
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
    """Return the two ends of a long text: an answer stands at the end."""
    if len(text) <= MOST_CHARACTERS:
        return text
    head = MOST_CHARACTERS // 2
    return f"{text[:head]} … {text[-(MOST_CHARACTERS - head) :]}"
