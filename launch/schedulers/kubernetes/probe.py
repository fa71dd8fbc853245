"""Check for the kubelet whether this pod's engine is ready; runs inside the engine's container:

    python -P -m launch.schedulers.kubernetes.probe RUN --port P [--alive]

An engine is ready when it answers and serves the published version or a newer one (which is being published). The
kubelet cannot check that: it has no API key and knows no version. With --alive, an answer is enough.

The engine's address comes from the environment: EVENKEEL_HOST, and EVENKEEL_NODE, since only the first pod of an engine
answers. The probe exits 0 or 1 within DEADLINE_S and prints the reason in one line, without secrets.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from pydantic import ValidationError

from launch.build.api_key import read_api_key
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import BadAnswerError, EvenKeelError
from precision.text import one_line, quoted
from rollout_sglang.protocol import UNVERIFIED, ModelInfo, claimed_version
from rollout_sglang.server.start import server_url
from rollout_sglang.transport import MOST_BYTES

DEADLINE_S = 15.0
"""Seconds for all requests and reads of one probe: less than the probe's timeout (`pods._EXEC_S`)."""


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    parser = argparse.ArgumentParser(prog="launch.schedulers.kubernetes.probe")
    parser.add_argument("run", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alive", action="store_true")
    given = parser.parse_args(argv)
    if environment.get("EVENKEEL_NODE", "0") != "0":
        print("not the first pod of its engine: the first is asked")
        return 0
    with deadline(DEADLINE_S):
        url = server_url(environment.get("EVENKEEL_HOST", "127.0.0.1"), given.port)
        try:
            status, _ = _get(f"{url}/health", {})  # /health samples nothing, so a weight update does not delay it
            problem = None if status == 200 else f"{url}/health answered {status}"
            if problem is None and not given.alive:
                published, key = RunDirectory(given.run).published_version(), read_api_key(environment)
                status, body = _get(f"{url}/model_info", {"Authorization": f"Bearer {key}"} if key else {})
                named = ModelInfo.model_validate_json(body).weight_version if status == 200 else ""
                served = None if named.startswith(UNVERIFIED) else claimed_version(named)
                if status != 200:
                    problem = f"{url}/model_info answered {status}"
                elif served is None:
                    problem = f"its weights are not verified: {quoted(named)}, published is {published}"
                elif served < published:
                    problem = f"it serves version {served}, published is {published}"
        except (httpx.HTTPError, EvenKeelError, ValidationError, TimeoutError) as error:
            problem = f"{url}: {type(error).__name__} {one_line(error, 400)}"
    print(problem or "ok")
    return 1 if problem else 0


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`: httpx's timeout bounds each connect and each read separately."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # restart a timer that was already running


def _get(url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Return the status and the body, not decompressed. Raises BadAnswerError for more than MOST_BYTES."""
    body = bytearray()
    with httpx.stream("GET", url, headers=headers, timeout=DEADLINE_S, trust_env=False) as answer:
        for part in answer.iter_raw():
            body += part
            if len(body) > MOST_BYTES:
                raise BadAnswerError(f"it is answered by more than {MOST_BYTES} bytes; the rest is not read")
    return answer.status_code, bytes(body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
