"""SGLang's router: `evenkeel role router RUN`. It starts empty; the fleet gives it the engines that it has verified."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launch.build.api_key import read_api_key
from launch.roles.base import is_in_force, wait_for_recipe
from launch.roles.engine import DEFAULT_PORT, serve, stop_server
from launch.run.addresses import LOOPBACK, bind_address
from launch.run.waiting import Stop, grace_s, log_file
from pipeline.data.epochs import claim
from pipeline.data.run_directory import RunDirectory
from rollout_sglang.server.start import server_url, start_router


@dataclass(frozen=True)
class RouterRole:
    """The router of a run."""

    run: RunDirectory
    host: str = LOOPBACK
    port: int | None = None
    metrics_port: int | None = None
    recipe: Path | None = None
    """The one that the learner is given, if it is known."""


def run_router(own: RouterRole, stop: Stop) -> int:
    """The exit status: 0 once the run is finished."""
    key = read_api_key()
    address = bind_address(own.host, key, stop.check)
    frozen = wait_for_recipe(own.run, stop, own.recipe)
    rollout = frozen.recipe.rollout
    port = own.port or (rollout.port or DEFAULT_PORT) + rollout.engines
    epoch = claim(own.run.path, "router", recipe=frozen.path.name)
    if not is_in_force(own.run, frozen):
        return run_router(own, stop)
    url, membership = server_url(own.host, port), own.run.membership()
    server = start_router(
        port, key, log_file(), address, own.metrics_port, request_deadline_s=rollout.request_deadline_s
    )
    try:
        with epoch.superseded_said():
            serve(
                server,
                own.run,
                epoch,
                stop,
                rollout.start_deadline_s,
                lambda _: membership.announce_router(url),
                lambda: membership.router() == url,
            )
    finally:
        if not epoch.is_superseded():  # the router of a later start may have the same URL
            membership.withdraw_router(url)
        stop_server(server, min(grace_s(), 5.0) if stop.asked else 0.0)
    stop.check()
    return 0
