"""Start engines and the router as processes of this machine, on loopback or, with an API key, at another address."""

from __future__ import annotations

import ctypes
import ipaddress
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx

from pipeline.child_process import (
    ChildProcess,
    ending,
    first_error,
    last_lines,
    make_scratch,
    remove_scratch,
    scratch_environment,
)
from pipeline.config.sections import RolloutPrecision
from pipeline.data.files import MODEL_JSON_BYTES, read_at_most
from pipeline.errors import EngineStartError, PortInUseError, RecipeError
from precision.text import parse_object, without
from rollout_sglang.protocol import UNVERIFIED
from rollout_sglang.server.launch_server import API_KEY_VARIABLE
from rollout_sglang.server.rollout_python import has_router, module_command, module_environment, rollout_python
from rollout_sglang.server.update_fence import FLOOR_VARIABLE

__all__ = ["EngineSpec", "check_port_free", "command", "free_port", "has_cuda", "router_command", "start"]

HOST = "127.0.0.1"
IGNORED_LAYERS_VARIABLE = "SGLANG_FP8_IGNORED_LAYERS"
"""The layers that SGLang's `--quantization fp8` leaves unquantized (layers/quantization/fp8.py)."""
DEEPGEMM_VARIABLE = "SGLANG_ENABLE_JIT_DEEPGEMM"
BLACKWELL = 10
"""The major compute capability of Blackwell data-center GPUs; that of consumer GPUs is 12."""
_CAPABILITY_MAJOR = 75
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR."""
DISTRIBUTION: Mapping[str, str] = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",  # log-probabilities at temperature 1, whatever the recipe samples at
    "SGLANG_SANITIZE_NAN_LOGITS": "false",  # tokens sampled after replacing NaN, without a sign of it
    "SGLANG_MAX_NEW_TOKENS_LIMIT": "0",  # shorter answers than requested; 0 is no limit
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": "false",  # this and the next: experts that the router did not choose
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "false",
    "SGLANG_SIMULATE_ACC_LEN": "-1",  # this and the next: speculative tokens not sampled by the policy
    "SGLANG_NGRAM_FORCE_GREEDY_VERIFY": "false",
    "SGLANG_FORCE_FP8_MARLIN": "false",  # FP8 layers with unquantized activations, on GPUs that support both
}
"""Variables of SGLang that silently change the sampling distribution or the reported log-probabilities, with the values
that leave both alone. Always set: the user's environment may hold other values, and no recipe would show them."""
CPU_TOKENS, CPU_CONTEXTS = 32_768, 8
"""A CPU engine has room for the keys and values of CPU_TOKENS tokens, and of CPU_CONTEXTS contexts of full length at
least. SGLang would take most of the memory. With less room than the concurrent requests need, each sample that ends
admits a few others, in a separate step: hundreds of short requests took 17 such steps a batch beside 14 of decoding."""

LONGEST_SCRATCH = 107 - len("/tmp12345678")
"""Longest path, in bytes, of a folder for sockets: Linux allows 107 in all."""
ROUTER_MARGIN_S = 60
"""How much longer than the recipe's request deadline the router waits, so that the client gives up first. The router
counts from when it receives the request; its default limit is 1800 s."""
INPUT_ROOM = 7
"""SGLang refuses inputs within INPUT_ROOM tokens of --context-length (managers/tp_worker.py, scheduler.py)."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The settings of one SGLang server. `model` is a HF folder; for fp8_block, its linear weights are stored as e4m3
    with `weight_scale_inv`. `dtype` is the dtype of activations and of all weights that are not quantized."""

    model: Path
    port: int
    precision: RolloutPrecision
    dtype: str
    """float32 or bfloat16."""
    log: Path | None
    """None: the output of this process."""
    version: int
    """The version of the weights in `model`; the server starts unverified (rollout_sglang.weight_verifier)."""
    host: str = HOST
    nodes: int = 1
    """Number of hosts that share its tensor parallel ranks evenly; each has a separate EngineSpec."""
    node: int = 0
    """Index of this host. Only node 0 answers requests."""
    rendezvous: str | None = None
    """ADDRESS:PORT of node 0, where the hosts meet."""
    api_key: str | None = None
    tensor_parallel: int = 1
    context_tokens: int = 512
    """Longest input, and longest prompt and response together."""
    seed: int = 0
    metrics: bool = False
    """Whether it serves SGLang's /metrics, without a key, on its port."""
    extra_args: tuple[str, ...] = ()
    full_precision: tuple[str, ...] = ()
    """For fp8_tensor: exact names of linear layers that SGLang must not quantize; a mixture is named by its experts."""
    captured_requests: int = 0
    """On a GPU, the largest batch whose decoding is captured in CUDA graphs; 0: as SGLang chooses."""
    update_floor: int = 0
    """The newest weight update number of the run: lower numbers are refused (rollout_sglang.server.update_fence)."""

    url: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", server_url(self.host, self.port))


