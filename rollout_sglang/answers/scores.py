"""Log-probabilities of a prompt's tokens, from the answer of an engine that scored them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch_values import HIGHEST_LOGPROB, as_float32
from pipeline.errors import BadAnswerError
from rollout_sglang.protocol import Generated

_WHOLE = 1e-3
"""How far the probabilities of a whole distribution may be from 1 in all."""


def input_logprobs(row: Sequence[int], sample: Generated) -> NDArray[np.float32]:
    """[n - 1] of tokens 1 … n - 1. Raises BadAnswerError. Nobody sampled these tokens: one may be as unlikely as
    float32 can say."""
    scored = sample.meta_info.input_token_logprobs or []
    # SGLang names the last id of the vocabulary 0 here (it clips the ids of image tokens), yet scores the real one.
    foreign = sum(named not in (token, 0) for token, (_, named, _) in zip(row, scored, strict=False))
    values = [value for value, _, _ in scored[1:] if value is not None]
    if foreign or len(scored) != len(row) or len(values) != len(row) - 1:
        raise BadAnswerError(f"it scored {len(values)} of {len(row) - 1} tokens, {foreign} of them others than asked")
    found = as_float32(values)
    if not np.all(np.isfinite(found) & (found <= HIGHEST_LOGPROB)):
        raise BadAnswerError(
            f"it scored a token by {found[~(np.isfinite(found) & (found <= HIGHEST_LOGPROB))][0]:g}, expected a "
            "log-probability"
        )
    return found


def tempered_totals(
    row: Sequence[int], sample: Generated, temperature: float, kept: Sequence[NDArray[np.int32]]
) -> NDArray[np.float64]:
    """For each of tokens 1 … n-1, log sum p^(1/T) over the distribution from which it came, or what was kept of it."""
    distributions = (sample.meta_info.input_top_logprobs or [])[1:]
    if len(distributions) != len(row) - 1 or not all(distributions):
        raise BadAnswerError(f"it gave {len(distributions)} of {len(row) - 1} distributions")
    totals = []
    for place, distribution in enumerate(distributions):
        answered = [(value, token) for value, token, _ in distribution or () if value is not None]
        logprobs = np.array([value for value, _ in answered], np.float64)
        with np.errstate(over="ignore"):
            whole = float(np.exp(logprobs).sum())
        if not abs(whole - 1.0) <= _WHOLE:
            raise BadAnswerError(
                f"it gave distributions of {whole:.4g} in all, expected 1; start it with a larger limit for "
                "top_logprobs_num"
            )
        if kept and len(kept[place]):
            logprobs = logprobs[np.isin([token for _, token in answered], kept[place])]
        totals.append(np.logaddexp.reduce(logprobs / temperature))
    return np.array(totals)
