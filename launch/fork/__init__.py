"""`evenkeel fork`: a new run from a checkpoint of an old one."""
