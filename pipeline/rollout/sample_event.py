"""What the event `sampled` says: one sample of a batch, short, as text that no terminal obeys."""

from __future__ import annotations

from typing import Any

from pipeline.data.records import Prompt, Sample
from precision.text.short import one_line

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
