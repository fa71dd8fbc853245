"""How much of their contexts turns of episodes find in the engines' caches: with affinity, without it, and with
publishes meanwhile, after which engines read live contexts again, or keep their keys and values.

Two real engines on the CPU, and as many episodes at once as they are given. Each turn continues the tokens of the turn
before, with its answer and as many observed tokens. 1.0 is what one engine with an infinite cache would have had.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pipeline.data.batch import Sampling
from pipeline.ports.affinity import Affinity, PrefixHits
from pipeline.ports.weights import WeightCheck
from rollout_sglang.fleet import Fleet
from rollout_sglang.server.start import EngineSpec, free_port, start
from tests.bench.figures import tell
from tests.doubles.tiny_model import write_checkpoint
from tests.support.fleets import fleet_of

KEY = "a-key-of-the-bench"
NEW_TOKENS = 16


async def play(fleet: Fleet, episodes: int, turns: int, seed: int, *, with_affinity: bool) -> tuple[PrefixHits, float]:
    """Play the episodes; return what they found in the caches, and the seconds."""
    hits, draw, started = PrefixHits(), random.Random(seed), time.monotonic()

    async def episode(own: random.Random) -> None:
        affinity, context = Affinity(hits), [own.randrange(256) for _ in range(NEW_TOKENS)]
        for _ in range(turns):
            await asyncio.sleep(own.uniform(0.0, 0.05))  # the agent's own time
            sampling = Sampling(max_new_tokens=NEW_TOKENS)
            [answer] = await fleet.generate(context, 1, sampling, affinity if with_affinity else None)
            if not with_affinity:
                affinity.answered(context, answer)
            context += [*answer.tokens.tolist(), *(own.randrange(256) for _ in range(NEW_TOKENS))]

    await asyncio.gather(*(episode(random.Random(draw.random())) for _ in range(episodes)))
    return hits, time.monotonic() - started


async def publish(fleet: Fleet, model: Path, first: int, pause_s: float, over: asyncio.Event) -> int:
    """Publish versions from `first` on until it is `over`; return how many."""
    published = 0
    while not over.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), pause_s)
            break
        await fleet.load(first + published, model, WeightCheck(version=first + published))
        published += 1
    return published


async def main(folder: Path, model: Path, urls: list[str], episodes: int, turns: int, pause_s: float) -> None:
    rounds = 2 * [(True, math.inf, False), (False, math.inf, False)]
    rounds += 2 * [(True, pause_s, False), (True, pause_s, True)]
    for seed, (with_affinity, pause, keeps_kv) in enumerate(rounds):
        # As in a run, the learner's fleet publishes and the collector's samples; the first flushes the caches.
        flush = fleet_of(folder, urls, key=KEY)
        learner, collector = (fleet_of(folder, urls, key=KEY, keeps_kv=keeps_kv) for _ in range(2))
        first, over = 1000 * seed, asyncio.Event()
        try:
            await flush.load(first, model, WeightCheck(version=first))
            await collector.load(first, model, WeightCheck(version=first))
            publisher = asyncio.create_task(publish(learner, model, first + 1, pause, over))
            hits, seconds = await play(collector, episodes, turns, seed, with_affinity=with_affinity)
            over.set()
            publishes = await publisher
        finally:
            for fleet in (flush, learner, collector):
                await fleet.close()
        found = dict(affinity=with_affinity, publishes=publishes, keeps_kv=keeps_kv, seconds=seconds)
        shares = dict(hits=hits.cached / hits.repeated, published=hits.published / hits.repeated)
        tell(found | shares | dict(tokens=hits.repeated))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--publish-every", type=float, default=2.0, help="seconds between publishes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        model = write_checkpoint(Path(root) / "model", 0)
        specs = [
            EngineSpec(
                model=model,
                port=free_port(),
                precision="fp32",
                dtype="float32",
                log=Path(root) / f"{index}.log",
                version=0,
                api_key=KEY,
            )
            for index in range(given.engines)
        ]
        servers = [start(spec) for spec in specs]
        try:
            for server in servers:
                server.wait_ready(300.0)
            urls = [spec.url for spec in specs]
            asyncio.run(main(Path(root), model, urls, given.episodes, given.turns, given.publish_every))
        finally:
            for server in servers:
                server.kill()
