"""One file an advantage; `pipeline.advantages.base` says what each takes, returns and states about itself.

r is the reward and r̄ the mean of its group throughout. Some formulas take rewards of any kind. Those that are defined
by a solve rate read rewards clipped to [0, 1], so that {0, 1} and {-1, 1} are the same and partial credit stays
partial. A group of equal rewards, and a group of one, says nothing: its advantages are exactly 0.
"""
