"""Keep the ESS of a run's batches above a floor at the least cost: statistics in, decisions out. Loads no torch."""
