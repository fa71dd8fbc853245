"""One SGLang server: token in, token out, and which weights it serves."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

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
from pipeline.ports.weights import TensorSpec
from precision.formats.audit import Held
from precision.settings import problem_of
from precision.text import one_line, quoted
from rollout_sglang.answers import (
    SAMPLE_BYTES,
    Asked,
    SampleReader,
    aborted_completion,
    completion_reader,
    input_logprobs,
    read_answer,
    scoring_bytes,
    tempered_totals,
)
from rollout_sglang.protocol import (
    ABORTED,
    INVALIDATED,
    UNKNOWN_ENGINE,
    UNVERIFIED,
    Checksums,
    DialectOf,
    Generated,
    ModelInfo,
    Tokenized,
    Updated,
    claimed_version,
)
from rollout_sglang.transport import LOOK_DEADLINE_S, Exchange, Lost, Transport

FORMATS, STATISTICS = "formats", "statistics"
"""As in rollout_sglang.server.format_report, which loads torch."""
REPORT_BYTES = 1 << 26
"""Of a report about all parameters: a mixture of 48 layers and 128 experts has 18,000 on each of 8 ranks, of some 200
bytes each."""
CONTROL_DEADLINE_S = 30.0
"""For calls that an engine answers between two of its steps: pause, continue, names of weights."""

T = TypeVar("T")


class EngineClient:
    """A server at `url`; `index` names it in records.

    Every method raises EngineUnavailableError when the server refuses, drops, garbles or never answers the call, and
    FatalError when the server finds the call itself wrong (key, prompt length).
    """

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
        """Calls that concern weights belong to the weight update `update`, a number of
        rollout_sglang.weights.update_lease; without one, engines refuse them. `keeps_kv`: requests under way go on
        over the keys and values of the old weights (weights.kv_cache of a recipe)."""
        self.url = url.rstrip("/")
        self.index = index
        self._part = "router" if index == UNKNOWN_ENGINE else f"engine {index}"
        self._request_deadline_s = request_deadline_s
        self._control_deadline_s = min(CONTROL_DEADLINE_S, request_deadline_s)
        self._keeps_kv = keeps_kv
        self._transport = Transport(url, api_key)
        self._transport.update = update
        self._dialect = DialectOf(self._transport, self._control_deadline_s)

    def take_part(self, update: int) -> None:
        """From now on, calls belong to another weight update."""
        self._transport.update = update

    async def generate(self, prompt_tokens: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        """Sample a group in one request. Log-probabilities are of softmax(logits / temperature), before top-p and
        top-k; with `sampling.kept_set` they are of what these left, renormalized, and each completion holds its kept
        sets. Samples of a request that was aborted have as many tokens as there were, or none."""
        _require_tokens([prompt_tokens], sampling.vocab_size)
        started = time.monotonic()
        asked = Asked(
            num_prompt=len(prompt_tokens),
            num_samples=num_samples,
            sampling=sampling,
            keeps_kv=self._keeps_kv,
            late_tokens=int(self._keeps_kv and (await self._dialect()).overlaps),
        )
        # For n samples SGLang (0.5.23) first prefills the prompt by a request of no new tokens. With kept sets it finds
        # none for that one and refuses all. Equal prompts share their prefill too.
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
                },
                "return_logprob": True,
                **({} if sampling.experts is None else {"return_routed_experts": True}),
                **({"return_sampling_mask": True} if sampling.kept_set else {}),
            },
            most_bytes=asked.most_bytes,
            reader=lambda: completion_reader(asked, engine=self.index, waited_s=lambda: time.monotonic() - started),
        )
        ended = time.monotonic()
        spans.note(f"{self._part}/requests", "request", started, ended, prompt=len(prompt_tokens), samples=num_samples)
        if completions is None:
            return [aborted_completion(self.index, ended - started)] * num_samples
        return completions

    async def prompt_logprobs(self, rows: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Prefill scoring: for each row of n tokens, [n - 1] log-probabilities of tokens 1…n-1 given those before.

        At temperature 1: SGLang does not scale the log-probabilities of input tokens.
        """
        return await self._prefill(rows, {}, 0, lambda number, sample: input_logprobs(rows[number], sample))

    async def response_logprobs(
        self, prompt: Sequence[int], responses: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        """Prefill scoring of responses to a prompt of one token at least: for each, [tokens] log-probabilities, at
        temperature 1. The prompt's own tokens are not scored: so the server may read it once for all of them."""
        rows, start = [[*prompt, *response] for response in responses], len(prompt) - 1
        return await self._prefill(
            rows, {"logprob_start_len": start}, 0, lambda number, sample: input_logprobs(rows[number][start:], sample)
        )

    async def tokenize(self, text: str) -> list[int]:
        """The ids that the server's own tokenizer makes of a text, without special tokens at its ends."""
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
        """As `prompt_logprobs`, at another temperature: log p / T - log sum p'^(1/T) over the whole distribution p' of
        each token, which the server answers. For small vocabularies: an answer holds vocab_size numbers a token.

        `kept`, for each row the token ids over which tokens 1 … n-1 are renormalized, restricts that sum; an empty set
        stands for the whole vocabulary.
        """

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
        """What `read` makes of the answer to each row."""
        _require_tokens(rows)
        row_bytes = [scoring_bytes(len(row), vocab_size) for row in rows]
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
        """Which folder and version the server serves. A busy engine answers at once: its HTTP process alone does."""
        deadline_s = self._control_deadline_s if deadline_s is None else deadline_s
        answer = await self._transport.call("GET", "/model_info", deadline_s=deadline_s)
        return _parse(TypeAdapter(ModelInfo), answer)

    async def health(self, deadline_s: float = LOOK_DEADLINE_S) -> bool:
        """Whether the server answers and says that it is well. It is not asked to sample: one that is busy answers."""
        try:
            await self._transport.call("GET", "/health", deadline_s=min(deadline_s, self._control_deadline_s))
        except EngineUnavailableError:
            return False
        return True

    async def while_alive(self, call: Coroutine[Any, Any, T], lost: Lost = lambda: None) -> T:
        """See Transport.while_alive."""
        return await self._transport.while_alive(call, lost)

    async def pause(self) -> None:
        """Stop sampling. Requests under way go on after `resume`, with the weights that there are then: retracted, so
        that what they have so far is read again with them, or in place where keys and values are kept. A server that
        could not tell the tokens of the two apart aborts them instead (see sglang_compat).

        A paused engine answers control calls and checksums, but does not score prompts.
        """
        mode = (await self._dialect()).pause
        await self._control("/pause_generation", {"mode": "in_place" if self._keeps_kv and mode == "retract" else mode})

    async def resume(self) -> None:
        """Sample again. Nothing happens on an engine that is not paused."""
        await self._control("/continue_generation", {"torch_empty_cache": False})

    async def stage(self, directory: Path, *, deadline_s: float) -> bool:
        """Have the weights of `directory` loaded and hashed while the engine serves; `update_from_disk` of it then
        takes next to no time. False where the server cannot. Raises as Stage does."""
        if not (await self._dialect()).stages:
            return False
        return await Stage(self._transport, self._control_deadline_s).folder(directory, deadline_s)

    async def update_from_disk(self, version: int, directory: Path, *, deadline_s: float) -> None:
        """Take the weights of `directory`, a folder that the engine can read, as `version`, unverified.

        Call it between `pause` and `resume`. Raises EngineVersionError when the engine does not take them.
        """
        request = {
            "model_path": str(directory.absolute()),
            "weight_version": f"{UNVERIFIED}{version}",
            # Cached prefixes belong to the old weights. While requests stand on some, SGLang refuses to drop any.
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
        """Raises EngineVersionError unless the engine claims `version`, verified or not."""
        served = (await self.model_info()).weight_version
        if claimed_version(served) != version:
            raise EngineVersionError(
                f"engine {self.index} at {self.url} serves version {served}, expected {version}; it gets no requests "
                "until it has been given weights again"
            )

    async def checksums(self, *, deadline_s: float) -> list[dict[str, str]] | None:
        """For each tensor parallel rank, parameter → digest of what the engine holds. None when the server has no such
        route (older ones) or refuses the engine's quantization (newer ones)."""
        return await self._check_weights("checksum", deadline_s)

    async def formats(self, *, deadline_s: float, statistics: bool = False) -> list[dict[str, Held]] | None:
        """For each tensor parallel rank, module → in which format the engine holds it; with `statistics`, its scales
        and norm as well. None when the server has no such route, or was not started by this package."""
        ranks = await self._check_weights(STATISTICS if statistics else FORMATS, deadline_s)
        if ranks is None:
            return None
        try:
            return [{name: Held.from_json(text) for name, text in rank.items()} for rank in ranks]
        except ValueError as error:
            raise EngineUnavailableError(
                f"engine {self.index} at {self.url} describes its weights otherwise than this version: "
                f"{one_line(error, 300)}; start it with this version of Even Keel"
            ) from error

    async def _check_weights(self, action: str, deadline_s: float) -> list[dict[str, str]] | None:
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
        return [dict(rank.checksums) for rank in sorted(found.ranks, key=lambda rank: rank.tp_rank)]

    async def name(self, version: int) -> None:
        """Name the weights that the engine holds `version`, as verified. Requests under way go on."""
        await self._control("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def invalidate(self) -> None:
        """Take the engine's version away and abort its requests: their tokens may come from wrong weights."""
        await self._control("/update_weight_version", {"new_version": INVALIDATED, "abort_all_requests": True})

    async def close(self) -> None:
        """Release the connections."""
        await self._transport.close()

    async def _control(self, path: str, request: dict[str, Any]) -> None:
        await self._transport.call("POST", path, deadline_s=self._control_deadline_s, json=request)

    async def _generate(
        self, request: dict[str, Any], *, most_bytes: int, reader: Callable[[], SampleReader[T]]
    ) -> list[T] | None:
        """What a reader makes of the answer; None when the request was aborted before there was any sample."""

        async def take(response: httpx.Response, parts: AsyncIterator[bytes]) -> list[T] | None:
            return None if response.status_code == ABORTED else await read_answer(parts, reader())

        if self._keeps_kv:  # what others have cached may be of older weights: no request finds it
            request |= {"extra_key": secrets.token_hex(8)}
        exchange = Exchange("POST", "/generate", json=request, accept=(ABORTED,), most_bytes=most_bytes)
        try:
            return await self._transport.read(exchange, take, deadline_s=self._request_deadline_s)
        except BadAnswerError as error:
            raise BadAnswerError(f"engine {self.index} at {self.url}: {error}; the answer is thrown away") from error


def _require_tokens(rows: Sequence[Sequence[int]], vocab_size: int | None = None) -> None:
    """Raises FatalError for a row that would end an engine, whoever asks: one without tokens, or with an id that its
    model has no row for. Releases of SGLang before 0.5.23 look at neither; none looks at the first."""
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


PREFIX = "stage "
"""As in rollout_sglang.cpu.staging, which loads torch."""
_FIRST_POLL_S, _LONGEST_POLL_S = 0.004, 0.05


@dataclass(frozen=True)
class Stage:
    """Where one server takes its next weights. Methods raise EngineUnavailableError as Transport.call does, and
    EngineVersionError when weights could not be staged, or a later weight update has overtaken this one."""

    transport: Transport
    control_deadline_s: float

    async def begin(self) -> bool:
        """Forget what was staged before. False where the server cannot stage."""
        return await self._order({"do": "begin"}) is not None

    async def is_member(self, group: str) -> bool:
        """Whether the server has this process group."""
        return (await self._known({"do": "member", "group": group}))["member"] == "True"

    async def receive(self, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """Take part in one broadcast of these tensors, flattened; returns when they are loaded."""
        names, dtypes, shapes = zip(*((one.name, one.dtype, list(one.shape)) for one in tensors), strict=True)
        await self._known({"do": "group", "group": group, "names": names, "dtypes": dtypes, "shapes": shapes})
        await self._done(deadline_s)

    async def receive_shared(self, bucket: str, deadline_s: float) -> None:
        """Take a bucket (base64) from memory of another process; returns when that memory is let go."""
        await self._known({"do": "bucket", "bucket": bucket})
        await self._done(deadline_s)

    async def finish(self, folder: Path, deadline_s: float) -> None:
        """Wait until all is loaded and hashed, under the name of the folder that it is, or will be, of."""
        await self._known({"do": "finish", "folder": str(folder.absolute())})
        await self._done(deadline_s)

    async def folder(self, folder: Path, deadline_s: float) -> bool:
        """Load and hash a folder. False where the server cannot stage."""
        if await self._order({"do": "folder", "folder": str(folder.absolute())}) is None:
            return False
        await self._done(deadline_s)
        return True

    async def _done(self, deadline_s: float) -> None:
        poll_s = _FIRST_POLL_S
        try:
            async with asyncio.timeout(deadline_s):
                while (await self._known({"do": "wait"}))["pending"] != "0":
                    await asyncio.sleep(poll_s)
                    poll_s = min(1.5 * poll_s, _LONGEST_POLL_S)
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.transport.url} did not stage the weights within {deadline_s:g} s; it hangs or is overloaded"
            ) from None

    async def _known(self, order: dict[str, Any]) -> dict[str, str]:
        state = await self._order(order)
        if state is None:
            raise EngineVersionError(f"{self.transport.url} does not stage weights any more; it was started again")
        return state

    async def _order(self, order: dict[str, Any]) -> dict[str, str] | None:
        """The state of the slowest of the engine's ranks; None where the server knows no such order."""
        answer = await self.transport.call(
            "POST",
            "/weights_checker",
            deadline_s=self.control_deadline_s,
            json={"action": PREFIX + json.dumps(order)},
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
                f"{self.transport.url}/weights_checker answered something else than was asked; check the server"
            ) from None
        if failures:
            raise EngineVersionError(f"{self.transport.url} cannot stage weights: {one_line(failures[0], 300)}")
        return slowest if found.success else None


class TeacherServers:
    """Asks them in turn; an attempt that failed is followed by one at another server."""

    def __init__(self, urls: Sequence[str], api_key: str | None, *, request_deadline_s: float) -> None:
        self._clients = [
            EngineClient(url, api_key, index=index, request_deadline_s=request_deadline_s)
            for index, url in enumerate(urls)
        ]
        self._turns = cycle(self._clients)

    async def logprobs(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """For each response to `prompt`, [tokens] natural log-probabilities at temperature 1. Raises RetryableError
        when no server could answer, and FatalError when one finds the call itself wrong."""
        try:
            return await next(self._turns).response_logprobs(prompt, responses)
        except RetryableError as error:
            raise EngineUnavailableError(f"the teacher did not score a group: {error}") from error

    async def require_same_tokenizer(self, texts: Mapping[str, Sequence[int]]) -> None:
        """Raises RecipeError unless every server makes the ids of each text that the student's tokenizer makes of it,
        and EngineUnavailableError when one cannot be asked."""
        for client in self._clients:
            for text, ids in texts.items():
                theirs = await client.tokenize(text)
                if theirs != list(ids):
                    raise RecipeError(
                        f"the teacher at {client.url} has another tokenizer than model.path: of {quoted(text)} it "
                        f"makes {theirs[:8]}…, the student {list(ids)[:8]}…; distill from a model of the same tokenizer"
                    )

    async def close(self) -> None:
        """Release the connections."""
        for client in self._clients:
            await client.close()
