"""Objectives: what one optimizer step minimizes. One file each; `base` says what they take and return."""

from precision.corrections.corrected import Corrected
from precision.objectives.base import Objective, Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.cispo import CISPO
from precision.objectives.clipped import Clipped
from precision.objectives.decoupled import Decoupled
from precision.objectives.dppo_tv import DPPOTV
from precision.objectives.gspo import GSPO
from precision.objectives.m2po import M2PO
from precision.objectives.mu_grpo import MuGRPO
from precision.objectives.p3o import P3O
from precision.objectives.p4o import P4O
from precision.objectives.supervised import Supervised
from precision.objectives.topr import TOPR

__all__ = [
    "CISPO",
    "DPPOTV",
    "GSPO",
    "M2PO",
    "P3O",
    "P4O",
    "TOPR",
    "Clipped",
    "Corrected",
    "Decoupled",
    "MuGRPO",
    "Objective",
    "Prepared",
    "ScoredStep",
    "StepContext",
    "Supervised",
    "TokenBatch",
]
