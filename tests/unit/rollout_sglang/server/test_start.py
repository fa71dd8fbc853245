"""Commands, ports and processes; no SGLang is started."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineStartError, ModelError, PortInUseError, RecipeError
from rollout_sglang.server import launch_server, start
from rollout_sglang.server.capacity import check_block_shapes
from rollout_sglang.server.launch_server import (
    API_KEY_VARIABLE,
    HEALTH_SAMPLES_VARIABLE,
    arguments_with_key,
    hide_in_logs,
)
from rollout_sglang.server.start import (
    EngineSpec,
    ServerProcess,
    check_port_free,
    command,
    free_port,
    router_command,
    server_environment,
)

QWEN3_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
}


def spec(tmp_path: Path, **changes: object) -> EngineSpec:
    values: dict[str, object] = dict(
        model=tmp_path,
        port=31000,
        precision="fp32",
        dtype="float32",
        log=tmp_path / "engine.log",
        version=3,
        api_key="secret",
        seed=11,
    )
    return EngineSpec(**(values | changes))  # type: ignore[arg-type]


def value_of(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_the_command_says_what_the_spec_says(tmp_path: Path) -> None:
    argv = command(
        spec(tmp_path, context_tokens=256, tensor_parallel=2, extra_args=("--log-level", "error")), cuda=False
    )
    assert argv[:4] == [sys.executable, "-P", "-m", "rollout_sglang.cpu.cpu_server"]
    assert value_of(argv, "--host") == "127.0.0.1"
    assert value_of(argv, "--weight-version") == "unverified-3"
    assert value_of(argv, "--random-seed") == "11"
    assert value_of(argv, "--tp-size") == "2"
    assert value_of(argv, "--context-length") == "263", "inputs of 256 tokens are taken"
    assert value_of(argv, "--max-total-tokens") == "32768"
    assert argv[-2:] == ["--log-level", "error"]
    assert "--quantization" not in argv


def test_decoding_is_captured_for_the_requests_under_way_on_a_gpu_alone(tmp_path: Path) -> None:
    one = spec(tmp_path, captured_requests=96, extra_args=("--cuda-graph-max-bs-decode", "8"))
    argv = command(one, cuda=True)
    assert value_of(argv, "--cuda-graph-max-bs-decode") == "96"
    assert "--disable-prefill-cuda-graph" in argv
    assert argv[-2:] == ["--cuda-graph-max-bs-decode", "8"], "the recipe's own comes last, and wins"
    assert "--cuda-graph-max-bs-decode" not in command(spec(tmp_path, captured_requests=96), cuda=False)
    assert "--disable-prefill-cuda-graph" not in command(spec(tmp_path), cuda=True)


def test_the_installed_sglang_has_the_arguments_of_graphs() -> None:
    """No CPU engine is given them: a renamed one would end the first engine on a GPU. 0.5.17 has the same names."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    fields = Path(str(found.origin)).parent / "srt" / "arg_groups" / "fields" / "exec_.py"
    given = command(spec(Path("m"), captured_requests=1), cuda=True)
    own = [argument for argument in given if "cuda-graph" in argument]
    assert len(own) == 2
    for argument in (*own, "--cuda-graph-backend-decode", "--disable-decode-cuda-graph"):
        assert f"    {argument.removeprefix('--').replace('-', '_')}: A[" in fields.read_text(encoding="utf-8")


def test_hosts_of_one_engine_meet_at_node_0(tmp_path: Path) -> None:
    argv = command(
        spec(tmp_path, host="10.0.0.2", tensor_parallel=16, nodes=2, node=1, rendezvous="10.0.0.1:40000"), cuda=True
    )
    told = [value_of(argv, flag) for flag in ("--host", "--nnodes", "--node-rank", "--dist-init-addr", "--tp-size")]
    assert told == ["10.0.0.2", "2", "1", "10.0.0.1:40000", "16"]
    assert "--nnodes" not in command(spec(tmp_path), cuda=True)


def test_the_router_takes_an_ipv6_address_in_brackets_and_its_metrics_one_without() -> None:
    """Otherwise the router does not start, and its metrics have no answers."""
    argv = start.router_command(8000, ("fd00::2", 29000), "fd00::2", request_deadline_s=60)
    assert [value_of(argv, flag) for flag in ("--host", "--prometheus-host")] == ["[fd00::2]", "fd00::2"]
    assert start.server_url("fd00::2", 8000) == "http://[fd00::2]:8000"
    assert start.before_port("10.0.0.2") == "10.0.0.2"


def test_other_hosts_reach_no_server_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "ServerProcess", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(RecipeError, match=r"a server at 0\.0\.0\.0 needs an API key"):
        start.start(spec(tmp_path, host="0.0.0.0", api_key=None))
    with pytest.raises(RecipeError, match=r"a server at 10\.0\.0\.2 needs an API key"):
        start.start_router(31000, None, None, "10.0.0.2", request_deadline_s=60)


