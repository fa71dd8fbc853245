"""One SGLang engine: `evenkeel role engine RUN INDEX`, on each host that it spans.

It waits for a published policy, starts SGLang with the newest complete one, and announces itself once SGLang answers.
Announced is not admitted: the fleet verifies its weights first. A server that hangs is announced as such, so that no
publish waits for it, and ended when it does not come to itself: whoever started this role starts it again. Asked to
end, it withdraws, lets SGLang answer what is in flight, and stops it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launch.build.api_key import read_api_key
from launch.build.engines import check_engines, engine_spec
from launch.roles.base import is_in_force, wait_for_recipe
from launch.roles.rendezvous import Rendezvous, await_node_0
from launch.roles.server_turn import reason_to_start_again
from launch.roles.starting_weights import hold_weights, release_weights, starting_folder
from launch.run.addresses import LOOPBACK, bind_address, interface_environment
from launch.run.environment import note_engine
from launch.run.waiting import (
    EPOCH_POLL_S,
    FINISHED_POLL_S,
    POLL_S,
    Outage,
    Stop,
    Throttle,
    grace_s,
    log_file,
    wait_for,
    wait_for_policy,
)
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import Epoch, claim, epoch_folder
from pipeline.data.files import VISIBLE_S
from pipeline.data.membership import Announcement, Member
from pipeline.data.quant_maps import digest_of, read_quant_map
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineHungError, EngineStartError, LayoutError, RecipeError, SupersededError
from rollout_sglang.server.liveness import Liveness
from rollout_sglang.server.process import ServerProcess
from rollout_sglang.server.start import EngineSpec, before_port, server_url, start
from rollout_sglang.weights.replica_keeper import ReplicaKeeper

DEFAULT_PORT = 30000
"""Of engine 0, where neither --port nor rollout.port says another; engine i has the i-th after it."""
ALIVE_POLL_S = 1.0
USAGE_STATUS = 2
"""Exit status of argparse: the same command line fails again."""
RENDEZVOUS_PORTS = 10_000
"""The hosts of an engine meet at the port that lies so far above its own."""


@dataclass(frozen=True)
class EngineRole:
    """One host's part of one engine."""

    run: RunDirectory
    index: int
    host: str = LOOPBACK
    port: int | None = None
    nodes: int = 1
    node: int = 0
    metrics: bool = False
    recipe: Path | None = None
    """The one that the learner is given, if it is known."""

    @property
    def rendezvous(self) -> Path:
        return self.run.path / "engines" / f"hosts-{self.index:06d}.json"


def run_engine(own: EngineRole, stop: Stop) -> int:
    """The exit status: 0 once the run is finished."""
    if not 0 <= own.node < own.nodes:
        raise LayoutError(f"node {own.node} of --nodes {own.nodes}: nodes count from 0; correct one of them")
    key = read_api_key()
    address = bind_address(own.host, key, stop.check)
    frozen = wait_for_recipe(own.run, stop, own.recipe)
    recipe = frozen.recipe
    check_engines(recipe)
    if recipe.rollout.tensor_parallel % own.nodes:
        raise LayoutError(
            f"--nodes is {own.nodes}, which does not divide rollout.tensor_parallel {recipe.rollout.tensor_parallel}"
        )
    if own.nodes > 1 and recipe.weights.channel == "delta":
        raise LayoutError(
            f"--nodes is {own.nodes}, but with weights.channel delta an engine has its replica on one host; use disk"
        )
    os.environ |= interface_environment(address)  # SGLang's ranks meet other hosts', and the learner's by broadcast
    wait_for_policy(own.run, recipe, stop)
    if own.run.is_finished():
        return 0
    port = own.port or (recipe.rollout.port or DEFAULT_PORT) + own.index
    if own.node > 0:
        return _run_other_host(own, recipe, address, port, key, stop)
    while True:
        epoch = claim(own.run.path, "engine", own.index, recipe=frozen.path.name)
        if not is_in_force(own.run, frozen):  # it was changed since it was read
            return run_engine(own, stop)
        with epoch.superseded_said():
            why = _run_start(own, recipe, address, port, key, stop, epoch)
        if why is None:
            break
        print(f"engine {own.index} is started again: {why}", flush=True)
    stop.check()
    return 0


