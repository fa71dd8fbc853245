"""The collector's event loop while it makes a batch of the size of a 32B run: how long it stands still, what it holds.

A double of SGLang in a process of its own answers 128 requests of 16 samples each, in the mean of 3,200 tokens: 6.6
million tokens. The answers come within 10 seconds, where engines take minutes. Client, collector, verifiers and store
are the product's. Each repetition has a process of its own.

    batch_bytes   of the arrays of the batch
    stall_ms      how late a coroutine came that wants to run each millisecond: the longest time, and the 99th of 100
    own_ms        the same, but no more than this process computed meanwhile: what others took from it is left out
    memory        the most that the process held, beyond what it held before, over batch_bytes
    idle_ms       the longest stall while nothing is done: what this machine adds

Compare ratios within one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from pipeline.background import spare_collections
from pipeline.data.batch import Completion, LogprobContract, Prompt, Sampling
from pipeline.data.batch_format import arrays_of
from pipeline.data.event_log import EventLog, read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.ports.affinity import Affinity
from pipeline.rewards.pool import Verifiers
from pipeline.rollout.collector import Collector, CollectorSettings
from pipeline.schedule import Schedule
from pipeline.tasks.tokenizer import Tokenizer
from rollout_sglang.client import EngineClient
from tests.bench.figures import forget_peak, resident, spreads, tell
from tests.doubles.sglang_double import EngineDouble

VOCABULARY, PROMPT_TOKENS, MOST_TOKENS = 151_936, 512, 6144
GROUP_SIZE, BODIES = 16, 8
SECONDS = 10.0
PROMPT = tuple(range(PROMPT_TOKENS))


class PromptAnswers(EngineDouble):
    """Has its answers ready, whatever is asked."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        bodies = [[_sample(random) for _ in range(GROUP_SIZE)] for _ in range(BODIES)]
        self._delays = random.uniform(1.0, 1.0 + SECONDS, 1024).tolist()
        self._ready = itertools.cycle([json.dumps(body, separators=(",", ":")).encode() for body in bodies])

    def _sample(self, request: Any) -> Any:
        time.sleep(self._delays.pop())
        return next(self._ready)


def _sample(random: np.random.Generator) -> dict[str, Any]:
    """As SGLang 0.5.23 writes it; its length is drawn around 3,200 tokens."""
    length = int(np.clip(random.lognormal(7.78, 0.6), 64, MOST_TOKENS))
    tokens = random.integers(2, VOCABULARY, length).tolist()
    logprobs = (-random.exponential(0.3, length)).astype(np.float32).astype(float).tolist()
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": length,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": length}],
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
        "e2e_latency": 0.01,
        "num_retractions": 0,
    }
    return {"text": "x" * 4 * length, "output_ids": tokens, "meta_info": meta}


def serve(pipe: Connection) -> None:
    """Of a process of its own: until the pipe ends."""
    with PromptAnswers() as double:
        pipe.send(double.url)
        pipe.poll(None)


class OneEngine:
    """Stands for the fleet: what is between it and the client has little to do."""

    def __init__(self, url: str) -> None:
        self._client = EngineClient(url, None, index=0, request_deadline_s=600.0)

    async def generate(
        self, prompt: Sequence[int], num_samples: int, sampling: Sampling, affinity: Affinity | None = None
    ) -> list[Completion]:
        return await self._client.generate(prompt, num_samples, sampling)

    async def load(self, version: int, directory: Path, check: object = None) -> dict[str, float]:
        raise NotImplementedError

    async def resync(self, version: int, directory: Path) -> None:
        """It serves what is asked."""

    async def close(self) -> None:
        await self._client.close()


class Prompts:
    """All alike."""

    num_problems = 1 << 20
    sources: Mapping[str, range] = MappingProxyType({})

    def problem(self, group: int) -> int:
        return group

    def prompt(self, group: int) -> Prompt:
        return Prompt(group=group, text="question", answer="answer", tokens=PROMPT, problem=group)

    def held_out(self, count: int) -> Sequence[Prompt]:
        raise NotImplementedError


