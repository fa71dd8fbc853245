"""Imports Megatron-Core once, quietly."""

from tests.support import quiet_megatron  # noqa: F401
