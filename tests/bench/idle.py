"""What an idle run costs: system calls and processor seconds of each process that waits, late in a long run.

A made-up run of 100,000 committed batches and 1,000 announced engines; the engines are one HTTP double, each under a
path of its own. Every part is a process that runs the product's own loop and waits for something that never comes:

    collector    for the learner's publish; its fleet of admitted engines is monitored meanwhile
    learner      rank 0 for the next batch, with the pauses of a long wait
    engine       one engine's role under the ESS controller: its look at whether to start again, every 10 s; over all
                 engines it costs `engines` times as much
    supervisor   its look at whether the run makes progress

`perf` (Linux) counts the system calls of all threads without stopping them; it needs the permission to trace. Batches
but the newest, records and evaluations are empty files: nobody who waits reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from launch.roles.engine import reason_to_start_again
from launch.run.supervisor import RunProgress
from launch.run.waiting import FINISHED_POLL_S, POLL_S, Throttle
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.batch import Sampling
from pipeline.data.event_log import EventLog
from pipeline.data.membership import Member
from pipeline.data.quant_maps import digest_of, write_quant_map
from pipeline.data.run_directory import RunDirectory, numbered, unfenced
from pipeline.data.store import BatchStore
from pipeline.ports.weights import WeightCheck
from pipeline.rollout import collector as collecting
from pipeline.schedule import Schedule
from pipeline.tasks.tokenizer import Tokenizer
from pipeline.trainer import batches as waiting
from precision.controller.policy import EngineEvidence, Evidence, State
from precision.formats.quant_map import QuantMapFile
from rollout_sglang.fleet import Fleet
from rollout_sglang.weights.update_lease import Updates
from tests.bench.collector import Prompts, write_tokenizer
from tests.bench.figures import tell
from tests.doubles.sglang_double import PARAMETER, EngineDouble, checksum_of
from tests.support.batches import batch_of_rewards
from tests.support.one_rank import OneRank

COUNTED = dict(
    calls="raw_syscalls:sys_enter", opens="syscalls:sys_enter_openat", listings="syscalls:sys_enter_getdents64"
)
"""Figure → perf's event. One listing of 100,000 names takes some hundred calls."""
MAP = QuantMapFile(base="fp8_block")
EVALUATE_EVERY = 10


def make_run(folder: Path, batches: int, engines: int, url: str) -> RunDirectory:
    """Version `batches` - 1 is published, and batch `batches` is next."""
    run, newest = RunDirectory(folder), batches - 1
    run.make_folders()
    run.control.mkdir()
    for index in range(newest):
        (run.batches / f"{numbered(index)}.zarr.zip").touch()
        (run.control / f"{numbered(index)}.json").touch()
        if index % EVALUATE_EVERY == 0:
            (run.evaluations / f"{numbered(index)}.json").touch()
    BatchStore(run.batches).commit(batch_of_rewards([[1.0, 0.0]], index=newest))
    (run.control / f"{numbered(newest - 1)}.json").unlink()
    evidence = {index: EngineEvidence(loss=0.1, loss_of_others=0.1, start=1) for index in range(engines)}
    record = ControlRecord(
        step=newest - 1,
        evidence=Evidence(step=newest - 1, loss=0.1, engines=evidence),
        state=State(),
        first_seen={index: (1, 0) for index in range(engines)},
    )
    ControlFiles(run.control, unfenced).create(record)
    run.policy_directory(newest).mkdir()
    write_quant_map(run.policy_directory(newest), MAP)
    WeightCheck(version=newest, digests=({PARAMETER: checksum_of(newest)},)).save(run.policy_directory(newest))
    run.set_published(newest)
    for index in range(engines):
        run.membership().announce(Member(index, f"{url}/{index}", 1, digest_of(MAP)))
    return run


def serve(pipe: Connection, version: int) -> None:
    """All engines, in a process of their own: until the pipe ends."""
    double = EngineDouble(version)
    double.shows_checksums = True

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = httpx.Headers(
                    [(name, value) for name, _, value in (one.partition(": ") for one in lines[:-2])]
                )
                body = await reader.readexactly(int(headers.get("Content-Length", 0)))
                method, path, _ = first.split(" ")
                request = json.loads(body) if body else {}
                status, told = double.answer(method, "/" + path.split("/", 2)[2], request, headers) or (500, {})
                content = json.dumps(told).encode()
                writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
                double.calls.clear()
        writer.close()

    async def listen() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
        pipe.send("http://{}:{}".format(*server.sockets[0].getsockname()))
        await asyncio.to_thread(pipe.poll, None)

    asyncio.run(listen())


def ready() -> None:
    print("ready", flush=True)