def num_gpus() -> int:
    """Count the CUDA devices that this process sees."""
    driver, count = _cuda_driver(), ctypes.c_int(0)
    known = driver is not None and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if known else 0


def has_cuda() -> bool:
    return num_gpus() > 0


def gpu_generation() -> int:
    """Return the major compute capability of the first CUDA device; 0 without a device."""
    driver, found = _cuda_driver(), ctypes.c_int(0)
    known = driver is not None and driver.cuDeviceGetAttribute(ctypes.byref(found), _CAPABILITY_MAJOR, 0) == 0
    return found.value if known else 0


def _cuda_driver() -> ctypes.CDLL | None:
    """Load the driver directly: importing torch is slow, and its use takes GPU memory. Return None also where the
    installed torch is a CPU build, as from `make install`, and no other Python runs the engines."""
    with suppress(PackageNotFoundError):  # torch is absent, for example on a machine that only plans
        if version("torch").endswith("+cpu") and rollout_python() is None:
            return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def command(spec: EngineSpec, *, cuda: bool) -> list[str]:
    """Return the argv of a server: stock SGLang's own arguments, without secrets."""
    module = "rollout_sglang.server.launch_server" if cuda else "rollout_sglang.cpu.cpu_server"
    argv = [*module_command(module), "--model-path", str(spec.model), "--host", spec.host, "--port", str(spec.port)]
    argv += ["--dtype", spec.dtype, "--tp-size", str(spec.tensor_parallel)]
    argv += [
        "--context-length",
        str(spec.context_tokens + INPUT_ROOM),
        "--weight-version",
        f"{UNVERIFIED}{spec.version}",
    ]
    argv += ["--random-seed", str(spec.seed), "--sleep-on-idle", "--log-level-http", "warning"]
    if spec.nodes > 1:
        argv += ["--nnodes", str(spec.nodes), "--node-rank", str(spec.node), "--dist-init-addr", str(spec.rendezvous)]
    if spec.metrics:
        argv += ["--enable-metrics"]
    if spec.precision == "fp8_tensor":
        argv += ["--quantization", "fp8"]
    if cuda and spec.captured_requests:
        # Prompts are prefilled in few large steps, whose launches cost little: not worth the capture at each start.
        argv += ["--cuda-graph-max-bs-decode", str(spec.captured_requests), "--disable-prefill-cuda-graph"]
    if not cuda:
        argv += ["--device", "cpu", "--attention-backend", "torch_native", "--skip-server-warmup"]
        argv += ["--max-total-tokens", str(max(CPU_TOKENS, CPU_CONTEXTS * spec.context_tokens))]
    return [*argv, *spec.extra_args]


