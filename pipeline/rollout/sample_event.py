"""What is kept of samples as text: the event `sampled`, one sample of a batch, short, as text that no terminal obeys;
and some answers of each evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.data.batch import Completion, Prompt, Sample
from precision.text import one_line

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