def write_tokenizer(folder: Path) -> Tokenizer:
    """Of as many tokens as a large model's, of one to five letters."""
    words = {f"{number:x}": number for number in range(2, VOCABULARY)}
    backend = Backend(models.BPE({"<pad>": 0, "<end>": 1, **words}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<end>", special=True)])
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "<end>"}))
    return Tokenizer.load(folder)


def build(folder: Path, url: str, prompts: int, verifiers: Verifiers) -> Collector:
    """Of a run of one batch that is not evaluated."""
    run = RunDirectory(folder / "run")
    run.make_folders()
    run.set_published(0)
    tokenizer = write_tokenizer(folder / "model")
    sampling = Sampling(max_new_tokens=MOST_TOKENS, vocab_size=VOCABULARY)
    collector = Collector(
        run=run,
        store=BatchStore(run.batches, run.fence),
        schedule=Schedule(kind="sync", steps=1),
        engines=OneEngine(url),
        prompts=Prompts(),
        tokenizer=tokenizer,
        verifiers={"": verifiers},
        contract=LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256=tokenizer.sha256),
        event_log=EventLog(run.path, "collector-000001"),
        settings=CollectorSettings(
            prompts_per_batch=prompts,
            group_size=GROUP_SIZE,
            sampling=sampling,
            concurrent_prompts=128,
            max_prompt_tokens=PROMPT_TOKENS,
            evaluate_every=1,
            evaluation_prompts=1,
            evaluation_samples=1,
            evaluation_sampling=sampling,
            wait_deadline_s=600.0,
            recipe_sha256="",
        ),
    )
    collector._evaluated |= {0, 1}
    return collector


@dataclass
class Ticks:
    """How late each tick came, in seconds: by the clock, and of that what this process computed."""

    late: list[float]
    own: list[float]

    async def run(self) -> None:
        while True:
            clock, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            late = max(0.0, time.perf_counter() - clock - 0.001)
            self.late.append(late)
            self.own.append(min(late, time.process_time() - cpu))


async def ticking(work: Any) -> Ticks:
    """While `work` is done."""
    ticks = Ticks([], [])
    task = asyncio.create_task(ticks.run())
    await work
    task.cancel()
    return ticks


def measure(prompts: int) -> dict[str, float]:
    """One repetition, in this process."""
    pipe, other = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(other,), daemon=True)
    server.start()
    url = pipe.recv()
    with tempfile.TemporaryDirectory() as folder:
        verifiers = Verifiers("pipeline.rewards.verifiers:exact_match", 1, 60.0, sandbox=None)
        try:
            collector = build(Path(folder), url, prompts, verifiers)
            spare_collections()
            idle = asyncio.run(ticking(asyncio.sleep(3.0)))
            before = resident("VmRSS")
            forget_peak()
            ticks = asyncio.run(ticking(collector.collect()))
            most = resident("VmHWM")
            batch = collector.store.read(0, None)
            (committed,) = read_events(collector.run.path, "committed")
        finally:
            verifiers.close()
            pipe.close()
            server.kill()
            server.join()
    batch_bytes = sum(array.nbytes for array in arrays_of(batch).values())
    return dict(
        tokens=len(batch.tokens),
        batch_bytes=batch_bytes,
        longest_stall_ms=1000 * max(ticks.late),
        p99_stall_ms=1000 * float(np.quantile(ticks.late, 0.99)),
        longest_own_ms=1000 * max(ticks.own),
        p99_own_ms=1000 * float(np.quantile(ticks.own, 0.99)),
        idle_ms=1000 * max(idle.late),
        memory=(most - before) / batch_bytes,
        generate_s=committed["seconds"]["generate"],
        commit_s=committed["seconds"]["commit"],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=128, help="of the batch, of 16 samples each")
    parser.add_argument("--once", action="store_true", help="one repetition, in this process")
    given = parser.parse_args(arguments)
    if given.once:
        print(json.dumps(measure(given.prompts)))
        return
    command = [sys.executable, "-m", "tests.bench.collector", "--once", "--prompts", str(given.prompts)]
    rows = [json.loads(subprocess.check_output(command)) for _ in range(given.repetitions)]
    tell(spreads(rows))


if __name__ == "__main__":
    main()
