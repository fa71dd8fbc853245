"""Start stock SGLang: `EVENKEEL_API_KEY=… python -m rollout_sglang.server.launch_server <SGLang's own arguments>`.

It is `python -m sglang.launch_server`, except that the API key comes from the environment, because every user of the
machine can read a command line, and that its weights are fenced (rollout_sglang.server.update_fence).
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from precision.text import without
from rollout_sglang.server.parentage import be_a_parent, be_a_spawned_child
from rollout_sglang.server.torch_groups import bind_stores, bound_groups

API_KEY_VARIABLE = "EVENKEEL_API_KEY"
HEALTH_SAMPLES_VARIABLE = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
"""/health says whether the server is up; one that must sample would wait behind a long prefill, and for ever on an
engine that is paused for an update."""
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


def arguments_with_key(argv: Sequence[str]) -> list[str]:
    """`argv` and the key of the environment, which is removed from it."""
    key = os.environ.pop(API_KEY_VARIABLE, "")
    # One word: argparse would take a key that begins with a dash for another option.
    return [*argv, f"--api-key={key}"] if key else list(argv)


def hide_in_logs(secret: str) -> None:
    """From now on, log stars in place of `secret`, here and in forked processes: SGLang logs its arguments."""
    make = logging.getLogRecordFactory()

    def make_without_secret(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        parts = (record.msg, record.args, *(record.args if isinstance(record.args, tuple) else ()))
        if any(without(said, secret) != said for said in map(str, parts)):
            record.msg, record.args = without(record.getMessage(), secret), ()
        return record

    logging.setLogRecordFactory(make_without_secret)


def serve(argv: Sequence[str]) -> None:
    """Run SGLang in this process until it ends, then kill what it left behind."""
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
    """What is changed of SGLang on every device. Call it in each of its processes, before it applies its hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    bound_groups()
    bind_stores()
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", _report_formats, HookType.AROUND)
    HookRegistry.register("sglang.srt.server_args.PortArgs.init_new", note_shared_memory, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.update_weights_from_tensor", finish_copies, HookType.AFTER)


def note_shared_memory(ports: Any, *_: Any, **__: Any) -> None:
    """Leave a file of the name that the server gives its shared memory, among its temporary files: who removes those
    (pipeline.child_process) removes the shared memory. Before 0.5.23 it is named after a socket, which is there."""
    if name := getattr(ports, "instance_id", ""):
        Path(tempfile.gettempdir(), name).touch()


def finish_copies(_: Any, updater: Any, *__: Any, **___: Any) -> None:
    """A rank has begun to copy tensors out of memory that the sender has lent it: wait until it has read them.

    On a GPU copies go on after the calls that begin them. All ranks of an engine meet after this, and then the sender
    is answered, who may write to that memory again.
    """
    import torch  # not before an engine was given tensors

    # All streams: loaders of experts copy in threads of their own.
    torch.get_device_module(updater.device).synchronize()


def _report_formats(*arguments: Any, **options: Any) -> Any:
    from rollout_sglang.server import format_report  # torch: not before somebody asks

    return format_report.handle(*arguments, **options)


if __name__ == "__mp_main__":  # a scheduler, spawned by SGLang
    be_a_spawned_child()
    register_hooks()

if __name__ == "__main__":
    register_hooks()
    serve(sys.argv[1:])
