"""Doubles of SGLang and its router over real HTTP, that can be told to fail.

`EngineDouble` samples token t with version v and log-probability -(t + 1) / 8, one token each `token_s`. Paused by
`retract` it holds; paused by `abort` it answers what it has first, and takes up nothing more. The checksum of its one
parameter is its version's number. tests/integration/test_engine.py compares its answers, field by field, with those of
the real server; with `sglang` 0.5.17 it answers as that one did (no spans, no sessions). With `experts` it says, when
asked, that token t at place p went to the experts t + p, t + p + 1, … of each layer that has any. Asked for kept sets,
it says that token t was chosen from itself and the next one, at half the log-probability; as SGLang 0.5.23 does, for
each prompt of a request, but not for several samples of a prompt.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self, get_args

import httpx
import numpy as np

from pipeline.data.routed_experts import ExpertShape
from rollout_sglang.server.update_fence import DRAIN_DEADLINE_S, UPDATE_HEADER, access

GenerateFault = Literal["drop", "400", "500", "hang", "garbage"]
LoadFault = Literal["refuse", "die", "wrong_version", "hang"]
Release = Literal["0.5.17", "0.5.23"]
RELEASES: tuple[Release, ...] = get_args(Release)
Damage = Literal["weights", "answers"]
"""A load that ends well but leaves another checksum than it should, or other log-probabilities."""


LARGEST_MASK = 4096
"""SGLang's --sampling-mask-max-tokens where nobody sets it."""
KV_TOKENS = 1 << 20
PARAMETER = "model.layers.0.self_attn.qkv_proj.weight"


def checksum_of(version: str | int) -> str:
    """Of the double's one parameter, at a version."""
    return f"{int(str(version).rpartition('-')[2]):016x}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, port: int, owner: _Double) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.owner = owner

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        request = json.loads(self.rfile.read(length)) if length else {}
        owner = self.server.owner
        answer = owner.answer(self.command, self.path, request, self.headers)
        if answer is None:
            self.close_connection = True
            return
        status, body = answer
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            for name, value in owner.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = _handle  # noqa: N815
    do_POST = _handle  # noqa: N815
    do_DELETE = _handle  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


MEMORY = ("weights", "kv_cache", "cuda_graph")
WRITING = frozenset({"/update_weights_from_disk", "/update_weights_from_tensor", "/begin_weight_update"})
"""Calls that write to the weights' memory."""


class _Double:
    """A server in threads; a context manager. `stop` and `start` again keep the port."""

    def __init__(self, api_key: str | None = None) -> None:
        self.api_key = api_key
        self.calls: list[str] = []
        self.headers: dict[str, str] = {}
        """Sent with each answer."""
        self.port = 0
        self._server: _Server | None = None
        self._held_port: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._released.clear()
        self._server = _Server(self.port, self)
        self._release_port()
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Connections are refused from now on. The port stays this double's, so that it can start again."""
        self._released.set()
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
            self._held_port = socket.socket()
            self._held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held_port.bind(("127.0.0.1", self.port))

    def _release_port(self) -> None:
        if self._held_port is not None:
            self._held_port.close()
            self._held_port = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._release_port()

    def answer(self, method: str, path: str, request: Any, headers: Mapping[str, str]) -> tuple[int, Any] | None:
        """Status and JSON body, or None to hang up."""
        if path not in ("/health", "/readiness"):
            self.calls.append(f"{method} {path}")
            if self.api_key and headers.get("Authorization") != f"Bearer {self.api_key}":
                return 401, {"success": False, "message": "the API key is missing or wrong"}
        return self.route(method, path, request)

    def route(self, method: str, path: str, request: Any) -> tuple[int, Any] | None:
        raise NotImplementedError


