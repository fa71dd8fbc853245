"""Answers of an engine or a router: recorded ones of a real server, changed, sent as bytes over a real connection.

What a client makes of one is refused in one line, or harmless: what it returns is then looked at by other rules than
the product's own, goes into a batch and through a store, and is looked at again.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.batch import Batch, Completion, Group, LogprobContract, Prompt, Sample, Sampling
from pipeline.data.batch_values import Limits
from pipeline.data.routed_experts import ExpertShape
from pipeline.data.store import BatchStore
from pipeline.errors import EvenKeelError, StoreError
from rollout_sglang.client import EngineClient
from rollout_sglang.engine_pool import RouterClient
from tests.chaos.malformed.mutations import NASTY, judged_line, mutated_bytes, mutated_data
from tests.doubles.bad_answers import BAD_ANSWERS
from tests.support.recorded_answers import PROMPT, SCORED, recorded

COUNT = 4000
IN_MAKE_TEST = 40
VOCABULARY = 512
DEADLINE_S = 5.0
EXPERTS = ExpertShape(num_layers=2, moe_layers=(1,), num_experts=16, per_token=2)
CONTRACT = dict(temperature=1.0, top_k=-1, tokenizer_sha256="")
_WORKERS = {"workers": [{"id": "a", "url": "http://127.0.0.1:1", "is_healthy": True}], "total": 1}
_HUNG_UP = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError)
_UPDATED = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


@dataclass(frozen=True)
class Call:
    """What is asked, and the good answer."""

    answer: Any
    ask: Callable[[str], Awaitable[Any]]
    sampling: Sampling | None = None


@dataclass(frozen=True)
class Answer:
    """What is sent: a whole answer of a server, as bytes."""

    head: bytes
    body: bytes


def prepare() -> None:
    """Imports and reads what the tries need."""
    calls()


def attempt(seed: int, folder: Path) -> str:
    """Ask a server that gives the changed answer."""
    rng = random.Random(f"answers/{seed}")
    call = _chosen(rng)
    answer = _changed(rng, call.answer)
    try:
        found = asyncio.run(_ask(call, answer))
    except EvenKeelError as error:
        return judged_line(str(error))
    if call.sampling is None:
        return _looked_at(found)
    fault = _impossible(found, call.sampling)
    return fault or _in_the_ledger(found, call.sampling, folder) or "ok"


@cache
def calls() -> dict[str, Call]:
    """Name → call. Those that sample are drawn most."""
    real = recorded()
    plain = Sampling(max_new_tokens=6, vocab_size=VOCABULARY)
    kept = Sampling(max_new_tokens=4, vocab_size=VOCABULARY, top_p=0.8, top_k=20, kept_set=True)
    routed = Sampling(max_new_tokens=6, vocab_size=VOCABULARY, experts=EXPERTS)
    return {
        "generate": Call(real["generate"], _generate(plain, 3), plain),
        "kept": Call(real["kept"], _generate(kept, 2), kept),
        "routed": Call([_with_routes(sample) for sample in real["generate"]], _generate(routed, 3), routed),
        "scores": Call(real["scores"], _engine(lambda client: client.prompt_logprobs(SCORED))),
        "model_info": Call(real["model_info"], _engine(lambda client: client.model_info())),
        "server_info": Call(real["server_info"], _engine(lambda client: client.pause())),
        "checksums": Call(real["checksums"], _engine(lambda client: client.checksums(deadline_s=DEADLINE_S))),
        "formats": Call(real["formats"], _engine(lambda client: client.formats(deadline_s=DEADLINE_S))),
        "updated": Call(
            _UPDATED, _engine(lambda client: client.update_from_disk(1, Path("/tmp"), deadline_s=DEADLINE_S))
        ),
        "workers": Call(_WORKERS, _router),
    }


def _chosen(rng: random.Random) -> Call:
    sampling, others = ("generate",) * 4 + ("kept", "kept", "routed"), list(calls())[3:]
    return calls()[rng.choice(sampling if rng.random() < 0.7 else others)]


def _generate(sampling: Sampling, num_samples: int) -> Callable[[str], Awaitable[Any]]:
    return _engine(lambda client: client.generate(PROMPT, num_samples, sampling))


def _engine(call: Callable[[EngineClient], Awaitable[Any]]) -> Callable[[str], Awaitable[Any]]:
    async def ask(url: str) -> Any:
        client = EngineClient(url, None, index=3, request_deadline_s=DEADLINE_S, update=1)
        try:
            return await call(client)
        finally:
            await client.close()

    return ask


async def _router(url: str) -> Any:
    client = RouterClient(url, None)
    try:
        return await client.workers()
    finally:
        await client.close()


def _with_routes(sample: Any) -> Any:
    tokens = [*PROMPT, *sample["output_ids"]]
    rows = np.zeros((len(tokens) - 1, EXPERTS.num_layers, EXPERTS.per_token), "<i4")
    rows[:, 1] = [[token % 8, 8 + token % 8] for token in tokens[:-1]]
    routes = base64.b64encode(rows.tobytes()).decode()
    return {**sample, "meta_info": {**sample["meta_info"], "routed_experts": routes}}


def _changed(rng: random.Random, good: Any) -> Answer:
    """The body is changed, or what is said about it, or both."""
    status, headers = 200, {"Content-Type": "application/json", "Connection": "close"}
    how = rng.random()
    if how < 0.55:
        body = _json(rng, _values_changed(rng, good))
    elif how < 0.8:
        body = mutated_bytes(rng, json.dumps(good).encode())
    elif how < 0.88:
        body = _spoilt(rng, good)
    else:
        body = rng.choice((json.dumps(good).encode(), _json(rng, rng.choice(NASTY)), b"", b"\0" * 5000, b"[" * 200_000))
    headers["Content-Length"] = str(len(body))
    if rng.random() < 0.25:
        status, body = _told_otherwise(rng, status, headers, body)
    lines = [f"HTTP/1.1 {status} {rng.choice(('OK', '', 'x' * 50))}", *(f"{name}: {headers[name]}" for name in headers)]
    return Answer("\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape"), body)


def _values_changed(rng: random.Random, good: Any) -> Any:
    """Values anywhere, most of them in the samples' lists of numbers, where few places would be drawn otherwise."""
    changed = mutated_data(rng, good) if rng.random() < 0.5 else json.loads(json.dumps(good))
    if isinstance(changed, list) and changed and isinstance(changed[0], dict) and rng.random() < 0.7:
        meta = changed[rng.randrange(len(changed))]
        meta = meta.get("meta_info", meta) if isinstance(meta, dict) else {}
        rows = meta.get("output_token_logprobs") if isinstance(meta, dict) else None
        if isinstance(rows, list) and rows and isinstance(rows[0], list):
            rng.choice(rows)[:1] = [rng.choice(_NUMBERS)]
        elif isinstance(meta, dict) and meta:
            meta[rng.choice(list(meta))] = rng.choice((*_NUMBERS, *NASTY))
    return changed


