"""How a worker asks a reward function, which runs in a process of its own and is used for one sample after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.rewards.calling.wants import Wants
from pipeline.rewards.channel import BadMessageError, Channel, ChannelClosedError, ChannelTimeoutError
from pipeline.rewards.children import Children
from pipeline.rewards.judgment import (
    MAX_JUDGMENT_BYTES,
    Judgment,
    decode_judgment,
    failure,
    new_key,
)
from pipeline.rewards.runner import READY, RunnerLimits, fork_runner
from pipeline.rewards.sandbox.confine import Confinement
from pipeline.rewards.sandbox.limits import WATCH_EVERY_S, OverLimitError

START_DEADLINE_S = 120.0
"""Longest wait for a process to start Python and import the reward function, on a busy machine."""
_LATER_S = 5.0
"""How much longer than its own deadlines a process with calls of an async function may take."""
_PERHAPS_OF_AN_EARLIER_SAMPLE = frozenset(("crashed", "bad_result", "memory", "processes", "files"))


class FunctionJudge:
    """One reward function. A process that breaks a rule is killed, and the next sample gets a fresh one."""

    def __init__(
        self,
        reward: str,
        children: Children,
        confinement: Confinement | None,
        *,
        path: Sequence[str],
        folder: Path,
        deadline_s: float,
        retries: int,
    ) -> None:
        self.wants = Wants()
        limits = RunnerLimits(deadline_s, retries)
        self._fork: Callable[[], tuple[int, Channel]] = lambda: fork_runner(reward, path, folder, confinement, limits)
        self._children = children
        self._deadline_s = deadline_s
        self._channel: Channel | None = None
        self._used = False

    def start(self) -> Judgment | None:
        """A fresh process that has imported the reward function. Returns what is wrong, or None."""
        self._end()
        self._children.empty_scratch()
        pid, self._channel = self._fork()
        self._children.began(pid)
        judgment = self._reply(READY, START_DEADLINE_S)
        if judgment.failed is not None:
            self._end()
            return judgment
        self.wants = Wants.from_numbers(judgment.parts)
        self._used = False
        self._children.left_any()  # what the import started may stay
        return None

    def judge(self, texts: bytes) -> Judgment:
        """The verdict on one request. What an earlier one may have caused (a message that nobody asked for, a crash,
        too much memory) is tried again in a fresh process."""
        if self._channel is not None and self._channel.pending:
            self._end()
        was_used = self._channel is not None and self._used
        judgment = self._ask(texts)
        if was_used and self._channel is None and judgment.failed in _PERHAPS_OF_AN_EARLIER_SAMPLE:
            judgment = self._ask(texts)
        return judgment

    def _ask(self, texts: bytes) -> Judgment:
        if self._channel is None and (problem := self.start()) is not None:
            return failure("crashed", f"it could not be started again: {problem.detail}")
        assert self._channel is not None
        key, self._used = new_key(), True
        # The process itself ends calls of an async function, each by itself.
        deadline_s = self._deadline_s + (_LATER_S if self.wants.concurrent else 0.0)
        judgment = self._reply(key, deadline_s, key.encode() + texts)
        if self._channel is not None and self._children.left_any():
            self._end()
        return judgment

    def _reply(self, key: str, deadline_s: float, request: bytes | None = None) -> Judgment:
        """The answer to `key`, or the reason why the process was killed."""
        assert self._channel is not None
        try:
            if request is not None:
                self._channel.send(request, deadline_s)
            message = self._channel.receive(MAX_JUDGMENT_BYTES, deadline_s, self._children.look, WATCH_EVERY_S)
            return decode_judgment(key, message)
        except ChannelTimeoutError:
            self._end()
            return failure("timeout", f"killed after {deadline_s:g} s")
        except BadMessageError as error:
            self._end()
            return failure("bad_result", f"it wrote what was not asked for: {error}")
        except OverLimitError as error:
            self._end()
            return failure(str(error), f"killed for using too much: {error}")
        except ChannelClosedError:
            return failure("crashed", f"its process ended with status {self._end()}")

    def _end(self) -> int | None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        return self._children.kill()
