"""The learner on Megatron-Core, and the sending side of the weight channel."""

import os
import warnings

from megatron_bridge.megatron_imports import import_less

import_less()

# Megatron-Core says so on every import; `model.choose_layers` decides what is built.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")

# Read by Transformer Engine when it is imported: scales of 128×128 blocks as engines have them, amax / 448, instead of
# the next power of two, so that learner.precision fp8_block multiplies by the weights that rollouts multiply by, where
# its blocks are theirs.
os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
