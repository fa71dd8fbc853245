"""Projections whose rows engines and Megatron stack into one matrix, and how many rows each has. Needs no torch."""

from __future__ import annotations

STACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Name of the stacked matrix in an engine → its parts as Hugging Face names them, in the order of their rows."""


def qkv_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Rows of q, k and v: of a whole layer, or of any share of its heads.

    An engine stacks all of q, then k, then v. Megatron stacks, for each key/value head in turn, the query heads that
    share it, its key and its value: with `num_kv_heads` 1 these are the rows of one such group.
    """
    return num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim
