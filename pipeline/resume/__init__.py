"""Going on with a run: what a later start may change, and a new run from a checkpoint of an old one."""
