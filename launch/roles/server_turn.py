"""When an engine's server is started again while the run goes on: for a new quant map, or because it is suspected.

    its quant map is not that of the newest policy      every engine before it serves with the new one, or is lost
    the ESS controller names this start of it           at once

Either way another engine must be serving, so that never all engines are away; where there is one engine only, the run
waits for it. An engine that has the new map but is not verified holds back those after it: weights that do not pass in
the new formats cost one engine, not all. All of it is read from the run directory and asked of the engines: a role that
dies in the middle starts with the newest policy, and thereby with the newest map.
"""

from __future__ import annotations

from launch.build.api_key import read_api_key
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles
from pipeline.data.membership import Member
from pipeline.data.quant_maps import digest_of, read_quant_map
from pipeline.data.run_directory import RunDirectory
from rollout_sglang.presence import Look, Presence, look_with


def reason_to_start_again(run: RunDirectory, recipe: Recipe, own: Member, look: Look | None = None) -> str | None:
    """Why the server of `own` should be started again now; None: it should not, or not yet."""
    if recipe.controller is None:
        return None
    presence = Presence(run, recipe.rollout.start_deadline_s, look or look_with(read_api_key()))
    record = ControlFiles(run.control, run.fence).newest()
    others = {member.index: member for member in run.membership().engines() if member.index != own.index}
    # Where the folder shows no map it is being deleted or replaced at this moment.
    wanted = digest_of(read_quant_map(run.policy_directory(run.newest_policy(run.published_version()))))
    if record is not None and record.restarts.get(own.index) == own.started:
        reason = "the ESS of its tokens is below the floor, and that of the others is not"
    elif wanted not in ("", own.quant_map) and all(
        _has_changed(presence, index, others.get(index), wanted) for index in range(own.index)
    ):
        reason = f"the run has another quant map, {wanted} instead of {own.quant_map or 'none'}"
    else:
        return None
    if recipe.rollout.engines > 1 and not any(presence.serves(member) for member in others.values()):
        return None
    return reason


def _has_changed(presence: Presence, index: int, member: Member | None, wanted: str) -> bool:
    """Whether an engine before this one need not be waited for."""
    if member is not None and member.quant_map == wanted and presence.serves(member):
        return True
    return presence.is_lost(index, member)
