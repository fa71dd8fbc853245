"""Qwen2ForCausalLM, as SGLang implements it."""

from sglang.srt.models.qwen2 import Qwen2ForCausalLM

EntryClass = Qwen2ForCausalLM
