"""Record the experts of a mixture to which an engine sent each token.

A router's logits are often nearly tied, so a learner whose numbers differ in the last bit sends some tokens to other
experts than the engine did, and their log-probabilities jump. Replaying the engine's choice removes that jump
("Stabilizing MoE reinforcement learning by aligning training and inference routers", R3).

Row i is about the forward pass over token i, whose result predicts token i + 1. A row is *unknown* where the engine
cannot report its choice; there the learner's router decides.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROWS_AT_ONCE = 1 << 13
"""Rows checked together: with 48 layers and 8 experts, 3 MB, and three times as much of temporary memory."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The sizes of a model's mixture that its records depend on."""

    num_layers: int
    """All layers of the model, dense ones included."""
    moe_layers: tuple[int, ...]
    """The layers with experts, ascending, counted from 0."""
    num_experts: int
    """Experts of each layer."""
    per_token: int
    """Experts per token."""
    dtype: np.dtype[np.uint8] | np.dtype[np.uint16] = field(init=False)
    """The smallest dtype for expert numbers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16))


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedExperts:
    """The experts of consecutive tokens: of a sample, or of all samples of a batch."""

    ids: NDArray[np.uint8] | NDArray[np.uint16]
    """[tokens, MoE layers, per_token], distinct within a row; 0 where `known` is False."""
    known: NDArray[np.bool_]
    """[tokens]"""

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.known.shape != self.ids.shape[:1]:
            raise ValueError(
                f"routed experts are {self.ids.shape} with {self.known.shape} marks, expected "
                "[tokens, MoE layers, experts a token] with one mark for each token"
            )

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, tokens: slice | NDArray[np.bool_]) -> RoutedExperts:
        return RoutedExperts(ids=self.ids[tokens], known=self.known[tokens])

    def check(self, num_tokens: int, *, distinct: bool) -> None:
        """Raise ValueError unless each of `num_tokens` tokens has a row: zero if unknown, and of distinct experts if
        known (checked with `distinct`, slow). Memory does not grow with the tokens."""
        if self.ids.dtype not in (np.uint8, np.uint16) or self.known.dtype != np.bool_:
            raise ValueError(
                f"routed_experts is {self.ids.dtype}, marked by {self.known.dtype}; expected uint8 or uint16, and bool"
            )
        if len(self) != num_tokens:
            raise ValueError(f"routed_experts has {len(self)} rows, expected one for each of {num_tokens} tokens")
        for first in range(0, num_tokens, ROWS_AT_ONCE):
            part = self[slice(first, first + ROWS_AT_ONCE)]
            if np.any(part.ids[~part.known]):
                raise ValueError("a row of routed_experts is unknown, but not zero")
            if distinct:
                require_distinct(part.ids[part.known])

    def forget(self, stop: int) -> RoutedExperts:
        """Return these rows with the first `stop` unknown."""
        known = self.known.copy()
        known[:stop] = False
        return RoutedExperts(ids=np.where(known[:, None, None], self.ids, self.ids.dtype.type(0)), known=known)

    @staticmethod
    def unknown(num_tokens: int, shape: ExpertShape) -> RoutedExperts:
        """Return unknown rows."""
        ids = np.zeros((num_tokens, len(shape.moe_layers), shape.per_token), shape.dtype)
        return RoutedExperts(ids=ids, known=np.zeros(num_tokens, np.bool_))

    @staticmethod
    def joined(parts: Sequence[RoutedExperts]) -> RoutedExperts:
        """Concatenate parts of equal layers, experts per token and dtype."""
        return RoutedExperts(
            ids=np.concatenate([part.ids for part in parts]), known=np.concatenate([part.known for part in parts])
        )

    @staticmethod
    def of_all(parts: Sequence[RoutedExperts | None], lengths: Sequence[int]) -> RoutedExperts | None:
        """Concatenate parts, with unknown rows for a part that is None; None when all parts are."""
        given = next((part for part in parts if part is not None), None)
        if given is None:
            return None
        rows = [
            RoutedExperts(ids=np.zeros((n, *given.ids.shape[1:]), given.ids.dtype), known=np.zeros(n, np.bool_))
            if part is None
            else part
            for part, n in zip(parts, lengths, strict=True)
        ]
        return RoutedExperts.joined(rows)


def decode_engine_rows(encoded: str, num_tokens: int, shape: ExpertShape) -> RoutedExperts:
    """Decode SGLang's answer about a sample of `num_tokens` tokens, prompt included, requested from its first token.

    The answer is base64 of little-endian int32 [num_tokens − 1, all layers, per_token]; dense layers hold zeros and are
    left out. Nothing follows the last token, so its row is unknown. Raises ValueError for another size, checked before
    decoding, for text that is not base64, and for experts that do not exist or repeat within a row.
    """
    rows = max(num_tokens - 1, 0)
    expected = 4 * rows * shape.num_layers * shape.per_token
    if len(encoded) != 4 * -(-expected // 3):
        raise ValueError(
            f"{len(encoded)} characters of routed experts for {num_tokens} tokens, expected {4 * -(-expected // 3)}: "
            f"base64 of int32 [{rows}, {shape.num_layers} layers, {shape.per_token} experts]"
        )
    try:
        raw = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"routed experts are not base64: {error}") from None
    if len(raw) != expected:
        raise ValueError(f"{len(raw)} bytes of routed experts for {num_tokens} tokens, expected {expected}")
    rows_of_layers = np.frombuffer(raw, "<i4").reshape(rows, shape.num_layers, shape.per_token)
    chosen = rows_of_layers[:, list(shape.moe_layers)]
    if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < shape.num_experts:
        raise ValueError(
            f"routed experts lie between {chosen.min()} and {chosen.max()}, expected 0 to {shape.num_experts - 1}"
        )
    require_distinct(chosen)
    ids = np.zeros((num_tokens, *chosen.shape[1:]), shape.dtype)
    ids[:rows] = chosen
    return RoutedExperts(ids=ids, known=np.arange(num_tokens) < rows)


def require_distinct(ids: NDArray[np.integer]) -> None:
    """Raise ValueError when a row repeats an expert: a dispatcher would send one copy of the token too few."""
    twice = np.flatnonzero((np.diff(np.sort(ids, axis=-1), axis=-1) == 0).any(axis=(1, 2)))
    if len(twice):
        raise ValueError(f"row {twice[0]} of the routed experts names one expert twice: {ids[twice[0]].tolist()}")


def rows_still_true(
    experts: RoutedExperts, num_prompt: int, versions: Sequence[int] | NDArray[np.integer], num_retractions: int
) -> RoutedExperts:
    """Return the rows that describe the engine's sampling; the others become unknown.

    experts [prompt + response tokens], versions [response tokens] the policy version of each. A retracted request is
    prefilled again, and the routes of that prefill replace those of its sampling (sgl-project/sglang#24001): after a
    weight update, in the rows before the first token of the newest version. A retraction without an update leaves no
    trace of its place, so no row is known then.
    """
    changes = np.flatnonzero(np.diff(np.asarray(versions, np.int64)))
    if num_retractions > len(changes):
        return experts.forget(len(experts))
    if not len(changes):
        return experts
    # The forward pass over the token before predicted the first token of the newest version.
    return experts.forget(num_prompt + int(changes[-1]))
