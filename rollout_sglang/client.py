"""Call one SGLang server: sample and score tokens, query and update its weights. Also use teacher servers in turn."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from pipeline import spans
from pipeline.config.sections import MOST_KEPT
from pipeline.data.batch import Completion, Sampling
from pipeline.errors import (
    BadAnswerError,
    EngineUnavailableError,
    EngineVersionError,
    FatalError,
    RecipeError,
    RetryableError,
)
from pipeline.ports.load import EngineLoad
from pipeline.ports.weights import ProcessGroupSpec, TensorSpec
from precision.formats.audit import Held
from precision.settings import problem_of
from precision.text import one_line, quoted
from rollout_sglang.answers import (
    SAMPLE_BYTES,
    SCORE_BYTES,
    TOKEN_BYTES,
    Asked,
    SampleReader,
    completion_reader,
    input_logprobs,
    read_answer,
    tempered_totals,
)
from rollout_sglang.protocol import (
    ABORTED,
    ASLEEP,
    FORMATS,
    INVALIDATED,
    MOVED,
    NCCL,
    STAGE,
    STATISTICS,
    UNKNOWN_ENGINE,
    UNVERIFIED,
    Checksums,
    Dialect,
    Generated,
    Loads,
    ModelInfo,
    ServerInfo,
    Tokenized,
    Updated,
    claimed_version,
    dialect_of,
)
from rollout_sglang.transport import LOOK_DEADLINE_S, Transport

REPORT_BYTES = 1 << 26
"""Limit for a report about all parameters: some 200 bytes for each of 8 × 18,000, in a mixture of 48 layers, 128
experts."""
_FIRST_POLL_S, _LONGEST_POLL_S = 0.004, 0.05
CONTROL_DEADLINE_S = 30.0
"""For calls that an engine answers between two of its steps: pause, continue, names of weights."""

T = TypeVar("T")


class EngineClient:
    """A client of the server at `url`; `index` names the engine in records. Every method raises EngineUnavailableError
    when the server refuses, drops, garbles or never answers the call, and FatalError for a wrong key or request."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        index: int,
        request_deadline_s: float,
        update: int | None = None,
        keeps_kv: bool = False,
    ) -> None:
        """Calls about weights belong to the weight update `update`, a number of rollout_sglang.weights.update_lease;
        engines refuse them without a number. `keeps_kv`: requests under way continue over the keys and values of the
        old weights (weights.kv_cache of a recipe)."""
        self.url = url.rstrip("/")
        self.index = index
        self._part = "router" if index == UNKNOWN_ENGINE else f"engine {index}"
        self._request_deadline_s = request_deadline_s
        self._control_deadline_s = min(CONTROL_DEADLINE_S, request_deadline_s)
        self._keeps_kv = keeps_kv
        self._transport = Transport(url, api_key)
        self._transport.update = update
        self._known_dialect: Dialect | None = None
        self._staging = False
        self.while_alive = self._transport.while_alive

    def take_part(self, update: int, *, staging: bool = False) -> None:
        """Belong to another weight update from now on. `staging`: another sender has had the engine `stage` it."""
        self._transport.update, self._staging = update, staging

    async def dialect(self) -> Dialect:
        """Return the server's dialect, queried once. Raises EngineUnavailableError when the server names no version."""
        if self._known_dialect is None:
            answer = await self._transport.call("GET", "/server_info", deadline_s=self._control_deadline_s)
            try:
                self._known_dialect = dialect_of(ServerInfo.model_validate_json(answer.content))
            except ValidationError:
                raise EngineUnavailableError(
                    f"{self.url}/server_info names no version of SGLang; see which program listens there"
                ) from None
        return self._known_dialect

    async def generate(
        self, prompt_tokens: Sequence[int], num_samples: int, sampling: Sampling, cache_key: str | None = None
    ) -> list[Completion]:
        """Sample a group in one request. Log-probabilities are of softmax(logits / temperature), before top-p and
        top-k. With `sampling.kept_set` they are renormalized over the tokens that top-p and top-k keep, and each
        completion holds its kept sets. Samples of an aborted request have the tokens sampled so far, or none. Where
        keys and values are kept, requests with the same `cache_key` alone share them."""
        _require_tokens([prompt_tokens], sampling.vocab_size)
        started = time.monotonic()
        asked = Asked(
            num_prompt=len(prompt_tokens),
            num_samples=num_samples,
            sampling=sampling,
            keeps_kv=self._keeps_kv,
            late_tokens=int(self._keeps_kv and (await self.dialect()).overlaps),
        )
        # For n samples SGLang (0.5.23) first prefills the prompt with a request for no new tokens. That request has no
        # kept sets, so with kept sets SGLang refuses all. Equal prompts share their prefill too.
        copies, n = (num_samples, 1) if sampling.kept_set else (1, num_samples)
        completions = await self._generate(
            {
                "input_ids": [list(prompt_tokens)] * copies,
                "sampling_params": {
                    "n": n,
                    "max_new_tokens": sampling.max_new_tokens,
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": MOST_KEPT if sampling.kept_set and sampling.top_k == -1 else sampling.top_k,
                    **({"stop_token_ids": [*sampling.stop_tokens]} if sampling.stop_tokens else {}),
                },
                "return_logprob": True,
                **({} if sampling.experts is None else {"return_routed_experts": True}),
                **({"return_sampling_mask": True} if sampling.kept_set else {}),
                **({"extra_key": cache_key} if self._keeps_kv and cache_key is not None else {}),
            },
            most_bytes=SAMPLE_BYTES + num_samples * asked.sample_bytes,
            reader=lambda: completion_reader(asked, engine=self.index, waited_s=lambda: time.monotonic() - started),
        )
        ended = time.monotonic()
        spans.note(f"{self._part}/requests", "request", started, ended, prompt=len(prompt_tokens), samples=num_samples)
        if completions is None:
            nothing = Completion.given((), ())
            return [replace(nothing, finish="abort", engine=self.index, queued_s=ended - started)] * num_samples
        return completions

    async def prompt_logprobs(self, rows: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Score prompts by prefill: return for each row of n tokens [n - 1] log-probabilities of tokens 1…n-1 given the
        tokens before. At temperature 1: SGLang does not scale the log-probabilities of input tokens."""
        return await self._prefill(rows, {}, 0, lambda number, sample: input_logprobs(rows[number], sample))

    async def response_logprobs(
        self, prompt: Sequence[int], responses: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        """Score responses to a prompt of at least one token by prefill: return for each [tokens] log-probabilities at
        temperature 1. The server may prefill the prompt once for all responses, because its tokens are not scored."""
        rows, start = [[*prompt, *response] for response in responses], len(prompt) - 1
        return await self._prefill(
            rows, {"logprob_start_len": start}, 0, lambda number, sample: input_logprobs(rows[number][start:], sample)
        )

    async def tokenize(self, text: str) -> list[int]:
        """Return the ids that the server's own tokenizer makes of a text, without special tokens at its ends."""
        request = {"prompt": text, "add_special_tokens": False}
        answer = await self._transport.call(
            "POST", "/tokenize", deadline_s=self._control_deadline_s, json=request, most_bytes=REPORT_BYTES
        )
        return _parse(TypeAdapter(Tokenized), answer).tokens

    async def tempered_prompt_logprobs(
        self,
        rows: Sequence[Sequence[int]],
        temperature: float,
        vocab_size: int,
        kept: Sequence[Sequence[NDArray[np.int32]]] | None = None,
    ) -> list[NDArray[np.float32]]:
        """Score prompts as `prompt_logprobs` does, at another temperature: log p / T - log sum p'^(1/T) over the whole
        distribution p' of each token. For small vocabularies: an answer holds vocab_size numbers per token. `kept`
        restricts that sum: for each row, the ids over which tokens 1…n-1 are renormalized (an empty set: all ids)."""

        def score(number: int, sample: Generated) -> NDArray[np.float32]:
            sets = () if kept is None else kept[number]
            totals = tempered_totals(rows[number], sample, temperature, sets)
            return (input_logprobs(rows[number], sample) / temperature - totals).astype(np.float32)

        return await self._prefill(rows, {"top_logprobs_num": vocab_size}, vocab_size, score)

    async def _prefill(
        self,
        rows: Sequence[Sequence[int]],
        options: dict[str, Any],
        vocab_size: int,
        read: Callable[[int, Generated], NDArray[np.float32]],
    ) -> list[NDArray[np.float32]]:
        """Return the result of `read` for the answer to each row."""
        _require_tokens(rows)
        # More than any valid answer needs for a row, with the scores of `vocab_size` candidates for each token.
        token_bytes = TOKEN_BYTES + (1 + vocab_size) * SCORE_BYTES
        row_bytes = [SAMPLE_BYTES + len(row) * token_bytes for row in rows]
        scores = await self._generate(
            {
                "input_ids": [list(row) for row in rows],
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                **options,
            },
            most_bytes=SAMPLE_BYTES + sum(row_bytes),
            reader=lambda: SampleReader(read, expected=len(rows), sample_bytes=max(row_bytes, default=0)),
        )
        if scores is None:
            raise EngineUnavailableError(f"engine {self.index} at {self.url} aborted the scoring of prompts; ask again")
        return scores

    async def model_info(self, deadline_s: float | None = None) -> ModelInfo:
        """Return the folder and version that the server serves. Even a busy engine answers at once."""
        deadline_s = self._control_deadline_s if deadline_s is None else deadline_s
        answer = await self._transport.glance("/model_info", deadline_s=deadline_s)
        return _parse(TypeAdapter(ModelInfo), answer)

    async def load(self, deadline_s: float) -> EngineLoad:
        """Return what the server has to do, as of its last step. Even a busy engine answers at once."""
        answer = await self._transport.glance("/v1/loads", deadline_s=deadline_s)
        ranks = _parse(TypeAdapter(Loads), answer).loads
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs for rank in ranks),
            live_tokens=sum(rank.num_used_tokens for rank in ranks),
            kv_tokens=sum(rank.max_total_num_tokens for rank in ranks),
            kv_use=max((rank.token_usage for rank in ranks), default=0.0),
        )

    async def health(self, deadline_s: float = LOOK_DEADLINE_S) -> bool:
        """Return whether the server says that it is well. It does not sample to answer: a busy server answers too."""
        try:
            await self._transport.glance("/health", deadline_s=min(deadline_s, self._control_deadline_s))
        except EngineUnavailableError:
            return False
        return True

    async def pause(self) -> None:
        """Stop sampling. Requests under way go on after `resume` with the weights of that time: retracted, so that
        their tokens are prefilled again, or in place where keys and values are kept. A server that cannot attribute
        tokens to versions aborts requests instead (Dialect.pause). A paused engine answers control calls and checksums,
        but scores no prompts."""
        mode = (await self.dialect()).pause
        request = {"mode": "in_place" if self._keeps_kv and mode == "retract" else mode}
        await self._transport.call("POST", "/pause_generation", deadline_s=self._control_deadline_s, json=request)

    async def resume(self) -> None:
        """Sample again. No effect on an engine that is not paused."""
        request = {"torch_empty_cache": False}
        await self._transport.call("POST", "/continue_generation", deadline_s=self._control_deadline_s, json=request)

    async def sleep(self, *, deadline_s: float) -> None:
        """Give the memory of weights, keys, values and CUDA graphs back to the GPU; requests under way wait, as after
        `pause`. The contents are lost: `wake`, and weights, must follow. No effect on an engine that sleeps."""
        await self.pause()
        # First the name: nobody takes an engine that dies in between for one that serves.
        await self._ask("/update_weight_version", {"new_version": ASLEEP, "abort_all_requests": False})
        await self._transport.call("POST", "/release_memory_occupation", deadline_s=deadline_s, json={})

    async def wake(self, *parts: Literal["weights", "kv_cache", "cuda_graph"], deadline_s: float) -> None:
        """Take the memory of these parts from the GPU again, by default of all. No effect where it is there."""
        request = {"tags": list(parts)} if parts else {}
        await self._transport.call("POST", "/resume_memory_occupation", deadline_s=deadline_s, json=request)

    async def stage_folder(self, directory: Path, *, deadline_s: float) -> bool:
        """Have the weights of `directory` loaded and hashed while the engine serves; `update_from_disk` of the folder
        is then nearly instant. Return False where the server cannot stage. Raises EngineVersionError when staging
        fails, or a later weight update has overtaken this one."""
        order = {"do": "folder", "folder": str(directory.absolute())}
        if not (await self.dialect()).stages or await self._order(order) is None:
            return False
        await self._staged(deadline_s)
        return True

    async def update_from_disk(self, version: int, directory: Path, *, deadline_s: float) -> None:
        """Load the weights of `directory`, a folder that the engine can read, as `version`, unverified. Call it between
        `pause` and `resume`. Raises EngineVersionError when the engine does not take the weights."""
        request = {
            "model_path": str(directory.absolute()),
            "weight_version": f"{UNVERIFIED}{version}",
            # Cached prefixes belong to the old weights. SGLang refuses to drop prefixes that requests use.
            "flush_cache": not self._keeps_kv,
            "keep_pause": True,
        }
        path = "/update_weights_from_disk"
        answer = await self._transport.call("POST", path, deadline_s=deadline_s, json=request, accept=(400,))
        updated = _parse(TypeAdapter(Updated), answer)
        if not updated.success:
            raise EngineVersionError(
                f"engine {self.index} at {self.url} did not take version {version} from {directory}: "
                f"{one_line(updated.message, 400)}; check that the folder is complete and readable there"
            )

    async def verify(self, version: int) -> None:
        """Raise EngineVersionError unless the engine claims `version`, verified or not."""
        served = (await self.model_info()).weight_version
        if claimed_version(served) != version:
            raise EngineVersionError(
                f"engine {self.index} at {self.url} serves version {served}, expected {version}; it gets no requests "
                "until it has been given weights again"
            )

    async def checksums(self, action: str = "checksum", *, deadline_s: float) -> list[dict[str, str]] | None:
        """Return for each tensor parallel rank parameter → digest of the engine's weights. None when the server has no
        such route (older releases) or refuses the engine's quantization (newer releases)."""
        path = "/weights_checker"
        request = {"action": action}
        answer = await self._transport.call(
            "POST", path, deadline_s=deadline_s, json=request, accept=(400, 404), most_bytes=REPORT_BYTES
        )
        if answer.status_code == 404:
            return None
        found = _parse(TypeAdapter(Checksums), answer)
        if not found.success:
            return None
        ranks = sorted(found.ranks, key=lambda rank: rank.parallelism_info[0].tp_rank)
        return [dict(rank.checksums) for rank in ranks]

    async def formats(self, *, deadline_s: float, statistics: bool = False) -> list[dict[str, Held]] | None:
        """Return for each tensor parallel rank module → the format in which the engine holds it; with `statistics`, its
        scales and norm as well. None when the server has no such route or was not started by this package."""
        ranks = await self.checksums(STATISTICS if statistics else FORMATS, deadline_s=deadline_s)
        if ranks is None:
            return None
        try:
            return [{name: Held.from_json(text) for name, text in rank.items()} for rank in ranks]
        except ValueError as error:
            raise EngineUnavailableError(
                f"engine {self.index} at {self.url} describes its weights otherwise than this version: "
                f"{one_line(error, 300)}; start it with this version of Even Keel"
            ) from error

    async def moved_weights(self, *, deadline_s: float) -> list[str]:
        """Return the names of weights that lie elsewhere than when the engine captured CUDA graphs: its graphs still
        read the old ones. Empty where the server cannot tell."""
        ranks = await self.checksums(MOVED, deadline_s=deadline_s)
        return sorted({name for rank in ranks or () for name in rank})

    async def nccl(self) -> str:
        """Return the release of NCCL that the engine has loaded; empty without one, and where the server cannot tell:
        it was not started by this package."""
        ranks = await self.checksums(NCCL, deadline_s=self._control_deadline_s)
        return next((rank.get(NCCL, "") for rank in ranks or ()), "")

    async def name(self, version: int) -> None:
        """Name the engine's weights `version`, as verified. Requests under way go on."""
        request = {"new_version": str(version), "abort_all_requests": False}
        await self._transport.call("POST", "/update_weight_version", deadline_s=self._control_deadline_s, json=request)

    async def invalidate(self) -> None:
        """Take the engine's version away and abort its requests: their tokens may come from wrong weights."""
        request = {"new_version": INVALIDATED, "abort_all_requests": True}
        await self._transport.call("POST", "/update_weight_version", deadline_s=self._control_deadline_s, json=request)

    async def close(self) -> None:
        await self._transport.close()

    async def _generate(
        self, request: dict[str, Any], *, most_bytes: int, reader: Callable[[], SampleReader[T]]
    ) -> list[T] | None:
        """Return a reader's result for the answer; None when the request was aborted before it had a sample."""

        async def take(response: httpx.Response, parts: AsyncIterator[bytes]) -> list[T] | None:
            return None if response.status_code == ABORTED else await read_answer(parts, reader())

        if self._keeps_kv:  # prefixes cached by other requests may be of older weights: a unique key hides them
            request = {"extra_key": secrets.token_hex(8)} | request
        options: dict[str, Any] = dict(json=request, accept=(ABORTED,), most_bytes=most_bytes)
        try:
            return await self._transport.read("POST", "/generate", take, deadline_s=self._request_deadline_s, **options)
        except BadAnswerError as error:
            raise BadAnswerError(f"engine {self.index} at {self.url}: {error}; the answer is thrown away") from error

    # Weights sent as tensors. No call below is repeated: it would wait for a second broadcast. Each raises
    # EngineVersionError when the engine answers that it failed.

    async def stage(self) -> bool:
        """Have the engine take its next weights while it serves. Return False where it cannot: use `begin_update`."""
        self._staging = False
        with suppress(EngineVersionError):
            self._staging = (await self.dialect()).stages and await self._order({"do": "begin"}) is not None
        return self._staging

    async def finish_stage(self, folder: Path, deadline_s: float) -> None:
        """Wait until all received tensors are loaded and hashed as the weights of `folder`, which may not exist yet."""
        await self._known_order({"do": "finish", "folder": str(folder.absolute())})
        await self._staged(deadline_s)

    async def begin_update(self) -> None:
        """Make a paused engine's weights loadable and take its version away. Requests under way keep waiting."""
        dialect = await self.dialect()
        if dialect.no_tensors:
            raise EngineVersionError(f"{self.url}: {dialect.no_tensors}")
        if dialect.sessions and not (await self._ask("/begin_weight_update", {})).success:
            # A sender died and left its session open.
            await self._do("/end_weight_update", {})
            await self._do("/begin_weight_update", {})
        await self._do("/update_weight_version", {"new_version": INVALIDATED, "abort_all_requests": False})

    async def join(self, group_spec: ProcessGroupSpec, world_size: int, deadline_s: float) -> None:
        """Have the engine's ranks join the group as ranks 1, 2, …"""
        request = {
            "master_address": group_spec.address,
            "master_port": group_spec.port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": group_spec.group,
            "backend": group_spec.backend,
        }
        await self._do("/init_weights_update_group", request, deadline_s)

    async def is_member(self, group: str) -> bool:
        """Return whether the server still has the group. It asks by an update of no tensors, for which nothing is sent.
        A server without sessions would end at the call if it lacked the group: it leaves the group instead."""
        if self._staging:
            return (await self._known_order({"do": "member", "group": group}))["member"] == "True"
        if not (await self.dialect()).sessions:
            await self._ask("/destroy_weights_update_group", {"group_name": group})
            return False
        request: dict[str, Any] = dict(names=[], dtypes=[], shapes=[], group_name=group, flush_cache=False)
        return (await self._ask("/update_weights_from_distributed", request)).success

    async def leave(self, group: str) -> None:
        await self._do("/destroy_weights_update_group", {"group_name": group})

    async def receive(self, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """Have the engine take part in one broadcast of the flattened tensors, load them, and drop the caches of older
        weights unless they are kept."""
        named: dict[str, Any] = dict(
            names=[tensor.name for tensor in tensors],
            dtypes=[tensor.dtype for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
        )
        if self._staging:
            await self._known_order({"do": "group", "group": group, **named})
            await self._staged(deadline_s)
            return
        # The cache is flushed with every bucket, because no sender knows the engine's last bucket. That costs less than
        # a call of /flush_cache, which also returns memory to the system.
        request = named | dict(group_name=group, load_format="flattened_bucket", flush_cache=not self._keeps_kv)
        await self._do("/update_weights_from_distributed", request, deadline_s)

    async def receive_shared(self, bucket: bytes, ranks: int, deadline_s: float) -> None:
        """Have the engine open a bucket in the memory of another process of the machine (one copy of the pickle for
        each rank), load its tensors, and drop the caches of older weights unless they are kept."""
        text = base64.b64encode(bucket).decode()
        if self._staging:
            await self._known_order({"do": "bucket", "bucket": text})
            await self._staged(deadline_s)
            return
        request: dict[str, Any] = dict(serialized_named_tensors=[text] * ranks, load_format="flattened_bucket")
        await self._do("/update_weights_from_tensor", request | {"flush_cache": not self._keeps_kv}, deadline_s)

    async def end_update(self, version: int, deadline_s: float) -> None:
        """Finish the weights (quantize, repack) once all tensors came, and claim `version` unverified."""
        if (await self.dialect()).sessions:
            await self._do("/end_weight_update", {}, deadline_s)
        claim = {"new_version": f"{UNVERIFIED}{version}", "abort_all_requests": False}
        await self._do("/update_weight_version", claim)

    async def give_up_update(self) -> None:
        """Close only the session of an update that lacks tensors."""
        if not self._staging and (await self.dialect()).sessions:
            await self._ask("/end_weight_update", {})

    async def _do(self, path: str, request: dict[str, Any], deadline_s: float | None = None) -> None:
        answer = await self._ask(path, request, deadline_s)
        if not answer.success:
            raise EngineVersionError(f"{self.url}{path} failed: {one_line(answer.message, 300)}; see its log")

    async def _ask(self, path: str, request: dict[str, Any], deadline_s: float | None = None) -> Updated:
        deadline_s = self._control_deadline_s if deadline_s is None else deadline_s
        answer = await self._transport.call(
            "POST", path, deadline_s=deadline_s, json=request, accept=(400,), repeatable=False
        )
        return _parse(TypeAdapter(Updated), answer)

    async def _staged(self, deadline_s: float) -> None:
        """Wait until every staging order is done."""
        poll_s = _FIRST_POLL_S
        try:
            async with asyncio.timeout(deadline_s):
                while (await self._known_order({"do": "wait"}))["pending"] != "0":
                    await asyncio.sleep(poll_s)
                    poll_s = min(1.5 * poll_s, _LONGEST_POLL_S)
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.url} did not stage the weights within {deadline_s:g} s; it hangs or is overloaded"
            ) from None

    async def _known_order(self, order: dict[str, Any]) -> dict[str, str]:
        state = await self._order(order)
        if state is None:
            raise EngineVersionError(f"{self.url} does not stage weights any more; it was started again")
        return state

    async def _order(self, order: dict[str, Any]) -> dict[str, str] | None:
        """Return the state of the engine's slowest rank; None where the server cannot stage
        (rollout_sglang.cpu.staging)."""
        answer = await self._transport.call(
            "POST",
            "/weights_checker",
            deadline_s=self._control_deadline_s,
            json={"action": STAGE + json.dumps(order)},
            accept=(400, 404),
            repeatable=False,
        )
        if answer.status_code == 404:
            return None
        try:
            found = Checksums.model_validate_json(answer.content)
            states = [rank.checksums for rank in found.ranks]
            failures = [state["failure"] for state in states if state["failure"]]
            slowest = max(states, key=lambda state: int(state["pending"]), default=None)
        except (ValidationError, KeyError, ValueError):
            raise EngineUnavailableError(
                f"{self.url}/weights_checker answered something else than was asked; check the server"
            ) from None
        if failures:
            raise EngineVersionError(f"{self.url} cannot stage weights: {one_line(failures[0], 300)}")
        return slowest if found.success else None


