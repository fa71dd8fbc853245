"""Define the objectives, a family in each file; `base` defines their interface."""
