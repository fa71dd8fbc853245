"""The fixed bins in which log-ratios are counted. No torch here: reports are drawn where it is not installed."""

from __future__ import annotations

_MAGNITUDES = tuple(10.0 ** (quarter / 4) for quarter in range(-20, 5))
"""1e-5 to 10, four a decade: from float32 noise to a token the learner would hardly ever sample."""

LOG_RATIO_EDGES: tuple[float, ...] = (*(-magnitude for magnitude in reversed(_MAGNITUDES)), *_MAGNITUDES)
"""Symmetric bin edges of log pi_learner - log pi_engine (nats), ascending. Bin i holds edges[i-1] <= l < edges[i]:
bin 0 is everything below the first edge, the last bin everything from the last edge up."""

NUM_LOG_RATIO_BINS = len(LOG_RATIO_EDGES) + 1
"""Bins with the under- and overflow bins; the one in the middle holds log-ratios around zero."""