class EngineDouble(_Double):
    """SGLang. `version` is what it serves; faults are used up one a request, the last `load_fault` stays."""

    def __init__(self, version: int = 0, *, api_key: str | None = None, sglang: Release = "0.5.23") -> None:
        super().__init__(api_key)
        self.sglang = sglang
        self.quantization: str | None = None
        self.device: str | None = "cpu"
        self.version = str(version)
        self.model_path = "/initial"
        self.shifted_ids = 0
        """What is added to each id of its tokenizer, which knows characters."""
        self.token_s = 0.0
        self.spans = sglang != "0.5.17"
        self.experts: ExpertShape | None = None
        self.retractions = 0
        """Of each request, beside those by which it was paused."""
        self.kv_use = 0.0
        """Share of its KV_TOKENS that requests use."""
        self.cache_keys: list[str | None] = []
        """Of each request: with whose it shares a prefix cache."""
        self.generate_faults: list[GenerateFault | None] = []
        self.spoil: Callable[[list[dict[str, Any]]], Any] | None = None
        """What is made of the samples of each answer: other samples, or bytes (tests.doubles.bad_answers)."""
        self.load_fault: LoadFault | None = None
        self.loads = 0
        self.shows_checksums = False
        self.memory = set(MEMORY)
        """The parts that it holds on its GPU."""
        self.saves_memory = False
        """Whether it was started with --enable-memory-saver, which its GPU needs."""
        self.nccl = ""
        """The release of NCCL that it says it has loaded."""
        self.moved: tuple[str, ...] = ()
        """Weights that lie elsewhere than when its CUDA graphs were captured."""
        self.stale_graphs_nats = 0.0
        """By how much its graphs compute tokens as less likely than prefill does."""
        self.damages: list[Damage | None] = []
        """What goes wrong unnoticed in the next loads, one after the other."""
        self.damage: Damage | None = None
        self.aborts = 0
        """How often the naming of weights was to abort all requests."""
        self._abort_rounds = 0
        """Those, and each pause by `abort`."""
        self.paused = False
        self.in_place = False
        """Whether the last pause left requests with what they have cached."""
        self.on_pause: Callable[[str], object] = lambda mode: None
        self.highest = 0
        """Number of the latest weight update that called."""
        self._at_work: list[int] = []
        """Numbers of the updates whose calls are under way."""
        self._active = 0
        """Requests taken up and not answered."""
        self._sampled = 0
        """Tokens, of all requests."""
        self._changed = threading.Condition()

    def answer(self, method: str, path: str, request: Any, headers: Mapping[str, str]) -> tuple[int, Any] | None:
        """As behind rollout_sglang.server.update_fence."""
        if access(path) != "fenced" or (self.api_key and headers.get("Authorization") != f"Bearer {self.api_key}"):
            return super().answer(method, path, request, headers)
        number = int(headers.get(UPDATE_HEADER, -1))
        with self._changed:
            if number < self.highest:
                why = "needs the number of a weight update" if number < 0 else f"was overtaken by {self.highest}"
                return 409, {"success": False, "message": why}
            self.highest = number
            if not self._changed.wait_for(lambda: all(one >= number for one in self._at_work), DRAIN_DEADLINE_S):
                return 409, {"success": False, "message": "a call of an earlier update is still at work"}
            if number < self.highest:
                return 409, {"success": False, "message": f"was overtaken by {self.highest}"}
            self._at_work.append(number)
        try:
            return super().answer(method, path, request, headers)
        finally:
            with self._changed:
                self._at_work.remove(number)
                self._changed.notify_all()

    def route(self, method: str, path: str, request: Any) -> tuple[int, Any] | None:
        if path == "/health":
            return 200, {}
        if path.endswith("_memory_occupation"):
            parts = {*(request.get("tags") or MEMORY)}
            self.memory = self.memory | parts if path.startswith("/resume") else self.memory - parts
            return 200, None
        if (fault := self.memory_fault(path)) is not None:
            return fault
        if path == "/model_info":
            return 200, {"model_path": self.model_path, "weight_version": self.version, "is_generation": True}
        if path == "/v1/loads":
            used = round(self.kv_use * KV_TOKENS)
            load = dict(
                num_running_reqs=self._active, num_waiting_reqs=0, num_used_tokens=used, token_usage=self.kv_use
            )
            return 200, {"loads": [load | dict(max_total_num_tokens=KV_TOKENS)]}
        if path == "/tokenize":
            ids = [ord(character) + self.shifted_ids for character in request["prompt"]]
            return 200, {"tokens": ids, "count": len(ids), "max_model_len": 512}
        if path == "/server_info":
            info = {"version": self.sglang, "quantization": self.quantization, "device": self.device}
            return 200, info | {"enable_memory_saver": self.saves_memory}
        if path == "/generate":
            return self._generate(request)
        if path == "/pause_generation":
            self._pause(request["mode"])
            return 200, {"message": "Generation paused successfully.", "status": "ok"}
        if path == "/continue_generation":
            with self._changed:
                self.paused = False
                self._changed.notify_all()
            return 200, {"message": "Generation continued successfully.", "status": "ok"}
        if path == "/update_weights_from_disk":
            return self._load(request)
        if path == "/update_weight_version":
            with self._changed:
                self.version = request["new_version"]
                self.aborts += request["abort_all_requests"]
                self._abort_rounds += request["abort_all_requests"]
                self._changed.notify_all()
            return 200, {"success": True, "message": "Weight version updated", "new_version": self.version}
        if path == "/weights_checker" and self.shows_checksums:
            if request["action"].startswith("stage "):
                return 400, {"success": False, "message": "Unsupported action"}
            named = dict.fromkeys(self.moved, "moved") if request["action"] == "moved" else None
            named = {"nccl": self.nccl} if request["action"] == "nccl" else named
            return 200, {"success": True, "message": "Success.", "ranks": [self._checksums(named)]}
        return 404, {"detail": "Not Found"}

    def memory_fault(self, path: str) -> tuple[int, Any] | None:
        """What a call that touches memory of a part that was released ends in."""
        if (path in WRITING and "weights" not in self.memory) or (path == "/generate" and self.memory != {*MEMORY}):
            return 500, {"error": {"message": "CUDA error: an illegal memory access was encountered"}}
        return None

    async def next_token(self) -> None:
        """Returns when it has sampled one more token, of any request."""
        before = self._sampled

        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self._sampled > before, 30), "nothing is sampled"

        await asyncio.to_thread(wait)

    def _pause(self, mode: str) -> None:
        self.on_pause(mode)
        with self._changed:
            self.paused, self.in_place = True, mode == "in_place"
            if mode == "abort":
                self._abort_rounds += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._active == 0, 30)

    def _checksums(self, named: dict[str, str] | None) -> dict[str, Any]:
        digest = "f" * 16 if self.damage == "weights" else checksum_of(self.version)
        place = {"tp_rank": 0, "tp_size": 1}
        checksums = {PARAMETER: digest} if named is None else named
        return {"checksums": checksums, "parallelism_info": place if self.sglang == "0.5.17" else [place]}

    def _load(self, request: Any) -> tuple[int, Any] | None:
        self.loads += 1
        if self.load_fault == "refuse":
            return 400, {"success": False, "message": "Failed to get weights\niterator", "num_paused_requests": 0}
        if self.load_fault == "hang":
            self._released.wait(30)
            return None
        if self.load_fault == "die":
            threading.Thread(target=self.stop, daemon=True).start()
            self._released.wait(30)
            return None
        if request.get("flush_cache", True) and self.in_place and self._active:
            return 400, {"success": False, "message": "Weights were updated, but the cache was not flushed"}
        if self.load_fault != "wrong_version":
            self.version, self.model_path = request["weight_version"], request["model_path"]
            self.damage = self.damages.pop(0) if self.damages else None
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _generate(self, request: Any) -> tuple[int, Any] | None:
        fault = self.generate_faults.pop(0) if self.generate_faults else None
        if fault == "drop":
            return None
        if fault == "400":
            return 400, {"error": {"message": "The input is too long"}}
        if fault == "500":
            return 500, {"error": {"message": "Internal error"}}
        if fault == "garbage":
            return 200, [{"text": "no ids"}]
        if fault == "hang":
            self._released.wait(30)
            return None
        with self._changed:
            rounds = self._abort_rounds
            self.cache_keys.append(request.get("extra_key"))
            self._changed.wait_for(lambda: not self.paused, 30)
            if self.sglang == "0.5.17" and self._abort_rounds > rounds:
                return 499, {"error": {"message": "Request 0 was aborted"}}
            self._active += 1
        try:
            if request.get("return_sampling_mask") and request["sampling_params"].get("n", 1) > 1:
                return 500, {"message": "The sampling backend did not return captured sampling support."}
            samples = self._sample(request)
            return 200, samples if self.spoil is None else self.spoil(samples)
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def _sample(self, request: Any) -> list[dict[str, Any]]:
        sampling = request["sampling_params"]
        rows = [row for row in request["input_ids"] for _ in range(sampling.get("n", 1))]
        started, versions, rounds = time.monotonic(), [], self._abort_rounds
        for _ in range(sampling["max_new_tokens"]):
            time.sleep(self.token_s)
            with self._changed:  # last: a paused engine samples nothing
                self._changed.wait_for(lambda: not self.paused or self._abort_rounds > rounds, 30)
            if self._abort_rounds > rounds:
                break
            versions.append(self.version)
            with self._changed:
                self._sampled += 1
                self._changed.notify_all()
        seconds = time.monotonic() - started
        return [self._answer_of(row, index, versions, seconds, request) for index, row in enumerate(rows)]

    def _answer_of(
        self, row: list[int], index: int, versions: list[str], seconds: float, request: Any
    ) -> dict[str, Any]:
        tokens = [(index + place) % 512 for place in range(len(versions))]
        scored: list[list[Any]] = []
        if (start := request.get("logprob_start_len")) is not None:
            wrong, asked = -0.5 if self.damage == "answers" else 0.0, row[start:]
            scored = [[wrong - (token + 1) / 8 if place else None, token, None] for place, token in enumerate(asked)]
        wanted = request["sampling_params"]["max_new_tokens"]
        meta = {
            "id": f"{index}",
            "finish_reason": {"type": "abort" if len(tokens) < wanted else "length", "length": len(tokens)},
            "prompt_tokens": len(row),
            "completion_tokens": len(tokens),
            "weight_version": versions[-1] if versions and self.spans else self.version,
            "input_token_logprobs": scored,
            "output_token_logprobs": [
                [-(token + 1) / 8 - (self.stale_graphs_nats if place else 0.0), token, None]
                for place, token in enumerate(tokens)
            ],
            "e2e_latency": seconds,
            "num_retractions": self.retractions,
        }
        if self.spans:
            meta["weight_versions"] = _spans(versions or [self.version], len(versions))
            meta["num_retractions"] = self.retractions + (0 if self.in_place else len(meta["weight_versions"]) - 1)
        if self.experts is not None and request.get("return_routed_experts"):
            meta["routed_experts"] = _routes([*row, *tokens], self.experts)
        if self.sglang != "0.5.17" and request.get("return_sampling_mask"):
            assert 1 <= request["sampling_params"]["top_k"] <= LARGEST_MASK  # SGLang answers 400
            meta["output_token_sampling_mask"] = [[token + 1, token] for token in tokens]
            meta["output_token_sampling_logprobs"] = [-(token + 1) / 16 for token in tokens]
            meta["output_token_sampling_mask_length"] = len(tokens)
        return {"text": "", "output_ids": tokens, "meta_info": meta}


