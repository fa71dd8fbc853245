"""What a user is told when a child process dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.run.processes import log_tail

TORCHRUN = """\
[rank1]:   File "model.py", line 3, in forward
[rank1]: ValueError: weights are not finite
E1121 05:54:32 api.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : 1 (pid: 27060)
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TORCHRUN, "[rank1]: ValueError: weights are not finite"),
        ("loading\nerror: the model folder is gone\nbye\n", "error: the model folder is gone"),
        ("KeyError: 'a'\nduring that, another:\nmegatron.core.CheckpointingException: no such key\n",
         "megatron.core.CheckpointingException: no such key"),
        ("one\n\ntwo\nkilled\n", "one | two | killed"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_reason_is_found_among_the_noise(tmp_path: Path, text: str, told: str) -> None:
    log = tmp_path / "learner.log"
    log.write_text(text)
    assert log_tail(log) == told


def test_a_log_that_was_never_written(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "none.log") == "(no log)"
