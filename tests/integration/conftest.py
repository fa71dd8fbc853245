"""Third-party warnings of imports; everything of ours stays an error."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron_bridge.learner  # noqa: F401 (imported here so that its dependencies' warnings are not ours)
