"""Start, ask and end one worker process, from the run's side."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import sysconfig
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.child_process import kill_and_wait
from pipeline.rewards.calling import KINDS, Wants
from pipeline.rewards.children import remove
from pipeline.rewards.messages import (
    KEY_CHARACTERS,
    MAX_JUDGMENT_BYTES,
    READY,
    START_DEADLINE_S,
    BadMessageError,
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Judgment,
    decode_judgment,
    failure,
)
from pipeline.rewards.programs import TOLERANCE
from pipeline.rewards.sandbox.confine import Rung
from pipeline.rewards.sandbox.view import PACKAGE, Bubblewrap, View, view_of
from pipeline.rewards.verifiers import MATH_TOLERANCE, PYTHON_TESTS, TRUSTED

TOOLBOX = "pipeline.episodes.toolbox:Toolbox"
"""Runs code that a model wrote, as `python_tests` does: it sees nothing of the user's folders."""
_GRACE_S = 10.0
"""Seconds that a worker may take beyond its own deadlines."""
_END_DEADLINE_S = 5.0
_SENT_AHEAD_BYTES = 32 * 2**10
"""Largest request that is sent ahead: the socket of a worker that does not read holds all of them."""
_KEY_VARIABLES = (
    *("EVENKEEL_API_KEY", "EVENKEEL_API_KEY_FILE"),
    *("EVENKEEL_TEACHER_API_KEY", "EVENKEEL_TEACHER_API_KEY_FILE"),
)
_ENVIRONMENT = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"),
    *("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"),
)
"""The only variables, with those that begin with LC_, that code in the sandbox sees."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """How reward code is confined. `hidden`: paths that it must not read. `runs`: the folder that holds the run."""

    rung: Rung
    landlock_abi: int = 0
    hidden: tuple[Path, ...] = ()
    runs: Path | None = None

    def view(self, reward: str) -> View:
        return view_of(reward, self.hidden, own=reward not in (PYTHON_TESTS, TOOLBOX), runs=self.runs)


class ConfinedPython:
    """A way to start Python processes that run one of our modules, which may import the user's code."""

    def __init__(self, module: str, code: str, sandbox: Sandbox | None) -> None:
        """Find what a process needs. `module` has a function `main`; `code` is the user's `package.module:name`."""
        # A Python that runs the module and reads nothing of the user's environment.
        root = str(PACKAGE.parent)
        installed = root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        path = "" if installed else f"import sys; sys.path.insert(0, {root!r}); "
        self._command = [sys.executable, "-I", "-B", "-c", f"{path}from {module} import main; main()"]
        self._view: View | None = None
        """Files for the process to see, where it is started under bubblewrap."""
        self._bubblewrap: Bubblewrap | None = None
        self._environment = {name: value for name, value in os.environ.items() if name not in _KEY_VARIABLES}
        self.settings: dict[str, Any] = dict(
            run_pid=os.getpid(),
            path=[os.path.realpath(entry or os.getcwd()) for entry in sys.path],
            folder=os.getcwd(),
            rung=None,
        )
        """What the process needs to know of where it runs, as JSON."""
        if sandbox is not None:
            view = sandbox.view(code)
            self.settings |= dict(rung=sandbox.rung, landlock_abi=sandbox.landlock_abi, pieces=[])
            self.settings["folder"] = os.getcwd() if view.shows(Path.cwd()) else "/"
            kept = (name for name in os.environ if name in _ENVIRONMENT or name.startswith("LC_"))
            self._environment = {name: os.environ[name] for name in kept}
            if sandbox.rung == "bubblewrap":
                self._view = view
            else:
                self.settings["pieces"] = [(str(path), whole) for path, whole in view.pieces()]

    def start(self, stdin: socket.socket) -> subprocess.Popen[bytes]:
        """Start a process with this end of a socket as its standard input. Raises OSError."""
        if self._view is not None and self._bubblewrap is None:
            self._bubblewrap = Bubblewrap(self._view)
        return subprocess.Popen(
            self._command if self._bubblewrap is None else self._bubblewrap.command(self._command),
            stdin=stdin.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )


class WorkerProcess:
    """A worker and its process. Only `kill` and `end` may be called while another thread is in a method."""

    def __init__(
        self,
        reward: str,
        deadline_s: float,
        memory_mib: int,
        sandbox: Sandbox | None,
        retries: int = 0,
        program_tolerance: float = TOLERANCE,
        math_tolerance: float = MATH_TOLERANCE,
    ) -> None:
        self.alive = False
        self.wants: Wants = frozenset()
        """How the function is called; known once it is started."""
        self._ended = False
        self._pipe: socket.socket | None = None
        self._patience_s = START_DEADLINE_S + 2 * deadline_s + _GRACE_S
        self._built_in = sandbox is None and reward in TRUSTED
        self._answer_s = deadline_s if self._built_in else self._patience_s
        self._posted: deque[tuple[str, bytes]] = deque()
        self._num_sent = 0
        """Number of posted requests that were sent; they are sent in order."""
        self._said = ""
        self._scratch: Path | None = None
        self._python = ConfinedPython("pipeline.rewards.worker", reward, sandbox)
        settings = self._python.settings | dict(
            reward=reward,
            deadline_s=deadline_s,
            retries=retries,
            program_tolerance=program_tolerance,
            math_tolerance=math_tolerance,
            memory_mib=memory_mib,
            built_in=self._built_in,
        )
        self._settings = json.dumps(settings).encode()

    def start(self) -> str | None:
        """Start the process, wait until it has imported the reward function, and return the problem, or None."""
        if self._ended:
            return "it was ended"
        self.release()
        try:
            mine, theirs = socket.socketpair()
        except OSError as error:
            return str(error)
        try:
            self._process = self._python.start(theirs)
        except OSError as error:
            mine.close()
            return str(error)
        finally:
            theirs.close()
        self._pipe, self._channel = mine, Channel(mine.fileno())
        self.alive = True
        self._send(self._settings)
        judgment = self._receive(READY, self._patience_s)
        if judgment.failed is not None:
            self.kill()
            return judgment.detail
        self._scratch = Path(judgment.detail) if judgment.detail else None
        self.wants = KINDS & judgment.parts.keys()
        return None

    def post(self, *texts: bytes) -> None:
        """Ask for the verdicts on one sample or several; `collect` returns them. More requests may be posted ahead."""
        key = secrets.token_hex(KEY_CHARACTERS // 2)
        self._posted.append((key, key.encode() + b"[" + b",".join(texts) + b"]"))
        self._send_posted()

    def collect(self) -> Judgment:
        """Return the verdict on the oldest request; never raise. A worker runs no foreign code. If it died, it was
        killed, perhaps before the request came. This request is posted again once, and so are those behind it."""
        key = self._posted[0][0]
        problem = None if self.alive else self._start_again()
        self._send_posted()
        judgment = failure("crashed", problem) if problem else self._receive(key, self._answer_s)
        if judgment.failed == "crashed" and not self.alive and self._start_again() is None:
            judgment = self._receive(key, self._answer_s)
        self._posted.popleft()
        self._num_sent = max(0, self._num_sent - 1)
        return judgment

    def forget(self) -> None:
        self._posted.clear()
        self._num_sent = 0
        self.kill()

    def _start_again(self) -> str | None:
        problem = self.start()
        if problem is not None:
            return f"the worker could not be started again: {problem}"
        self._num_sent = 0
        self._send_posted()
        return None

    def _send_posted(self) -> None:
        """Send posted requests. A large one waits until it is first, since a busy worker does not read."""
        for _, request in [*self._posted][self._num_sent :]:
            if not self.alive or (self._num_sent and len(request) > _SENT_AHEAD_BYTES):
                return
            self._send(request)
            self._num_sent += 1

    def kill(self) -> None:
        """End the process, if there is one, with its descendants, and wait until they are gone."""
        if not self.alive:
            return
        self.alive = False
        assert self._pipe is not None
        if self._built_in:  # it has started nothing and written nothing, and may be in the midst of a sample
            self._process.kill()
        with suppress(OSError):  # when its pipe closes it kills its children, removes written files, and exits
            self._pipe.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            kill_and_wait(self._process)
        if self._scratch is not None and self._scratch != Path("/tmp"):
            remove(self._scratch)

    def end(self) -> None:
        """Kill the process for good; any thread may call this."""
        self._ended = True
        self.kill()

    def release(self) -> None:
        """Close the pipes of a process that is gone. No other thread may be in a method."""
        if self._pipe is not None:
            self._pipe.close()
            assert self._process.stderr is not None
            self._process.stderr.close()
            self._pipe = None

    def _send(self, message: bytes) -> None:
        """Send a message. A worker that does not take it is killed, which `_receive` reports."""
        if self.alive:
            try:
                self._channel.send(message, self._patience_s)
            except (ChannelTimeoutError, ChannelClosedError):
                self._said = self._last_words()
                self.kill()

    def _receive(self, key: str, deadline_s: float) -> Judgment:
        if not self.alive:
            return failure("crashed", f"its worker ended{self._said}")
        try:
            return decode_judgment(key, self._channel.receive(MAX_JUDGMENT_BYTES, deadline_s))
        except ChannelTimeoutError:
            self.kill()
            return failure("timeout", f"its worker did not answer within {deadline_s:g} s and was killed")
        except (ChannelClosedError, OSError):
            said = self._last_words()
            self.kill()
            return failure("crashed", f"its worker ended with status {self._process.returncode}{said}")
        except BadMessageError as error:
            self.kill()
            return failure("bad_result", f"its worker sent {error}")

    def _last_words(self) -> str:
        """Return the last line that bubblewrap or Python wrote before the process ended."""
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        try:
            words = (self._process.stderr.read() or b"").decode(errors="replace").strip()
        except OSError:
            return ""
        return f": {words.splitlines()[-1]}" if words else ""