@pytest.mark.parametrize(("context_tokens", "allowed"), [(4096, "true"), (4097, None)])
def test_a_context_as_long_as_the_model_s_positions_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context_tokens: int, allowed: str | None
) -> None:
    """--context-length has a few tokens more than the model has positions: SGLang must be told to take that."""
    given: dict[str, str] = {}
    monkeypatch.delenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", raising=False)
    monkeypatch.setattr(start, "ServerProcess", lambda *_, environment, **__: given.update(environment))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    start.start(spec(tmp_path, port=free_port(), context_tokens=context_tokens))
    assert given.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") == allowed


@pytest.mark.parametrize(
    ("precision", "generation", "said"),
    [("fp8_block", 10, "false"), ("fp8_block", 12, "false"), ("fp8_block", 9, "users"), ("bf16", 10, "users")],
)
def test_scales_of_blocks_stay_as_they_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, generation: int, said: str
) -> None:
    """On Blackwell DeepGEMM would have them packed, and no second version could be loaded."""
    given: dict[str, str] = {}
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "users")
    monkeypatch.setattr(start, "gpu_generation", lambda: generation)
    monkeypatch.setattr(start, "ServerProcess", lambda *_, environment, **__: given.update(environment))
    start.start(spec(tmp_path, port=free_port(), precision=precision))
    assert given["SGLANG_ENABLE_JIT_DEEPGEMM"] == said


def test_the_driver_is_asked_for_gpus_and_their_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """Two H100."""

        def cuInit(self, _: int) -> int:
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = 2
            return 0

        def cuDeviceGetAttribute(self, found: Any, attribute: int, device: int) -> int:
            found._obj.value = {75: 9, 76: 0}[attribute] if device == 0 else -1
            return 0

    class Blind(Driver):
        """No device is visible: CUDA_ERROR_NO_DEVICE."""

        def cuInit(self, _: int) -> int:
            return 100

    def missing(_: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    def without_torch(name: str) -> str:
        raise PackageNotFoundError(name)

    for library, found in (
        (lambda _: Driver(), (2, True, 9)),
        (lambda _: Blind(), (0, False, 0)),
        (missing, (0, False, 0)),
    ):
        monkeypatch.setattr(start.ctypes, "CDLL", library)
        monkeypatch.setattr(start, "version", lambda _: "2.11.0+cu130")
        monkeypatch.delenv("EVENKEEL_ROLLOUT_PYTHON", raising=False)
        assert (start.num_gpus(), start.has_cuda(), start.gpu_generation()) == found
        monkeypatch.setattr(start, "version", lambda _: "2.13.0+cpu")
        assert not start.has_cuda(), "a build for CPUs computes there, whatever GPUs the machine has"
        monkeypatch.setattr(start, "version", without_torch)
        assert start.has_cuda() == found[1], "nothing is installed that says it is for CPUs"
        monkeypatch.setenv("EVENKEEL_ROLLOUT_PYTHON", "/gpu/bin/python")
        assert start.has_cuda() == found[1], "engines run in another Python"


@pytest.mark.parametrize(
    ("variable", "users", "given"),
    [
        ("SGLANG_RETURN_ORIGINAL_LOGPROB", "true", "false"),
        ("SGLANG_SANITIZE_NAN_LOGITS", "1", "false"),
        ("SGLANG_MAX_NEW_TOKENS_LIMIT", "16", "0"),
        ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "1", "false"),
        ("SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS", "1", "false"),
        ("SGLANG_SIMULATE_ACC_LEN", "3", "-1"),
        ("SGLANG_NGRAM_FORCE_GREEDY_VERIFY", "1", "false"),
        ("SGLANG_FORCE_FP8_MARLIN", "1", "false"),
        ("SGLANG_FP8_IGNORED_LAYERS", "lm_head", ""),
        ("SGLANG_LOG_MS", "1", "1"),
    ],
)
def test_the_users_environment_does_not_change_what_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, users: str, given: str
) -> None:
    """Nor what is said about it. All else that it tells SGLang reaches the engine."""
    told: dict[str, str] = {}
    monkeypatch.setenv(variable, users)
    monkeypatch.setattr(start, "ServerProcess", lambda *_, environment, **__: told.update(environment))
    start.start(spec(tmp_path, port=free_port()))
    assert told[variable] == given


@pytest.mark.parametrize(
    ("precision", "flag"), [("fp32", False), ("bf16", False), ("fp8_tensor", True), ("fp8_block", False)]
)
def test_only_per_tensor_fp8_is_quantized_by_the_engine(tmp_path: Path, precision: str, flag: bool) -> None:
    assert ("--quantization" in command(spec(tmp_path, precision=precision), cuda=False)) == flag