def _run_start(
    own: EngineRole, recipe: Recipe, address: str, port: int, key: str | None, stop: Stop, epoch: Epoch
) -> str | None:
    """One server from its start to its end. Why it should be started again; None when it should not."""
    membership = own.run.membership()
    for earlier in membership.engines():
        if earlier.index == own.index and earlier.started < epoch.number:
            membership.withdraw(earlier)  # of a start that is superseded
    place: dict[str, Any] = dict(host=address, metrics=own.metrics)
    meeting_port = port + RENDEZVOUS_PORTS
    if own.nodes > 1:
        place |= dict(nodes=own.nodes, node=0, rendezvous=f"{before_port(address)}:{meeting_port}")
    newest = partial(engine_spec, own.run, recipe, own.index, port, key, log=log_file(), **place)
    told = Announcement(membership, Member(own.index, server_url(own.host, port), epoch.number), epoch.check)
    keeper = ReplicaKeeper(own.run, told.change) if recipe.weights.channel == "delta" else None

    def meet(spec: EngineSpec) -> None:
        if own.nodes > 1:
            epoch.check()  # a later start may have written its own
            Rendezvous(epoch.number, address, meeting_port, own.nodes, spec.version).write(own.rendezvous)

    spec = keeper.first(newest) if keeper else hold_weights(own.run, own.index, own.node, epoch.number, newest, meet)
    release = partial(release_weights, spec)
    loaded, ended = (keeper.begin, keeper.close) if keeper else (release, release)
    try:
        note_engine(own.run, epoch)
        told.change(quant_map=digest_of(read_quant_map(spec.model)))
        return _serve_start(own, recipe, epoch, stop, start(spec), told, loaded)
    finally:
        ended()


def _serve_start(
    own: EngineRole,
    recipe: Recipe,
    epoch: Epoch,
    stop: Stop,
    server: ServerProcess,
    told: Announcement,
    loaded: Callable[[], None],
) -> str | None:
    membership = own.run.membership()

    def announce(hung: str) -> None:
        loaded()
        told.say(silent=hung)

    def wants_another() -> str | None:
        return reason_to_start_again(own.run, recipe, told.member)

    try:
        deadline_s = recipe.rollout.start_deadline_s
        listed = partial(membership.lists, told.member)
        return serve(server, own.run, epoch, stop, deadline_s, announce, listed, wants_another)
    finally:
        told.withdraw()
        stop_server(server, grace_s() if stop.asked else 0.0)


def serve(
    server: ServerProcess,
    run: RunDirectory,
    epoch: Epoch,
    stop: Stop,
    start_deadline_s: float,
    announce: Callable[[str], None],
    is_listed: Callable[[], bool],
    wants_another: Callable[[], str | None] = lambda: None,
) -> str | None:
    """Announce the server once it answers, then watch it until the run is finished or this role is asked to end.
    Returns what `wants_another` says, once it says why another server should take its place.

    `announce` is told why the server hangs, or nothing. It is called again when that changes, and when the server is
    not listed: an earlier start, which does not know yet that it is superseded, may have replaced the announcement.

    Raises EngineStartError when it does not come up or ends, EngineHungError when it hangs and does not go on,
    RecipeError when it does not take its arguments, SupersededError when a later start has begun.
    """
    look, look_for_end, look_alive = Throttle(EPOCH_POLL_S), Throttle(FINISHED_POLL_S), Throttle(ALIVE_POLL_S)
    liveness, told = Liveness(server.pid, server.is_ready), ""
    ends, up, outage = time.monotonic() + start_deadline_s, False, Outage("an engine's role")
    while not stop.asked:
        if (status := server.poll()) is not None:
            if status == USAGE_STATUS and not up:
                raise RecipeError(f"SGLang does not take its arguments ({server.why()}); correct rollout.extra_args")
            raise EngineStartError(f"server {server.how_it_ended()}{'' if up else ' before it was up'}; {server.why()}")
        if look():
            outage.tolerate(epoch.check, None)
        if (due := look_for_end()) and outage.tolerate(run.is_finished, False):
            return None
        if up and due and (why := outage.tolerate(wants_another, None)) is not None:
            return why
        hung = check_alive(liveness) if up and look_alive() else told
        if hung != told or (up and due and not outage.tolerate(is_listed, True)) or (not up and server.is_ready()):
            epoch.check()
            if not up:  # SGLang logs errors of its warm-up that are none
                server.forget_said()
            up, told = True, hung
            announce(hung)
        if not up and time.monotonic() > ends:
            raise EngineStartError(f"server was not up within {start_deadline_s:g} s, stopped; {server.why()}")
        time.sleep(POLL_S)
    return None


