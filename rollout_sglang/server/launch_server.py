"""Start stock SGLang: `EVENKEEL_API_KEY=… python -m rollout_sglang.server.launch_server <SGLang's own arguments>`.

It is `python -m sglang.launch_server` with the API key from the environment, because every user of the machine can read
a command line, and with fenced weight updates (rollout_sglang.server.update_fence). In addition:

No process of an engine outlives its server. SGLang's schedulers ask the kernel to end them with their parent, but miss
a parent that dies before they ask: spawned processes ask after seconds of imports, and a survivor holds GPU memory.
Here each process passes its id to its children through the environment, and each child compares it with its parent's.

An engine gives up a broadcast whose sender has vanished. SGLang joins a sender's process group with torch's timeout of
half an hour, and would take nothing meanwhile from the successor of a learner whose host froze. On a CPU the call fails
and the engine goes on; with NCCL, torch ends the engine's process, which is then restarted.

The ranks of an engine meet at one address only. SGLang's scheduler makes a torch store for them that listens at all
addresses of the machine, at PORT + 100 … 1000 of its HTTP port. Here the socket is bound at the address that the ranks
are given. An engine of one rank takes any free port, and so never the port that another engine was promised.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipeline.child_process import die_with_parent

API_KEY_VARIABLE = "EVENKEEL_API_KEY"
HEALTH_SAMPLES_VARIABLE = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
"""Whether /health samples a token. Without sampling it only says that the server is up; with sampling it would wait
behind a long prefill, and forever on an engine that is paused for an update."""
PARENT_VARIABLE = "EVENKEEL_SERVER_PARENT"
"""The id of the process that spawns or forks the readers of the variable."""
GROUP_TIMEOUT_S = 75.0
"""A little more than a sender waits for one bucket (megatron_bridge.weight_sync.transport.BUCKET_DEADLINE_S)."""
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_MEMORY = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_PARTS = ("weights", "kv_cache", "cuda_graph")
"""What SGLang releases and resumes (srt/constants.py)."""
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


def arguments_with_key(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the key of the environment, and remove the key from the environment."""
    key = os.environ.pop(API_KEY_VARIABLE, "")
    # One word: argparse would take a key that begins with a dash for another option.
    return [*argv, f"--api-key={key}"] if key else list(argv)


def hide_in_logs(secret: str) -> None:
    """Log stars in place of `secret` from now on, here and in forked processes: SGLang logs its arguments."""
    from precision.text import without  # needs PyYAML: every SGLang has it, an interpreter without SGLang may not

    make = logging.getLogRecordFactory()

    def make_without_secret(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        parts = (record.msg, record.args, *(record.args if isinstance(record.args, tuple) else ()))
        if any(without(said, secret) != said for said in map(str, parts)):
            record.msg, record.args = without(record.getMessage(), secret), ()
        return record

    logging.setLogRecordFactory(make_without_secret)


def serve(argv: Sequence[str]) -> None:
    """Run SGLang in this process until it ends, then kill its remaining processes."""
    be_a_parent()
    os.environ[HEALTH_SAMPLES_VARIABLE] = "false"
    key = os.environ.get(API_KEY_VARIABLE)
    arguments = arguments_with_key(argv)
    if key:
        hide_in_logs(key)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from rollout_sglang.server.update_fence import check_arguments, install

    load_plugins()
    server_args = prepare_server_args(arguments)
    check_arguments(server_args)
    install(key)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def register_hooks() -> None:
    """Register the changes to SGLang for every device. Call it in each SGLang process, before SGLang applies hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    timeout = {"timeout": timedelta(seconds=GROUP_TIMEOUT_S)}
    HookRegistry.register(
        "sglang.srt.utils.common.init_custom_process_group",
        lambda *arguments, **options: (arguments, timeout | options),
        HookType.BEFORE,
    )
    # Private (torch 2.13). Where torch lacks it, SGLang logs that the hook failed and listens at all addresses.
    HookRegistry.register("torch.distributed.rendezvous._create_c10d_store", _bound, HookType.AROUND)
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", _report_formats, HookType.AROUND)
    HookRegistry.register(f"{_RUNNER}.init_cuda_graphs", _captured, HookType.AFTER)
    for name, hook in (("release", _release), ("resume", _resume)):
        HookRegistry.register(f"{_MEMORY}.{name}_memory_occupation", hook, HookType.AROUND)
    HookRegistry.register("sglang.srt.server_args.PortArgs.init_new", note_shared_memory, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.update_weights_from_tensor", finish_copies, HookType.AFTER)


def note_shared_memory(ports: Any, *_: Any, **__: Any) -> None:
    """Leave a file with the name of the server's shared memory among its temporary files: removing those
    (pipeline.child_process) then removes the memory too. Before 0.5.23 a socket in the folder has the memory's name."""
    if name := getattr(ports, "instance_id", ""):
        Path(tempfile.gettempdir(), name).touch()


def finish_copies(_: Any, updater: Any, *__: Any, **___: Any) -> None:
    """Wait until a rank has read the tensors in memory that the sender lent it. On a GPU, copies go on after the calls
    that begin them return. After this hook all ranks of an engine meet, and then the sender may reuse the memory."""
    import torch  # imported only once an engine receives tensors

    # All streams: loaders of experts copy in separate threads.
    torch.get_device_module(updater.device).synchronize()


def _report_formats(*arguments: Any, **options: Any) -> Any:
    from rollout_sglang.server import format_report  # imports torch: only on request

    return format_report.handle(*arguments, **options)


def _release(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    return _change_memory(original, manager, request, released=False)


def _resume(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    return _change_memory(original, manager, request, released=True)


def _change_memory(original: Callable[..., Any], manager: Any, request: Any, *, released: bool) -> Any:
    """Release or resume the asked parts that are not in that state yet: a learner that was killed cannot know what its
    predecessor had done, and SGLang's scheduler dies of a part that is released or resumed twice."""
    parts = [part for part in request.tags or _PARTS if (part in manager.offload_tags) == released]
    if not parts:
        name = f"{'Resume' if released else 'Release'}MemoryOccupationReqOutput"
        return getattr(importlib.import_module("sglang.srt.managers.io_struct"), name)()
    request.tags = parts
    return original(manager, request)


def _captured(*arguments: Any, **options: Any) -> None:
    from rollout_sglang.server import format_report

    format_report.note_addresses(*arguments, **options)


def be_a_parent() -> None:
    """Make later children, forked or spawned, die with this process. Call it in the server's first process."""
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    forks_in_main = [False]

    def before() -> None:
        # The kernel watches the forking thread: it would end a child when the thread ends.
        forks_in_main[0] = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if forks_in_main[0]:
            die_with_parent(int(os.environ[PARENT_VARIABLE]))
        os.environ[PARENT_VARIABLE] = str(os.getpid())

    os.register_at_fork(before=before, after_in_child=in_child)


def be_a_spawned_child() -> None:
    """Make this process die with its parent. Call it first in a child that multiprocessing has spawned."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None:
        die_with_parent(int(parent))
    be_a_parent()


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


if __name__ == "__mp_main__":  # a scheduler, spawned by SGLang
    be_a_spawned_child()
    register_hooks()

if __name__ == "__main__":
    register_hooks()
    serve(sys.argv[1:])
