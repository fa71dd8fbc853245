"""Processes are found by whole words, and one that has ended stops nobody."""

from __future__ import annotations

import sys
import time

import psutil

from tests.support.processes import with_words


def test_found_by_words_beside_one_that_has_ended() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", "--port", "30000"]
    with psutil.Popen(command) as ended, psutil.Popen(command) as running:
        try:
            ended.kill()
            while ended.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            dead = psutil.Process(ended.pid)
            ended.wait()
            both = [dead, psutil.Process(running.pid)]
            assert with_words(both, " --port 30000 ") == both[1:]
            assert with_words(both, " --port 3000 ") == []
        finally:
            running.kill()