def check_alive(liveness: Liveness) -> str:
    """Why the server hangs; empty while it does not. Raises EngineHungError when it has for too long: it is ended."""
    reason = liveness.look() or ""
    if reason and liveness.is_lost:
        raise EngineHungError(f"server hangs ({reason}) and did not go on within {liveness.hung_s:.0f} s: ended")
    return reason


def stop_server(server: ServerProcess, grace_s: float) -> None:
    """SGLang answers what is in flight after SIGTERM, then ends; after `grace_s` it is killed."""
    if grace_s > 0:
        server.terminate()
        ends = time.monotonic() + grace_s
        while server.poll() is None and time.monotonic() < ends:
            time.sleep(POLL_S)
    server.kill()


def _run_other_host(own: EngineRole, recipe: Recipe, address: str, port: int, key: str | None, stop: Stop) -> int:
    """A host that only adds GPUs: it joins node 0, and follows it when it is started again."""
    starts = epoch_folder(own.run.path, "engine", own.index)
    while True:
        rendezvous = await_node_0(
            own.run,
            own.rendezvous,
            own.nodes,
            is_alive=lambda found: not Epoch(starts, found.epoch).is_superseded(),
            join=lambda found: found,
            role=f"engine {own.index}",
            stop=stop,
            deadline_s=recipe.rollout.start_deadline_s,
        )
        if rendezvous == "finished":
            return 0
        place: dict[str, Any] = dict(
            host=address, nodes=own.nodes, node=own.node, rendezvous=f"{before_port(rendezvous.host)}:{rendezvous.port}"
        )
        spec_of = partial(engine_spec, own.run, recipe, own.index, port, key, log=log_file(), **place)
        epoch = Epoch(starts, rendezvous.epoch)
        newest = _as_node_0(own, rendezvous, stop, spec_of, epoch)
        with suppress(SupersededError):  # node 0 is started again, and this host had no weights yet
            spec = hold_weights(own.run, own.index, own.node, rendezvous.epoch, newest)
            server = start(spec)
            try:
                if _serve_with_node_0(own, server, spec, epoch, stop):
                    return 0
            finally:
                stop_server(server, 0.0)
                release_weights(spec)
        stop.check()
        print(f"start {rendezvous.epoch} of engine {own.index} is superseded; following the next", flush=True)


def _as_node_0(
    own: EngineRole, rendezvous: Rendezvous, stop: Stop, spec_of: Callable[..., EngineSpec], epoch: Epoch
) -> Callable[[], EngineSpec]:
    """With the weights that node 0 holds for its start. The call raises SupersededError once node 0 is started again,
    DeadlineExceededError where it has ended, and StoppedError."""
    folder = starting_folder(own.run, own.index, 0, rendezvous.epoch)

    def are_there() -> bool | None:
        if folder.is_dir():
            return True
        epoch.check()
        return None

    def spec() -> EngineSpec:
        if rendezvous.version is None:
            return spec_of()
        wait_for(stop, are_there, f"the weights that node 0 holds ({folder})", VISIBLE_S)
        return spec_of(weights=(rendezvous.version, folder))

    return spec


def _serve_with_node_0(own: EngineRole, server: ServerProcess, spec: EngineSpec, epoch: Epoch, stop: Stop) -> bool:
    """Watch this host's server. True once the run is finished; False when node 0 has begun another start, which this
    server does not belong to, or when this role is asked to end. Raises EngineStartError when the server ends."""
    look, look_for_end, announced = Throttle(EPOCH_POLL_S), Throttle(FINISHED_POLL_S), own.run.membership().engines
    look_alive, liveness, outage = Throttle(ALIVE_POLL_S), Liveness(server.pid, None), Outage("a host of an engine")
    nobody: Sequence[Member] = ()
    while not stop.asked:
        status = server.poll()
        if status is None and look_alive():
            check_alive(liveness)
        if (look() or status is not None) and outage.tolerate(epoch.is_superseded, False):
            return False  # also for a server that has ended: it met nobody, or lost node 0's
        if status is not None:
            raise EngineStartError(f"node {own.node} of engine {own.index} ended with status {status}")
        if look_for_end():
            if outage.tolerate(own.run.is_finished, False):
                return True
            if any(
                one.index == own.index and one.started == epoch.number for one in outage.tolerate(announced, nobody)
            ):
                release_weights(spec)  # node 0 is up, and so are all
        time.sleep(POLL_S)
    return False
