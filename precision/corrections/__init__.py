"""Corrections for an engine that samples from another distribution than the learner's. One file each.

A correction looks at a whole scored step and answers with a factor on the advantage of every token, from

    k_t = pi_prox(y_t) / pi_engine(y_t),

with pi_prox the learner's own policy when its stage began. It belongs to objectives whose ratio is pi / pi_prox: one
that divides by the engine's probability has k in its ratio already, and would count it twice. OPSM is the exception;
it only drops. No factor touches the denominator of the loss: what is dropped still counts as a token.
"""

from precision.corrections.corrected import Correction
from precision.corrections.icepop import IcePop
from precision.corrections.mis import MIS
from precision.corrections.opsm import OPSM
from precision.corrections.rejection import Rejection
from precision.corrections.tis import TIS

__all__ = ["MIS", "OPSM", "TIS", "Correction", "IcePop", "Rejection"]
