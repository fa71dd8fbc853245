"""What a user is told when a process dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import child_process
from pipeline.child_process import log_text
from pipeline.process_log import ending, first_error, log_tail

TORCHRUN = """\
[rank1]:   File "model.py", line 3, in forward
[rank1]: ValueError: weights are not finite
E1121 05:54:32 api.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : 1 (pid: 27060)
"""

RANK_KILLED = """\
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:4711
W1122 18:00:22 api.py:1002] Sending process 24458 closing signal SIGTERM
[1]:
  rank      : 0 (local_rank: 0)
  traceback : Signal 15 (SIGTERM) received by PID 24458
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 24459)  (SIGKILL)
  traceback : Signal 9 (SIGKILL) received by PID 24459
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (RANK_KILLED, "rank 1 was killed by signal 9 (SIGKILL)"),
        (TORCHRUN, "[rank1]: ValueError: weights are not finite"),
        ("loading\nerror: the model folder is gone\nbye\n", "error: the model folder is gone"),
        ("KeyError: 'a'\nduring that, another:\nmegatron.core.CheckpointingException: no such key\n",
         "megatron.core.CheckpointingException: no such key"),
        ("[rank0]: KeyboardInterrupt\nbye\n", "[rank0]: KeyboardInterrupt"),
        ("usage: role [--help]\nrole: error: unrecognized: --x\n", "role: error: unrecognized: --x"),
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


SGLANG = """\
[2026-11-22 17:00:01] server_args=ServerArgs(model_path='/m', log_level='error')
[2026-11-22 17:00:02] Ignore import error when loading sglang.srt.models.x: No module named 'y'
INFO:     Waiting for application startup.
ERROR:    [Errno 98] bind on ('127.0.0.1', 30000): address already in use
[2026-11-22 17:00:12] post-warmup freeze_gc failed
Traceback (most recent call last):
requests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1', port=30000): Read timed out. (read timeout=10)
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            SGLANG,
            "ERROR:    [Errno 98] bind on ('127.0.0.1', 30000): address already in use",
        ),
        (
            "[2026-11-22 TP0] hit an exception: Traceback\nValueError: head\nSystemExit: 1\n",
            "ValueError: head",
        ),
        (
            "launch_server.py: error: unrecognized: --x",
            "launch_server.py: error: unrecognized: --x",
        ),
        (
            "AttributeError: module 'sglang.srt.x' has no attribute 'y'\nerror: SGLang needs dill, which\n",
            "error: SGLang needs dill, which",
        ),
        ("all is well\n", None),
    ],
)
def test_the_first_error_is_not_one_of_its_consequences(text: str, told: str | None) -> None:
    assert first_error(text) == told


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (-9, "killed by signal 9 (SIGKILL)"),
        (143, "killed by signal 15 (SIGTERM)"),
        (3, "ended with status 3"),
        (0, "ended with status 0"),
        (255, "ended with status 255"),
    ],
)
def test_a_signal_is_named(status: int, told: str) -> None:
    assert ending(status) == told


def test_of_a_long_log_the_beginning_and_the_end_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "LOG_BYTES", 100)
    log = tmp_path / "log"
    log.write_text("of the start before\nValueError: the first\n" + "noise\n" * 1000 + "ValueError: the last\n")
    said = log_text(log, begin=len("of the start before\n"))
    assert len(said) == 201
    assert first_error(said) == "ValueError: the first"
    assert said.endswith("noise\nValueError: the last\n")
    assert log_tail(log) == "ValueError: the last"
    log.write_text("short\n")
    assert log_text(log) == "short\n"
