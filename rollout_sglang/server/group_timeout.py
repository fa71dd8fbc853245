"""An engine gives up a broadcast whose sender is gone without a word.

SGLang joins a sender's process group with torch's own timeout, half an hour. So long would an engine wait for a learner
whose host was frozen or switched off in the middle of a publish, and take nothing from its successor. On a CPU the call
fails then and the engine goes on; with NCCL torch ends the engine's process, which is started again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

GROUP_TIMEOUT_S = 75.0
"""A little more than a sender waits for one bucket (megatron_bridge.weight_sync.transport.BUCKET_DEADLINE_S)."""


def bound_groups() -> None:
    """Call it in each process of an engine, before SGLang applies its hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.common.init_custom_process_group", _with_timeout, HookType.BEFORE)


def _with_timeout(*arguments: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, {"timeout": timedelta(seconds=GROUP_TIMEOUT_S)} | options