def start(spec: EngineSpec) -> ServerProcess:
    """Start the server and return at once; `wait_ready` waits for it. The server dies with the calling thread. Raises
    PortInUseError, and RecipeError when the address needs a key or the temporary folder's path is too long."""
    require_key(spec.host, spec.api_key)
    check_port_free(spec.port, spec.host)
    scratch = make_scratch("engine")
    if (length := len(os.fsencode(scratch))) > LONGEST_SCRATCH:
        remove_scratch(scratch)
        raise RecipeError(
            f"temporary files of an engine would be in {scratch}, a path of {length} bytes, expected at most "
            f"{LONGEST_SCRATCH}: its sockets are there; set TMPDIR to a folder with a shorter path"
        )
    environment = (
        server_environment(spec.api_key)
        | scratch_environment(scratch)
        | {
            # A missing folder must be an error, not a download.
            "HF_HUB_OFFLINE": "1",
            FLOOR_VARIABLE: str(spec.update_floor),
            # Always set: the user's environment could name layers, against the quant map.
            IGNORED_LAYERS_VARIABLE: ",".join(spec.full_precision),
            **DISTRIBUTION,
        }
    )
    # SGLang refuses a context beyond the model's positions. INPUT_ROOM may exceed them: no request uses it.
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        config = parse_object(read_at_most(spec.model / "config.json", MODEL_JSON_BYTES))
        if spec.context_tokens <= int(config["max_position_embeddings"]):
            environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "true"
    # On Blackwell SGLang rounds block scales to powers of two and packs them for DeepGEMM as it loads
    # (requant_block_scale_ue8m0_for_deepgemm). The weights then differ from the published ones, and the next version
    # does not fit into them. Other kernels multiply by the scales as they are, as does DeepGEMM on Hopper.
    if spec.precision == "fp8_block" and gpu_generation() >= BLACKWELL:
        environment[DEEPGEMM_VARIABLE] = "false"
    return ServerProcess(
        command(spec, cuda=has_cuda()),
        environment=environment,
        log=spec.log,
        ready_url=f"{spec.url}/health",
        secret=spec.api_key,
        scratch=scratch,
    )


def router_command(port: int, metrics: tuple[str, int], host: str = HOST, *, request_deadline_s: float) -> list[str]:
    """Return the argv of SGLang's router, which starts without engines and waits longer than `request_deadline_s`, the
    client's deadline. The router neither retries nor checks health: Fleet alone decides which engines are members. The
    thresholds make it balance by load as soon as loads differ; `power_of_two` would not start without engines."""
    argv = [
        *module_command("rollout_sglang.server.launch_router", here=has_router()),
        "--host",
        before_port(host),
        "--port",
        str(port),
    ]
    argv += ["--policy", "cache_aware", "--prometheus-host", metrics[0], "--prometheus-port", str(metrics[1])]
    argv += ["--disable-retries", "--disable-circuit-breaker", "--disable-health-check", "--log-level", "warn"]
    argv += ["--balance-abs-threshold", "1", "--balance-rel-threshold", "1.0"]
    argv += ["--request-timeout-secs", str(math.ceil(request_deadline_s) + ROUTER_MARGIN_S)]
    return [*argv, "--worker-startup-check-interval", "1"]


def start_router(
    port: int,
    api_key: str | None,
    log: Path | None,
    host: str = HOST,
    metrics_port: int | None = None,
    *,
    request_deadline_s: float,
) -> ServerProcess:
    """Start SGLang's router. It dies with the calling thread. Raises as `start` does. The router serves its metrics at
    `metrics_port` of `host`, or at a free port of loopback where that is None or taken: it needs a port to start."""
    require_key(host, api_key)
    check_port_free(port, host)
    metrics = (HOST, next(free for free in free_ports(2) if free != port))
    if metrics_port is not None:
        try:
            check_port_free(metrics_port, host)
            metrics = (host, metrics_port)
        except PortInUseError:
            print(f"warning: the router shows no metrics: port {metrics_port} is taken", file=sys.stderr, flush=True)
    return ServerProcess(
        router_command(port, metrics, host, request_deadline_s=request_deadline_s),
        environment=server_environment(api_key, here=has_router()),
        log=log,
        ready_url=f"{server_url(host, port)}/liveness",
        secret=api_key,
    )


def server_url(host: str, port: int) -> str:
    return f"http://{before_port(host)}:{port}"


def before_port(host: str) -> str:
    """Return the host as it is written before `:PORT`: an IPv6 address is in brackets."""
    return f"[{host}]" if ":" in host else host


def require_key(address: str, api_key: str | None) -> None:
    """Raise RecipeError when a server without a key would listen at an address that other hosts reach."""
    if not api_key and not ipaddress.ip_address(address).is_loopback:
        raise RecipeError(f"a server at {address} needs an API key, since other hosts reach it; set EVENKEEL_API_KEY")


