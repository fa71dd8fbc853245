"""Megatron-Core is imported before the tests of this folder."""

from tests.support import quiet_megatron  # noqa: F401
