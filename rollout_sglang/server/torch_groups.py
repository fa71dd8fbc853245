"""What is changed of torch's process groups in an engine: how long they wait, and where they listen.

An engine gives up a broadcast whose sender is gone without a word. SGLang joins a sender's process group with torch's
own timeout, half an hour. So long would an engine wait for a learner whose host was frozen or switched off in the
middle of a publish, and take nothing from its successor. On a CPU the call fails then and the engine goes on; with NCCL
torch ends the engine's process, which is started again.

The ranks of an engine meet at one address, not at every address of the machine. A scheduler of SGLang makes a torch
store for them: at PORT + 100 … 1000 of its HTTP port, on all addresses, open to whoever reaches it. The one that makes
it binds the socket here, at the address that its ranks are told. An engine of one rank needs no port that others know:
it takes a free one, so it never has the port that another engine was promised.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
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


def bind_stores() -> None:
    """Call it in each process of an engine, before SGLang applies its hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Private (torch 2.13). With a release that has none SGLang logs that a hook failed, and listens as before.
    HookRegistry.register("torch.distributed.rendezvous._create_c10d_store", _bound, HookType.AROUND)


def _bound(
    original: Callable[..., Any],
    hostname: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: Any,
    *arguments: Any,
    **options: Any,
) -> Any:
    if rank != 0:
        return original(hostname, port, rank, world_size, timeout, *arguments, **options)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family, _, _, _, place = socket.getaddrinfo(hostname, port if world_size > 1 else 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
        bound = listener.getsockname()[1]
        own = listener.detach()
    return TCPStore(
        hostname, bound, world_size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=own
    )
