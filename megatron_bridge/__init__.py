"""The learner on Megatron-Core, and the sending side of the weight channel."""

import warnings

# Megatron-Core says so on every import; `model.uses_transformer_engine` decides what is built.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")
