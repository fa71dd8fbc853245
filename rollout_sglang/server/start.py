"""Start engines and the router as processes of this machine, on loopback, with their logs in files."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.recipe import RolloutPrecision
from rollout_sglang.protocol import UNVERIFIED
from rollout_sglang.server.launch_server import API_KEY_VARIABLE
from rollout_sglang.server.process import ServerProcess, check_port_free, free_port, free_ports
from rollout_sglang.server.rollout_python import module_command, module_environment

__all__ = ["EngineSpec", "check_port_free", "command", "free_port", "has_cuda", "router_command", "start"]

HOST = "127.0.0.1"
CPU_CONTEXTS = 64
"""Contexts of full length whose keys and values a CPU engine has room for. SGLang would take most of the memory."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One SGLang server.

    `model` is a HF folder; for fp8_block one whose linear weights are stored as e4m3 with `weight_scale_inv`. `dtype`
    is that of activations and of everything that is not quantized.
    """

    model: Path
    port: int
    precision: RolloutPrecision
    dtype: str
    """float32 or bfloat16."""
    log: Path
    version: int
    """Of the weights in `model`; the server starts unverified (rollout_sglang.weight_verifier)."""
    api_key: str | None = None
    tensor_parallel: int = 1
    context_tokens: int = 512
    seed: int = 0
    extra_args: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def has_cuda() -> bool:
    """Whether there is a CUDA driver with a device. The driver is asked, so that torch need not be imported."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def command(spec: EngineSpec, *, cuda: bool) -> list[str]:
    """The argv of a server: stock SGLang's own arguments, no secret among them."""
    module = "rollout_sglang.server.launch_server" if cuda else "rollout_sglang.cpu.cpu_server"
    argv = [*module_command(module), "--model-path", str(spec.model), "--host", HOST, "--port", str(spec.port)]
    argv += ["--dtype", spec.dtype, "--tp-size", str(spec.tensor_parallel)]
    argv += ["--context-length", str(spec.context_tokens), "--weight-version", f"{UNVERIFIED}{spec.version}"]
    argv += ["--random-seed", str(spec.seed), "--sleep-on-idle", "--log-level-http", "warning"]
    if spec.precision == "fp8_tensor":
        argv += ["--quantization", "fp8"]
    if not cuda:
        argv += ["--device", "cpu", "--attention-backend", "torch_native", "--skip-server-warmup"]
        argv += ["--max-total-tokens", str(CPU_CONTEXTS * spec.context_tokens)]
    return [*argv, *spec.extra_args]


def start(spec: EngineSpec) -> ServerProcess:
    """Start the server and return at once; `wait_ready` waits for it.

    The server dies with the calling thread. Raises PortInUseError.
    """
    check_port_free(spec.port)
    environment = server_environment(spec.api_key) | {
        # A folder that is missing must be an error, not a download.
        "HF_HUB_OFFLINE": "1",
        # /health says whether the server is up; a probe that must sample would wait behind a long prefill.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    return ServerProcess(
        command(spec, cuda=has_cuda()),
        environment=environment,
        log=spec.log,
        ready_url=f"{spec.url}/health",
        secret=spec.api_key,
    )


def router_command(worker_urls: list[str], port: int, metrics_port: int) -> list[str]:
    """The argv of SGLang's router. Only Fleet decides which engines are members: the router neither retries nor checks
    health."""
    argv = [*module_command("rollout_sglang.server.launch_router"), "--host", HOST, "--port", str(port)]
    argv += ["--policy", "power_of_two", "--prometheus-host", HOST, "--prometheus-port", str(metrics_port)]
    argv += ["--disable-retries", "--disable-circuit-breaker", "--disable-health-check", "--log-level", "warn"]
    argv += ["--worker-startup-check-interval", "1"]
    return [*argv, "--worker-urls", *worker_urls]


def start_router(worker_urls: list[str], port: int, api_key: str | None, log: Path) -> ServerProcess:
    """Start SGLang's router in front of engines that are up. Dies with the calling thread. Raises PortInUseError."""
    check_port_free(port)
    metrics_port = next(free for free in free_ports(2) if free != port)
    return ServerProcess(
        router_command(worker_urls, port, metrics_port),
        environment=server_environment(api_key),
        log=log,
        ready_url=f"http://{HOST}:{port}/readiness",
        secret=api_key,
    )


def server_environment(api_key: str | None) -> dict[str, str]:
    """Ours, with the key where only this user can read it."""
    environment = module_environment()
    environment.pop(API_KEY_VARIABLE, None)
    return environment | ({API_KEY_VARIABLE: api_key} if api_key else {})
