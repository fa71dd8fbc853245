"""No process of an engine outlives its server.

SGLang's schedulers ask the kernel to end them with their parent, but a parent that died before they asked is missed:
with spawn that is after seconds of imports, and what stays behind holds the memory of a GPU. Each process here tells
its children by the environment who it is, and each child compares. Needs the standard library and ours alone.
"""

from __future__ import annotations

import os
import threading

from pipeline.child_process import die_with_parent

PARENT_VARIABLE = "EVENKEEL_SERVER_PARENT"
"""The process that spawns or forks those that read it."""
_forking_in_main: list[bool] = [False]


def be_a_parent() -> None:
    """Call it in the server's first process: children that it forks or spawns from now on die with it, and theirs with
    them."""
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.register_at_fork(before=_before_fork, after_in_child=_in_forked_child)


def be_a_spawned_child() -> None:
    """Call it first in a child that multiprocessing has spawned."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None:
        die_with_parent(int(parent))
    be_a_parent()


def _before_fork() -> None:
    # The kernel watches the thread that forks: a child of a thread that ends would be ended.
    _forking_in_main[0] = threading.current_thread() is threading.main_thread()


def _in_forked_child() -> None:
    if _forking_in_main[0]:
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
