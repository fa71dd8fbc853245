"""Objectives: what one optimizer step minimizes. One file each; `base` says what they take and return."""

from precision.objectives.base import Objective, StepContext, TokenBatch
from precision.objectives.cispo import CISPO
from precision.objectives.clipped import Clipped
from precision.objectives.p3o import P3O
from precision.objectives.supervised import Supervised

__all__ = ["CISPO", "P3O", "Clipped", "Objective", "StepContext", "Supervised", "TokenBatch"]