def _spans(versions: list[str], num_tokens: int) -> list[dict[str, Any]]:
    starts = [place for place, version in enumerate(versions) if not place or version != versions[place - 1]]
    ends = [*starts[1:], num_tokens]
    return [{"version": versions[start], "start": start, "end": end} for start, end in zip(starts, ends, strict=True)]


def _routes(tokens: list[int], shape: ExpertShape) -> str:
    rows = np.zeros((len(tokens) - 1, shape.num_layers, shape.per_token), "<i4")
    first = np.array(tokens[:-1]) + np.arange(len(tokens) - 1)
    chosen = (first[:, None] + np.arange(shape.per_token)) % shape.num_experts
    rows[:, list(shape.moe_layers)] = chosen[:, None]
    return base64.b64encode(rows.tobytes()).decode()


class RouterDouble(_Double):
    """SGLang's router: passes /generate on to its members in turn, without looking at their health.

    It drops fields that it does not know, as the real one (0.3.2) was seen to do with these two.
    """

    UNKNOWN = ("return_sampling_mask", "return_routed_experts")

    def __init__(self, urls: list[str], *, api_key: str | None = None) -> None:
        super().__init__(api_key)
        self.members = list(urls)
        self._turn = 0

    def route(self, method: str, path: str, request: Any) -> tuple[int, Any] | None:
        if path == "/readiness":
            return (200 if self.members else 503), {"status": "ready" if self.members else "not ready"}
        if path == "/generate":
            return self._pass_on(request)
        if method == "GET" and path == "/workers":
            workers = [{"id": Path(url).name, "url": url, "is_healthy": True} for url in self.members]
            return 200, {"workers": workers, "total": len(workers)}
        if method == "POST" and path == "/workers":
            self.members.append(request["url"])
            return 202, {"status": "accepted", "worker_id": Path(request["url"]).name}
        if method == "DELETE":
            self.members = [url for url in self.members if Path(url).name != Path(path).name]
            return 202, {"status": "accepted", "worker_id": Path(path).name}
        return 404, {"detail": "Not Found"}

    def _pass_on(self, request: Any) -> tuple[int, Any]:
        if not self.members:
            return 503, {"error": {"code": "no_available_workers"}}
        self._turn += 1
        request = {name: value for name, value in request.items() if name not in self.UNKNOWN}
        url = self.members[self._turn % len(self.members)]
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            response = httpx.post(f"{url}/generate", json=request, headers=headers, timeout=30.0, trust_env=False)
        except httpx.TransportError:
            return 502, {"error": {"code": "connection_failed"}}
        return response.status_code, response.json()
