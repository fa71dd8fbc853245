"""Corrections for an engine that samples from another distribution than the learner's; `base` says what each states.

A correction looks at a whole scored step and answers with a factor on the advantage of every token, from

    k_t = pi_old(y_t) / pi_engine(y_t),

with pi_old the learner's own policy before the first of several updates. It belongs to objectives whose ratio is
pi / pi_old: one that divides by the engine's probability has k in its ratio already, and would count it twice. OPSM is
the exception; it only drops. No factor touches the denominator of the loss: what is dropped still counts as a token.
"""