def server_environment(api_key: str | None, *, here: bool = False) -> dict[str, str]:
    """Return the environment of a server, of this interpreter or of engines, with the key where only this user can read
    it."""
    environment = module_environment(here=here)
    environment.pop(API_KEY_VARIABLE, None)
    return environment | ({API_KEY_VARIABLE: api_key} if api_key else {})


LOG_LINES = 12
"""Last lines of the log that an EngineStartError carries, where no line of the log names an error."""
ERROR_NAMED = "the first error in "
"""The words before the path of the log in a message that quotes an error from it."""
FREE_PORTS = range(20_000, 32_768)
_POLL_S = 0.2


class ServerProcess(ChildProcess):
    """A running server, in a separate session: Ctrl-C reaches only the supervisor, which stops its servers in order."""

    grace_s = 1.0  # SGLang polls for SIGTERM every five seconds, and an engine has nothing to save: most are killed
    when_parent_dies = signal.SIGKILL

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path | None,
        ready_url: str,
        secret: str | None,
        scratch: Path | None = None,
    ) -> None:
        """Start `command`. `ready_url` answers 2xx once the server is ready; `secret` is kept out of error messages;
        `scratch` is a folder (pipeline.child_process) that is removed with the server."""
        self._scratch = scratch
        super().__init__(command, log, environment, own_session=True)
        self._ready_url = ready_url
        self._secret = secret

    def stop(self) -> None:
        super().stop()
        self._clean()

    def kill(self) -> None:
        super().kill()
        self._clean()

    def _clean(self) -> None:
        if self._scratch is not None:
            remove_scratch(self._scratch)

    def wait_ready(self, deadline_s: float) -> float:
        """Wait until the server answers and return the seconds. Raises EngineStartError with an excerpt of the log when
        the server ended, or was stopped because it took too long."""
        started = time.monotonic()
        while not self.is_ready():
            if self.poll() is not None:
                raise EngineStartError(f"server {self.how_it_ended()} before it was up; {self.why()}")
            if time.monotonic() - started > deadline_s:
                self.stop()
                raise EngineStartError(f"server was not up within {deadline_s:g} s, stopped; {self.why()}")
            time.sleep(_POLL_S)
        return time.monotonic() - started

    def is_ready(self) -> bool:
        try:
            with (
                httpx.Client(timeout=2.0, trust_env=False, verify=False) as http,
                http.stream("GET", self._ready_url) as answer,  # the body is never read
            ):
                return answer.is_success
        except httpx.TransportError:
            return False

    def how_it_ended(self) -> str:
        """Return how the server ended, for example "ended with status 3" or "was killed by signal 9 (SIGKILL)"."""
        said = ending(self.poll() or 0)
        return said if said.startswith("ended") else f"was {said}"

    def why(self) -> str:
        """Return the first error in the log since this start, or else its last lines, as one line without the key."""
        if self.log is None:
            return "see its output"
        said = self.said()
        error = first_error(said)
        text = f"{ERROR_NAMED}{self.log}: {error}" if error else f"{self.log} ends: {last_lines(said, LOG_LINES)}"
        return without(text, self._secret) if self._secret else text


def free_ports(count: int) -> list[int]:
    """Find different ports of loopback that are free now. Raises PortInUseError. Servers bind them seconds later. The
    kernel uses ports from 32768 (Linux) or 49152 (macOS) on for outgoing connections, which could take a port
    meanwhile; FREE_PORTS lies below."""
    found: list[int] = []
    for port in random.SystemRandom().sample(FREE_PORTS, 100 + count):
        if len(found) == count:
            break
        with suppress(PortInUseError):
            check_port_free(port)
            found.append(port)
    if len(found) < count:
        raise PortInUseError(
            f"{100 + count} ports of {FREE_PORTS.start} to {FREE_PORTS.stop - 1} were tried, {len(found)} are free, "
            f"{count} are needed; set rollout.port"
        )
    return found


def free_port() -> int:
    """Return a free port of loopback. Raises PortInUseError."""
    return free_ports(1)[0]


def check_port_free(port: int, address: str = "127.0.0.1") -> None:
    """Raise PortInUseError when something listens on the port of an address of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise PortInUseError(
                f"port {port} is taken ({error.strerror}); stop what listens there, or set rollout.port to another"
            ) from None