_NUMBERS = (float("nan"), float("inf"), -float("inf"), 5.0, 1e-3, 1e-6, -1e39, -1e38, -200.0, -1e-300, -0.0, 0, -5,
            10**30, True, None, "-1", 2**31, 2**63, 512, 511, -1)  # fmt: skip


def _spoilt(rng: random.Random, good: Any) -> bytes:
    """One of the answers of a broken engine."""
    try:
        found = BAD_ANSWERS[rng.choice(list(BAD_ANSWERS))](good)
    except (TypeError, KeyError, AttributeError):  # it is about samples, and these are none
        found = None
    return found if isinstance(found, bytes) else json.dumps(found).encode()


def _json(rng: random.Random, value: Any) -> bytes:
    separators = rng.choice(((",", ":"), (", ", ": "), (" ,\n", "\t: ")))
    text = json.dumps(value, separators=separators, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def _told_otherwise(rng: random.Random, status: int, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    how = rng.choice(("status", "length", "encoding", "gzip", "chunks", "type", "header", "half"))
    if how == "status":
        status = rng.choice((201, 204, 206, 301, 302, 304, 400, 401, 403, 404, 409, 418, 429, 499, 500, 503, 599, 999))
        headers["Location"] = "http://192.0.2.1/"
    elif how == "length":
        headers["Content-Length"] = rng.choice(
            ("0", "1", str(len(body) * 10), str(10**12), "9" * 400, "-1", "a", "1, 2")
        )
    elif how == "encoding":
        headers["Content-Encoding"] = rng.choice(("gzip", "br", "deflate", "zstd", "identity", "x" * 300, "\udcff"))
    elif how == "gzip":
        body = gzip.compress(b"[" + b" " * (1 << 24) + b"]")
        headers |= {"Content-Encoding": "gzip", "Content-Length": str(len(body))}
    elif how == "chunks":
        del headers["Content-Length"]
        headers["Transfer-Encoding"] = "chunked"
        size = rng.choice((f"{len(body):x}", "FFFFFFFFFFFFFFF", "-1", "0", "g")).encode()
        body = size + b"\r\n" + body + b"\r\n0\r\n\r\n"
    elif how == "type":
        headers["Content-Type"] = rng.choice(("text/html; charset=rot13", "a/b; charset=unicode_escape", "", "x" * 999))
    elif how == "header":
        headers["X-Own"] = rng.choice(("a" * 200_000, "\x01", "a\r\n b", "ü"))
    else:
        body = body[: len(body) // 2]
    return status, body


async def _ask(call: Call, answer: Answer) -> Any:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, *_HUNG_UP):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1]
            length = next(
                (int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-le")), 0
            )
            await reader.readexactly(length)
            other = call.answer == recorded()["server_info"] and path != b"/server_info"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}" if other else answer.head + answer.body)
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        return await call.ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()


def _impossible(found: Sequence[Completion], sampling: Sampling) -> str | None:
    """What no engine can have sampled, by rules of this file."""
    for sample in found:
        tokens, logprobs, versions = (row.tolist() for row in (sample.tokens, sample.logprobs, sample.versions))
        rows = (tokens, logprobs, versions, sample.loss_mask)
        if len({len(row) for row in rows}) != 1 or len(tokens) > sampling.max_new_tokens:
            return f"lengths {[len(row) for row in rows]} of at most {sampling.max_new_tokens}"
        if not tokens and sample.finish != "abort":
            return "an empty response"
        if not all(type(token) is int and 0 <= token < VOCABULARY for token in tokens):
            return f"tokens {tokens!a:.100}"
        if not all(isinstance(x, int | float) and math.isfinite(x) and -1000 < x <= 1e-4 for x in logprobs):
            return f"log-probabilities {logprobs!a:.100}"
        if not all(type(version) is int and 0 <= version < 1 << 31 for version in versions):
            return f"versions {versions!a:.100}"
        if not all(math.isfinite(x) and 0 <= x < 1e6 for x in (sample.queued_s, sample.generated_s)):
            return f"seconds {sample.queued_s}, {sample.generated_s}"
        if sample.kept is not None and not np.all((sample.kept.tokens >= 0) & (sample.kept.tokens < VOCABULARY)):
            return "kept sets outside of the vocabulary"
        if sample.experts is not None and sample.experts.ids.size and sample.experts.ids.max() >= EXPERTS.num_experts:
            return "an expert that there is not"
    return None


def _in_the_ledger(found: Sequence[Completion], sampling: Sampling, folder: Path) -> str | None:
    """Samples that were accepted and did not abort are committed and come back."""
    samples = tuple(Sample(completion=one, reward=1.0) for one in found if one.finish != "abort")
    prompt = Prompt(group=0, text="", answer="", tokens=tuple(PROMPT))
    contract = LogprobContract(**CONTRACT, top_p=sampling.top_p, kept_set=sampling.kept_set)  # type: ignore[arg-type]
    batch = Batch.from_groups(
        0, [Group(prompt=prompt, samples=samples)], contract=contract, dropped=(), next_group=1, recipe_sha256=""
    )
    limits = Limits(vocab_size=VOCABULARY, max_response_tokens=sampling.max_new_tokens, num_experts=16)
    store = BatchStore(folder, limits=limits)
    try:
        store.commit(batch)
        read = store.read(0, contract)
    except StoreError as error:
        return f"accepted by the client, refused by the store: {error!s:.300}"
    if not np.all(np.isfinite(read.rollout_logprobs) & (read.rollout_logprobs <= 1e-4)):
        return "log-probabilities that cannot be are in the ledger"
    return None


def _looked_at(found: Any) -> str:
    """Of other answers: what was taken over is small, and of the kinds that their readers expect."""
    for row in found if isinstance(found, list) else []:
        if isinstance(row, np.ndarray) and not np.all(np.isfinite(row) & (row <= 1e-4)):
            return f"scores {row!s:.100}"
    return "ok"