def collector(run: RunDirectory) -> None:
    collecting.FIRST_POLL_S = 0.5  # as late in a wait
    version = run.published_version()
    tokenizer = write_tokenizer(run.path / "tokenizer") if not (run.path / "tokenizer").exists() else None
    tokenizer = tokenizer or Tokenizer.load(run.path / "tokenizer")
    sampling = Sampling(max_new_tokens=8, vocab_size=100)
    log = EventLog(run.path, "collector-000001")
    settings: dict[str, Any] = dict(
        updates=Updates(run.updates), api_key=None, request_deadline_s=600.0, load_deadline_s=600.0, on_change=log.event
    )
    fleet = Fleet(run.membership(), **settings)
    collector = collecting.Collector(
        run=run,
        store=BatchStore(run.batches, run.fence),
        schedule=Schedule(kind="sync", steps=10 * version),
        engines=fleet,
        prompts=Prompts(),
        tokenizer=tokenizer,
        verifiers={},
        contract=batch_of_rewards([[1.0]]).contract,
        event_log=log,
        settings=collecting.CollectorSettings(
            prompts_per_batch=8,
            group_size=8,
            sampling=sampling,
            concurrent_prompts=8,
            max_prompt_tokens=8,
            evaluate_every=EVALUATE_EVERY,
            evaluation_prompts=1,
            evaluation_samples=1,
            evaluation_sampling=sampling,
            wait_deadline_s=3600.0,
            recipe_sha256="r",
        ),
    )

    async def collect() -> None:
        async with fleet.monitored(lambda: (version, run.policy_directory(version))):
            work = asyncio.create_task(collector.collect())
            while not work.done() and not (fleet.state() and all(not one.quarantined for one in fleet.state())):
                await asyncio.sleep(0.5)
            if not work.done():
                ready()
            await work

    asyncio.run(collect())


def learner(run: RunDirectory) -> None:
    waiting.FIRST_POLL_S = 1.0  # as late in a wait
    source = waiting.BatchSource(
        run=run, store=BatchStore(run.batches), learner=OneRank(), contract=None, wait_deadline_s=3600.0
    )
    ready()
    source.wait(run.published_version() + 1)


def engine(run: RunDirectory) -> None:
    recipe = Recipe.model_validate(
        dict(
            run=dict(name="x", steps=10**6),
            model=dict(path="m"),
            task=dict(name="sort_digits"),
            rollout=dict(engines=1000, precision="fp8_block"),
            controller=dict(ess_floor=0.9),
        )
    )
    own, due = Member(500, "http://500", 1, digest_of(MAP)), Throttle(FINISHED_POLL_S)
    ready()
    while True:
        if due():
            assert reason_to_start_again(run, recipe, own, lambda _: None) is None
        time.sleep(POLL_S)


def supervisor(run: RunDirectory) -> None:
    progress = RunProgress(run, lambda *_, **__: None)
    ready()
    while True:
        progress.look()
        time.sleep(POLL_S)


PARTS = dict(collector=collector, learner=learner, engine=engine, supervisor=supervisor)


def measured(part: str, folder: Path, seconds: float) -> dict[str, float]:
    """Calls and processor seconds a second of one part, over `seconds`."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bench.idle", "--part", part, "--folder", str(folder)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            while (line := process.stdout.readline()) != b"ready\n":
                if not line:
                    raise SystemExit(f"{part} ended before it waited")
            before, started = _processor_s(process.pid), time.monotonic()
            events = ",".join(COUNTED.values())
            perf = subprocess.run(
                ["perf", "stat", "-x,", "-e", events, "-p", str(process.pid), "--", "sleep", str(seconds)],
                capture_output=True,
                text=True,
                check=True,
            )
            spent, passed = _processor_s(process.pid) - before, time.monotonic() - started
        finally:
            process.kill()
    counts = [float(line.split(",")[0]) for line in perf.stderr.splitlines() if "sys_enter" in line]
    return dict(zip(COUNTED, (count / seconds for count in counts), strict=True)) | dict(processor_s=spent / passed)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        PARTS[arguments.part](RunDirectory(arguments.folder))
        return
    if shutil.which("perf") is None:
        raise SystemExit("perf is not installed; it counts the system calls (Debian: linux-perf)")
    with tempfile.TemporaryDirectory() as folder:
        here, there = multiprocessing.Pipe()
        double = multiprocessing.Process(target=serve, args=(there, arguments.batches - 1), daemon=True)
        double.start()
        make_run(Path(folder) / "run", arguments.batches, arguments.engines, here.recv())
        for part in arguments.parts:
            found = measured(part, Path(folder) / "run", arguments.seconds)
            tell(dict(part=part, batches=arguments.batches, engines=arguments.engines) | found)


if __name__ == "__main__":
    main()
