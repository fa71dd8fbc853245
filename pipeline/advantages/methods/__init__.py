"""One file an advantage.

With r the reward, r̄ the mean and s the standard deviation of the group:

    grpo        (r - r̄) / (s + 1e-6)                               DeepSeekMath, arXiv 2402.03300
    dr_grpo     r - r̄                                              arXiv 2503.20783
    rloo        r - mean of the others                              arXiv 2402.14740
    maxrl       (r - r̄) / r̄                                        arXiv 2602.02710
    pass_at_k   unbiased gradient of pass@k, leave-one-out baseline  arXiv 2505.15201
    f_grpo      grpo × (1 - r̄)^gamma                               arXiv 2602.06717
    asym_grpo   r - r̄, divided by delta where negative             a probe of FADE's paper, arXiv 2607.01490
    power       (1 - r̄)^(alpha - 1) × asym_grpo                    the same; FADE at one moment
    fade        power, whose alpha and delta follow the run         arXiv 2607.01490

grpo, dr_grpo, rloo and asym_grpo take rewards of any kind. The others are defined by a solve rate: maxrl, f_grpo, power
and fade read rewards clipped to [0, 1], so that {0, 1} and {-1, 1} are the same and partial credit stays partial;
pass_at_k counts a sample as solved from SOLVED_REWARD on. A group of equal rewards, and a group of one, says nothing:
its advantages are exactly 0.
"""
