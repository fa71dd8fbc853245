"""Start stock SGLang: `EVENKEEL_API_KEY=… python -m rollout_sglang.stock_server <SGLang's own arguments>`.

Exactly `python -m sglang.launch_server`, with two differences: the API key comes from the environment, because argv
is readable by every user of the machine, and the server ends when the process that started it ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

API_KEY_VARIABLE = "EVENKEEL_API_KEY"
PARENT_VARIABLE = "EVENKEEL_PARENT_PID"
"""Set by whoever starts a server and wants it to end with itself."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent named in the environment dies, so that no engine outlives a killed
    supervisor. A server that was started by hand goes on.

    Linux only, elsewhere nothing happens. The kernel watches the parent's *thread*: a supervisor must start engines
    from a thread that lives as long as they should.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if sys.platform != "linux" or not parent:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        # The parent died before the kernel knew that we care.
        os.kill(os.getpid(), signal.SIGKILL)


def arguments_with_key(argv: Sequence[str]) -> list[str]:
    """`argv` and the key of the environment, which is removed from it."""
    key = os.environ.pop(API_KEY_VARIABLE, "")
    # One word: argparse would take a key that begins with a dash for another option.
    return [*argv, f"--api-key={key}"] if key else list(argv)


def serve(argv: Sequence[str]) -> None:
    """Run SGLang in this process until it ends, then kill what it left behind."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    # SGLang logs all of its arguments.
    HookRegistry.register("sglang.srt.entrypoints.engine._server_args_for_logging", _without_keys, HookType.AFTER)
    load_plugins()
    try:
        run_server(prepare_server_args(arguments_with_key(argv)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _without_keys(arguments: dict[str, object], *_: object) -> dict[str, object]:
    return {key: "***" if "api_key" in key and value else value for key, value in arguments.items()}


if __name__ == "__main__":
    die_with_parent()
    serve(sys.argv[1:])
