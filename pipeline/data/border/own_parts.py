"""Parts of rewards that say what failed about a sample. No reward function gives them."""

from __future__ import annotations

VERIFIER_FAILED = "verifier_failed"
"""Of a sample that has no reward."""
TEACHER_FAILED = "teacher_failed"
"""Of a sample that the teacher of a distillation did not score. It may have a reward."""
OWN_PARTS = frozenset((VERIFIER_FAILED, TEACHER_FAILED))
