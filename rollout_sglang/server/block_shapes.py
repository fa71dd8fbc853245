"""Whether a model can be served in 128×128 block FP8, known before any engine starts.

SGLang fuses q, k and v into one matrix, and gate and up into another. A block must not straddle two of the fused
parts (`Fp8LinearMethod.validate_block_quant_shapes`), and the GPU kernels quantize activations in whole groups of 128
channels; so every width below, after tensor parallelism has cut it, must be a multiple of 128. The vocabulary and the
number of layers are free: embeddings and the head stay in full precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import ModelError

BLOCK_CHANNELS = 128


def check_block_shapes(hf_config: Mapping[str, Any], tensor_parallel: int = 1) -> None:
    """Check the content of a `config.json`. Raises ModelError naming every width that block FP8 cannot cut."""
    hidden = int(hf_config["hidden_size"])
    heads = int(hf_config["num_attention_heads"])
    kv_heads = int(hf_config.get("num_key_value_heads") or heads)
    head_dim = int(hf_config.get("head_dim") or hidden // heads)
    # Newer transformers releases write the number of experts under the second name.
    experts = hf_config.get("num_experts") or hf_config.get("num_local_experts")
    inner = "moe_intermediate_size" if experts else "intermediate_size"
    widths = {
        "hidden_size": hidden,
        "num_attention_heads × head_dim / tensor_parallel": heads * head_dim // tensor_parallel,
        # With more ranks than key-value heads, SGLang gives each rank a copy of one head.
        "num_key_value_heads × head_dim / tensor_parallel": max(1, kv_heads // tensor_parallel) * head_dim,
        f"{inner} / tensor_parallel": int(hf_config[inner]) // tensor_parallel,
    }
    wrong = [f"{name} = {width}" for name, width in widths.items() if width % BLOCK_CHANNELS]
    if wrong:
        raise ModelError(
            f"fp8_block needs multiples of {BLOCK_CHANNELS}, but {', '.join(wrong)}; use rollout.precision bf16 (on "
            "a CPU fp8_tensor too), a smaller rollout.tensor_parallel, or another model"
        )
