"""Qwen3MoeForCausalLM, as SGLang implements it."""

from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

EntryClass = Qwen3MoeForCausalLM
