"""Imports Megatron-Core once, quietly: it warns about packages that a CPU does not have, and warnings are errors."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mbridge.core.llm_bridge  # noqa: F401
