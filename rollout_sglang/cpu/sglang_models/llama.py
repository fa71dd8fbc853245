"""LlamaForCausalLM, as SGLang implements it."""

from sglang.srt.models.llama import LlamaForCausalLM

EntryClass = LlamaForCausalLM
