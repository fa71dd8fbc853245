"""Fleets over servers whose URLs are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.data.membership import Membership
from rollout_sglang.fleet import Fleet, FleetSettings
from rollout_sglang.weights.update_lease import STALE_S, Updates


def members(folder: Path, urls: Sequence[str], router: str | None = None) -> Membership:
    """The engines at these URLs, and a router, as `folder`/engines says."""
    membership = Membership(folder / "engines", tuple(urls))
    if router is not None:
        membership.announce_router(router)
    return membership


def settings(
    folder: Path,
    *,
    key: str | None = None,
    deadline_s: float = 60.0,
    load_deadline_s: float = 60.0,
    stale_s: float = STALE_S,
) -> FleetSettings:
    """Those of a fleet whose updates are numbered in `folder`/policy/updates."""
    return FleetSettings(
        updates=Updates(folder / "policy" / "updates", stale_s=stale_s),
        api_key=key,
        request_deadline_s=deadline_s,
        load_deadline_s=load_deadline_s,
        on_change=None,
    )


def fleet_of(
    folder: Path,
    urls: Sequence[str],
    *,
    router: str | None = None,
    key: str | None = None,
    deadline_s: float = 60.0,
    load_deadline_s: float = 60.0,
    keeps_kv: bool = False,
) -> Fleet:
    """A fleet over the servers at these URLs."""
    taken = settings(folder, key=key, deadline_s=deadline_s, load_deadline_s=load_deadline_s)
    return Fleet(members(folder, urls, router), **{**taken, "keeps_kv": keeps_kv})
