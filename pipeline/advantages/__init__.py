"""Compute the advantages of samples within their group (prompt): `methods` has the formulas, `compute` applies them."""
