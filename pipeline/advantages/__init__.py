"""Advantages that compare the samples of one prompt (its group), and what they weigh.

base           what every advantage takes, returns and states about itself
methods/       one file a method: its settings and its formula
groups         the statistics of ragged groups
weight_curves  how much weight a method puts on successes and failures, by solve rate
overlong       what a response loses by being long (DAPO)
compute        from a batch to what each token is trained with
aggregation    from one advantage a sample to one a token
"""