def _require_tokens(rows: Sequence[Sequence[int]], vocab_size: int | None = None) -> None:
    """Raise FatalError for a row that would crash an engine: a row without tokens, or with an id outside the
    vocabulary. SGLang before 0.5.23 checks neither; no release checks the first."""
    for row in rows:
        if not len(row):
            raise FatalError("a prompt of no tokens would end an engine; it was not sent: give each prompt some text")
        if min(row) < 0 or (vocab_size is not None and max(row) >= vocab_size):
            wrong = min(row) if min(row) < 0 else max(row)
            raise FatalError(
                f"a prompt holds token id {wrong}, expected 0 to {(vocab_size or 2**31) - 1}: it would end an engine, "
                "and was not sent; use the tokenizer that belongs to the model"
            )


def _parse(adapter: TypeAdapter[T], answer: httpx.Response) -> T:
    try:
        return adapter.validate_json(answer.content)
    except ValidationError as error:
        raise BadAnswerError(
            f"{answer.request.url} answered something else than SGLang's protocol ({problem_of(error)}); "
            "check the version of the server"
        ) from None


class TeacherServers:
    """Teacher servers used in turn; a failed attempt is followed by an attempt at another server."""

    def __init__(self, urls: Sequence[str], api_key: str | None, *, request_deadline_s: float) -> None:
        self._clients = [
            EngineClient(url, api_key, index=index, request_deadline_s=request_deadline_s)
            for index, url in enumerate(urls)
        ]
        self._turns = cycle(self._clients)

    async def logprobs(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return for each response to `prompt` [tokens] natural log-probabilities at temperature 1. Raises
        RetryableError when the server could not answer, and FatalError when it rejects the call itself."""
        try:
            return await next(self._turns).response_logprobs(prompt, responses)
        except RetryableError as error:
            raise EngineUnavailableError(f"the teacher did not score a group: {error}") from error

    async def require_same_tokenizer(self, texts: Mapping[str, Sequence[int]]) -> None:
        """Raise RecipeError unless every server's tokenizer makes the given ids of each text, as the student's does.
        Raises EngineUnavailableError when a server cannot be asked."""
        for client in self._clients:
            for text, ids in texts.items():
                theirs = await client.tokenize(text)
                if theirs != list(ids):
                    raise RecipeError(
                        f"the teacher at {client.url} has another tokenizer than model.path: of {quoted(text)} it "
                        f"makes {theirs[:8]}…, the student {list(ids)[:8]}…; distill from a model of the same tokenizer"
                    )

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
