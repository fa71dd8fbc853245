"""Damage to a run directory: what is damaged, what becomes of it, and the record of that."""