def test_the_key_is_in_the_environment_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = router_command(1, ("127.0.0.1", 2), request_deadline_s=60)
    assert "secret" not in " ".join(command(spec(tmp_path), cuda=True) + router)
    environment = server_environment("secret")
    assert environment["EVENKEEL_API_KEY"] == "secret"
    monkeypatch.setenv("EVENKEEL_API_KEY", "secret")
    assert "EVENKEEL_API_KEY" not in server_environment(None)
    assert arguments_with_key(["--port", "1"]) == ["--port", "1", "--api-key=secret"]
    assert arguments_with_key([]) == []


def test_every_server_answers_whether_it_is_up_without_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of rollout.urls too, which nobody here has started: one that is paused for an update samples nothing."""
    monkeypatch.setenv(HEALTH_SAMPLES_VARIABLE, "true")
    monkeypatch.setattr(launch_server, "be_a_parent", lambda: None)
    monkeypatch.setitem(sys.modules, "sglang.launch_server", None)  # importing it fails, so nothing is started
    with pytest.raises(ImportError):
        launch_server.serve([])
    assert os.environ[HEALTH_SAMPLES_VARIABLE] == "false"


def test_a_key_that_begins_with_a_dash_is_still_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "-dashed")
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key")
    assert parser.parse_args(arguments_with_key([])).api_key == "-dashed"


def test_what_is_logged_shows_stars_for_the_key(tmp_path: Path) -> None:
    code = (
        "import logging; logging.basicConfig(format='%(message)s');"
        "from rollout_sglang.server.launch_server import hide_in_logs;"
        "hide_in_logs('hunter2'); logging.warning(f\"args api_key='hunter2'\"); logging.warning('%d %s', 3, 'hunter2');"
        "logging.warning('%d of %d', 1, 2)"
    )
    logged = subprocess.run(
        [sys.executable, "-c", code], env=server_environment(None), capture_output=True, text=True, check=True
    )
    assert logged.stderr.splitlines() == ["args api_key='***'", "3 ***", "1 of 2"]


def test_a_key_that_is_quoted_is_hidden_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang logs its arguments as Python writes them."""
    key = "hun\\ter'2\""
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    hide_in_logs(key)
    logging.warning("args %s", dict(api_key=key))
    logging.warning("args %s", repr(key))
    assert "ter" not in caplog.text
    assert caplog.text.count("***") == 2


def test_a_taken_port_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} is taken"):
            check_port_free(port)
    port = free_port()
    check_port_free(port)
    assert port < 32_768, "the kernel gives higher ones to connections that go out"


def launch_python(code: str, tmp_path: Path, port: int, secret: str | None = None) -> ServerProcess:
    log = tmp_path / "server.log"
    ready_url = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-c", code]
    return ServerProcess(command, environment=os.environ, log=log, ready_url=ready_url, secret=secret)


def test_a_server_that_dies_shows_the_end_of_its_log_without_the_key(tmp_path: Path) -> None:
    code = "print('loading'); print('out of memory, key=hunter2'); raise SystemExit(3)"
    server = launch_python(code, tmp_path, free_port(), secret="hunter2")
    with pytest.raises(EngineStartError, match=r"status 3 .*server.log ends: loading \| out of memory, key=\*\*\*$"):
        server.wait_ready(20)
    assert (tmp_path / "server.log").stat().st_mode & 0o777 == 0o600


def test_a_server_that_never_comes_up_is_stopped(tmp_path: Path) -> None:
    server = launch_python("import time; time.sleep(60)", tmp_path, free_port())
    with pytest.raises(EngineStartError, match=r"not up within 0.5 s"):
        server.wait_ready(0.5)
    assert server.poll() == -signal.SIGTERM


def test_a_server_that_answers_is_ready_and_stops_even_if_it_ignores_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerProcess, "grace_s", 0.2)
    port = free_port()
    code = (
        "import signal, http.server; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"http.server.test(http.server.SimpleHTTPRequestHandler, port={port}, bind='127.0.0.1')"
    )
    server = launch_python(code, tmp_path, port)
    assert server.wait_ready(20) < 20
    server.stop()
    assert server.poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("changes", "tensor_parallel", "named"),
    [
        ({"intermediate_size": 12352}, 1, "intermediate_size / tensor_parallel = 12352"),
        ({"hidden_size": 4160}, 1, "hidden_size = 4160"),
        ({"head_dim": 64, "num_key_value_heads": 1}, 1, "num_key_value_heads × head_dim / tensor_parallel = 64"),
        ({"intermediate_size": 1280}, 4, "intermediate_size / tensor_parallel = 320"),
    ],
)
def test_block_shapes_that_do_not_fit_are_named(changes: dict[str, int], tensor_parallel: int, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        check_block_shapes(QWEN3_8B | changes, tensor_parallel)


def test_the_body_of_a_probe_s_answer_is_not_read(tmp_path: Path) -> None:
    """It may have no end, and a sign of life needs none."""

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(b" " * (1 << 16))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/health"
        child = ServerProcess(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            environment=os.environ,
            log=tmp_path / "log",
            ready_url=url,
            secret=None,
        )
        try:
            assert child.is_ready()
        finally:
            child.kill()
            server.shutdown()
            thread.join()
