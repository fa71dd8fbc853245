"""Start stock SGLang: `EVENKEEL_API_KEY=… python -m rollout_sglang.server.launch_server <SGLang's own arguments>`.

Exactly `python -m sglang.launch_server`, with two differences: the API key comes from the environment, because argv
is readable by every user of the machine, and the server ends when the process that started it ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

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


def hide_in_logs(secret: str) -> None:
    """Stars for `secret` in whatever this process, and what it forks, logs from now on: SGLang logs its arguments."""
    make = logging.getLogRecordFactory()

    def make_without_secret(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if secret in str(record.msg) or secret in str(record.args):
            record.msg, record.args = record.getMessage().replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(make_without_secret)


def serve(argv: Sequence[str]) -> None:
    """Run SGLang in this process until it ends, then kill what it left behind."""
    key = os.environ.get(API_KEY_VARIABLE)
    arguments = arguments_with_key(argv)
    if key:
        hide_in_logs(key)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    die_with_parent()
    serve(sys.argv[1:])
