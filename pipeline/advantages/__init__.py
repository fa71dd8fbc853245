"""Advantages that compare the samples of one prompt (its group): `methods` has the formulas, `compute` applies one."""
