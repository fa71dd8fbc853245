"""The ESS controller in a run: its records, which every process reads, and its place in the learner's loop."""
