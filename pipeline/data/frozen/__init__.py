"""What a run has once and for all: the format of its directory, and the recipes that it went by."""
