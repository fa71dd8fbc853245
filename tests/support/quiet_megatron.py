"""Imports Megatron-Core once, quietly: it warns about packages that a CPU does not have, and warnings are errors.

It comes by way of our own package, so that it is what a learner imports (megatron_bridge).
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron_bridge.learner  # noqa: F401
