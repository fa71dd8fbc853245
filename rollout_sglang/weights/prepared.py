"""What an engine loads: the folder that is published, or its own host's replica of it.

An engine that announces replicas (pipeline.data.membership) has its next one made while it serves, so it is not paused
before the folder is there. An engine that can stage weights (rollout_sglang.weights.staging) has loaded and hashed them
by then, too.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.data.deltas import is_whole, read_link
from pipeline.data.membership import Member
from pipeline.data.run_directory import numbered
from pipeline.errors import EngineUnavailableError, EngineVersionError
from pipeline.spans import Stopwatch
from rollout_sglang.engine_pool import EnginePool, PooledEngine
from rollout_sglang.target import Target
from rollout_sglang.weights.replica import replica_name

_POLL_S = 0.05


async def prepared(
    pool: EnginePool, engine: PooledEngine, target: Target, deadline_s: float
) -> tuple[Target, dict[str, float]]:
    """The target as the engine loads it, once that is there and staged, where the engine can; and prepare_s and
    stage_s, how long that was waited for.

    Raises EngineVersionError when the engine's replica cannot be made, is beyond the target, or does not come in time,
    and as Target.of_map does.
    """
    watch = Stopwatch(lane=f"engine {engine.index}/weights", version=target.version)
    member = engine.member
    own = await asyncio.to_thread(target.of_map, member)
    if member.replicas:
        name = await asyncio.to_thread(_name_of, own)
        own = replace(own, directory=await _replica(pool, member, own.version, name, deadline_s))
    elif not is_whole(own.directory):
        raise EngineVersionError(
            f"engine {engine.index} at {engine.url} has no replica, and {own.directory} holds only what changed; start "
            "it by `evenkeel role engine`, or publish by another channel (weights.channel)"
        )
    watch.lap("prepare_s")
    if engine.quarantined is None:  # else it serves nobody, and may be paused
        with suppress(EngineUnavailableError, EngineVersionError):  # loading it, paused, says what is wrong
            await engine.client.stage(own.directory, deadline_s=deadline_s)
    watch.lap("stage_s")
    return own, watch.seconds


def _name_of(target: Target) -> str:
    return replica_name(target.version, read_link(target.directory.parent, target.version).state)


async def _replica(pool: EnginePool, member: Member, version: int, name: str, deadline_s: float) -> Path:
    """The engine's folder of that name, once it is announced."""
    whose, ends = f"engine {member.index} at {member.url}", time.monotonic() + deadline_s
    while True:
        now = await asyncio.to_thread(pool.listed, member) or member
        folders = {Path(path).name: Path(path) for path in now.replicas}
        if name in folders:
            return folders[name]
        stuck, _, reason = now.stuck.partition(": ")
        if stuck in (name, numbered(version)):
            raise EngineVersionError(f"{whose} cannot make its replica {name}: {reason}")
        if folders and max(folders).partition("-")[0] > numbered(version):
            raise EngineVersionError(
                f"{whose} has a replica of {max(folders)}, beyond {name}; it waits for the publish"
            )
        if time.monotonic() > ends:
            raise EngineVersionError(
                f"{whose} did not make its replica {name} within {deadline_s:g} s (it has {', '.join(folders)}); see "
                "the log of its role"
            )
        await asyncio.sleep(_POLL_S)
