"""The readiness of an engine's pod, against a server that answers as SGLang does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launch.schedulers.kubernetes import probe
from launch.schedulers.kubernetes.probe import main
from pipeline.data.run_directory import RunDirectory

KEY = "key-of-the-test"


class Engine(ThreadingHTTPServer):
    """Answers /health and, with the key, /model_info."""

    weight_version = "3"
    health = 200
    padding = b""
    """Written behind /model_info's answer again and again, as far as somebody reads it; as if it was gzip's."""
    drips = False
    """/model_info is answered without end, a byte at a time."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ends = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        status, body = self.server.health, b""
        if self.path == "/model_info":
            known = self.headers["Authorization"] == f"Bearer {KEY}"
            status = 200 if known else 401
            body = json.dumps(dict(model_path="/m", weight_version=self.server.weight_version)).encode()
        self.send_response(status)
        if self.server.drips and self.path == "/model_info":
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            with suppress(OSError):
                while not self.server.ends.wait(0.02):
                    self.wfile.write(b" ")
                    self.wfile.flush()
            return
        if self.server.padding:
            self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            with suppress(OSError):
                while not self.server.ends.is_set():
                    self.wfile.write(self.server.padding)
            return
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.ends.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path)
    found.policies.mkdir()
    found.set_published(3)
    return found


def ask(engine: Engine, run: RunDirectory, *options: str, key: str = KEY, node: str = "0") -> int:
    environment = dict(EVENKEEL_HOST="127.0.0.1", EVENKEEL_NODE=node, EVENKEEL_API_KEY=key)
    return main([str(run.path), "--port", str(engine.server_address[1]), *options], environment)


@pytest.mark.parametrize(
    ("serves", "status"),
    [("3", 0), ("4", 0), ("2", 1), ("unverified-3", 1), ("unverified", 1), ("default", 1)],
)
def test_ready_means_verified_and_not_older_than_what_is_published(
    engine: Engine, run: RunDirectory, serves: str, status: int
) -> None:
    engine.weight_version = serves
    assert ask(engine, run) == status
    assert ask(engine, run, "--alive") == 0


def test_not_ready_without_health_key_or_a_published_version(
    engine: Engine, run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(engine, run, key="wrong") == 1
    assert ask(engine, RunDirectory(tmp_path / "other")) == 1
    engine.health = 503
    assert ask(engine, run) == ask(engine, run, "--alive") == 1
    assert KEY not in capsys.readouterr().out


def test_other_pods_of_an_engine_do_not_answer_themselves(engine: Engine, run: RunDirectory) -> None:
    engine.health = 503
    assert ask(engine, run, node="1") == 0


def test_one_deadline_holds_for_everything_that_a_probe_asks(
    engine: Engine, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each byte comes in time, so that no timeout of a single read ends the call."""
    monkeypatch.setattr(probe, "DEADLINE_S", 0.5)
    engine.drips = True
    assert ask(engine, run) == 1
    assert "no answer within 0.5 s" in capsys.readouterr().out
    assert ask(engine, run, "--alive") == 0
