"""When an engine's server is started again while the run goes on: for a new quant map, or because it is suspected.

    its quant map is not that of the newest policy      all engines before it have the new one
    the ESS controller names this start of it           at once

Either way another engine must be serving, so that never all engines are away; where there is one engine only, the run
waits for it. All of it is read from the run directory: a role that dies in the middle starts with the newest policy,
and thereby with the newest map.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from launch.cluster.roles.api_key import read_api_key
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles
from pipeline.data.membership import Member
from pipeline.data.quant_maps import digest_of, read_quant_map
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EvenKeelError
from rollout_sglang.client import EngineClient
from rollout_sglang.protocol import INVALIDATED
from rollout_sglang.transport import LOOK_DEADLINE_S


def is_serving(member: Member) -> bool:
    """Whether the engine answers, with weights that were verified."""

    async def look() -> bool:
        client = EngineClient(member.url, read_api_key(), index=member.index, request_deadline_s=LOOK_DEADLINE_S)
        try:
            return not (await client.model_info(LOOK_DEADLINE_S)).weight_version.startswith(INVALIDATED)
        except EvenKeelError:
            return False
        finally:
            await client.close()

    return asyncio.run(look())


def reason_to_start_again(
    run: RunDirectory, recipe: Recipe, own: Member, serves: Callable[[Member], bool] = is_serving
) -> str | None:
    """Why the server of `own` should be started again now; None: it should not, or not yet."""
    if recipe.controller is None:
        return None
    record = ControlFiles(run.control, run.fence).newest()
    wanted = digest_of(read_quant_map(run.policy_directory(run.newest_policy(run.published_version()))))
    others = [member for member in run.membership().engines() if member.index != own.index]
    if record is not None and record.restarts.get(own.index) == own.started:
        reason = "the ESS of its tokens is below the floor, and that of the others is not"
    elif own.quant_map != wanted and _all_before_have(others, own.index, wanted):
        reason = f"the run has another quant map, {wanted or 'none'} instead of {own.quant_map or 'none'}"
    else:
        return None
    if recipe.rollout.engines > 1 and not any(serves(member) for member in others):
        return None
    return reason


def _all_before_have(others: Sequence[Member], index: int, wanted: str) -> bool:
    changed = {member.index for member in others if member.quant_map == wanted}
    return changed.issuperset(range(index))
