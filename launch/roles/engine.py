"""Run one SGLang engine (`evenkeel role engine RUN INDEX`, on each of its hosts), or the router before the engines.

An engine's role waits for a published policy, starts SGLang with the newest complete version, and announces the server
once it answers. The fleet verifies the weights of an announced engine before it gets requests. A server that hangs is
announced as such, so that no publish waits for it, and ended if it stays so; whatever started the role restarts it.
Asked to end, a role withdraws its engine, lets SGLang answer requests in flight, and stops it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from launch.build.api_key import read_api_key
from launch.build.engines import check_engines, engine_spec
from launch.roles.lifecycle import Rendezvous, await_node_0, is_in_force, wait_for_recipe
from launch.run.addresses import LOOPBACK, bind_address, interface_environment
from launch.run.environment import environment
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
from pipeline.control.files import ControlFiles
from pipeline.data.epochs import Epoch, claim, epoch_folder
from pipeline.data.event_log import EventLog
from pipeline.data.files import VISIBLE_S
from pipeline.data.membership import Announcement, Member
from pipeline.data.quant_maps import digest_of, read_quant_map
from pipeline.data.run_directory import RunDirectory, numbered
from pipeline.errors import EngineHungError, EngineStartError, LayoutError, RecipeError, StoreError, SupersededError
from pipeline.ports.weights import verify_policy
from pipeline.trainer.turns import GpuLock
from rollout_sglang.server.liveness import Liveness, Look, Presence, look_with
from rollout_sglang.server.rollout_python import sglang_version
from rollout_sglang.server.start import EngineSpec, ServerProcess, before_port, server_url, start, start_router
from rollout_sglang.weights.replica import ReplicaKeeper

DEFAULT_PORT = 30000
"""Port of engine 0 without --port and rollout.port; engine i has the i-th port after it."""
ALIVE_POLL_S = 1.0
USAGE_STATUS = 2
"""Exit status of argparse: the same command line fails again."""
RENDEZVOUS_PORTS = 10_000
"""Distance from an engine's port to the port at which its hosts meet."""
_LINK_ATTEMPTS = 20
"""Most attempts to link a policy that is deleted meanwhile."""


@dataclass
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
    """The learner's recipe, if it is known."""
    rendezvous: Path = field(init=False)

    def __post_init__(self) -> None:
        self.rendezvous = self.run.path / "engines" / f"hosts-{self.index:06d}.json"


def run_engine(own: EngineRole, stop: Stop) -> int:
    """Run this host's part of the engine; return the exit status, 0 once the run is finished."""
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
    os.environ |= interface_environment(address)  # SGLang's ranks reach other hosts', and a broadcasting learner's
    wait_for_policy(own.run, recipe, stop)
    if own.run.is_finished():
        return 0
    port = own.port or (recipe.rollout.port or DEFAULT_PORT) + own.index
    if own.node > 0:
        return _run_other_host(own, recipe, address, port, key, stop)
    while True:
        epoch = claim(own.run.path, "engine", own.index, recipe=frozen.path.name)
        if not is_in_force(own.run, frozen):  # the recipe has changed meanwhile
            return run_engine(own, stop)
        with epoch.as_superseded():
            why = _run_start(own, recipe, address, port, key, stop, epoch)
        if why is None:
            break
        print(f"engine {own.index} is started again: {why}", flush=True)
    stop.check()
    return 0


def _run_start(
    own: EngineRole, recipe: Recipe, address: str, port: int, key: str | None, stop: Stop, epoch: Epoch
) -> str | None:
    """Run one server from its start to its end; return why it should be restarted, or None."""
    membership = own.run.membership()
    earlier = membership.engine(own.index)
    if earlier is not None and earlier.started < epoch.number:
        membership.withdraw(earlier)  # a superseded start's
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

    turn = GpuLock(own.run)
    if recipe.rollout.colocated:  # none starts while the learner holds the memory

        def check() -> None:
            stop.check()
            epoch.check()

        turn.take(recipe.run.wait_deadline_s, check, shared=True)
    spec = keeper.first(newest) if keeper else hold_weights(own.run, own.index, own.node, epoch.number, newest, meet)
    release = partial(shutil.rmtree, spec.model, ignore_errors=True)  # may be called twice
    loaded, ended = (keeper.begin, keeper.close) if keeper else (release, release)

    def announce(hung: str) -> None:
        loaded()
        told.say(silent=hung)
        turn.release()

    try:
        found = environment()
        found["packages"]["sglang"] = sglang_version() or "none"
        EventLog(own.run.path, epoch.name).event("environment", role=epoch.folder.name, **found)
        told.change(quant_map=digest_of(read_quant_map(spec.model)))
        server = start(spec)
        try:
            return serve(
                server,
                own.run,
                epoch,
                stop,
                recipe.rollout.start_deadline_s,
                announce,
                partial(membership.lists, told.member),
                lambda: reason_to_start_again(own.run, recipe, told.member),
            )
        finally:
            told.withdraw()
            stop_server(server, grace_s() if stop.asked else 0.0)
    finally:
        ended()
        turn.release()


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

    Returns early with the reason of `wants_another` to start another server. `announce` gets the reason why the server
    hangs, or "". It is called again when the reason changes, and when the server is not listed: an earlier start that
    does not know yet that it is superseded may have replaced the announcement.

    Raises EngineStartError when the server does not come up or ends, EngineHungError when it hangs for too long,
    RecipeError when it refuses its arguments, SupersededError when a later start has begun.
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
            if not up:  # SGLang's warm-up logs harmless errors
                server.forget_said()
            up, told = True, hung
            announce(hung)
        if not up and time.monotonic() > ends:
            raise EngineStartError(f"server was not up within {start_deadline_s:g} s, stopped; {server.why()}")
        time.sleep(POLL_S)
    return None


def check_alive(liveness: Liveness) -> str:
    """Return why the server hangs, or "". Raises EngineHungError when it has hung for too long."""
    reason = liveness.look() or ""
    if reason and liveness.is_lost:
        raise EngineHungError(f"server hangs ({reason}) and did not go on within {liveness.hung_s:.0f} s: ended")
    return reason


def stop_server(server: ServerProcess, grace_s: float) -> None:
    """Stop a server: SIGTERM lets SGLang answer requests in flight and end; after `grace_s` it is killed."""
    if grace_s > 0:
        server.terminate()
        ends = time.monotonic() + grace_s
        while server.poll() is None and time.monotonic() < ends:
            time.sleep(POLL_S)
    server.kill()


def _run_other_host(own: EngineRole, recipe: Recipe, address: str, port: int, key: str | None, stop: Stop) -> int:
    """Run a host that only adds GPUs: join node 0, and follow it when it is restarted."""
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
        with suppress(SupersededError):  # node 0 is restarted before this host had weights
            spec = hold_weights(own.run, own.index, own.node, rendezvous.epoch, newest)
            server = start(spec)
            try:
                if _serve_with_node_0(own, server, spec, epoch, stop):
                    return 0
            finally:
                stop_server(server, 0.0)
                shutil.rmtree(spec.model, ignore_errors=True)
        stop.check()
        print(f"start {rendezvous.epoch} of engine {own.index} is superseded; following the next", flush=True)


def _as_node_0(
    own: EngineRole, rendezvous: Rendezvous, stop: Stop, spec_of: Callable[..., EngineSpec], epoch: Epoch
) -> Callable[[], EngineSpec]:
    """Return a function that makes the spec with node 0's weights. It raises SupersededError once node 0 is restarted,
    DeadlineExceededError if node 0 has ended, and StoppedError."""
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
    """Watch this host's server. Returns True once the run is finished; False when node 0 is restarted or this role is
    asked to end. Raises EngineStartError when the server ends."""
    look, look_for_end = Throttle(EPOCH_POLL_S), Throttle(FINISHED_POLL_S)
    announced = partial(own.run.membership().engine, own.index)
    look_alive, liveness, outage = Throttle(ALIVE_POLL_S), Liveness(server.pid, None), Outage("a host of an engine")
    while not stop.asked:
        status = server.poll()
        if status is None and look_alive():
            check_alive(liveness)
        if (look() or status is not None) and outage.tolerate(epoch.is_superseded, False):
            return False  # an ended server, too: it did not meet node 0's, or lost it
        if status is not None:
            raise EngineStartError(f"node {own.node} of engine {own.index} ended with status {status}")
        if look_for_end():
            if outage.tolerate(own.run.is_finished, False):
                return True
            if (found := outage.tolerate(announced, None)) is not None and found.started == epoch.number:
                shutil.rmtree(spec.model, ignore_errors=True)  # node 0 is up, so all hosts have loaded the weights
        time.sleep(POLL_S)
    return False


def reason_to_start_again(run: RunDirectory, recipe: Recipe, own: Member, look: Look | None = None) -> str | None:
    """Return why the server of `own` should be restarted now; None if it should not, or not yet.

        its quant map is not the newest policy's      once every engine before it serves the new map, or is lost
        the ESS controller names this start           at once

    Of several engines, another one must be serving, so that never all are away. An engine with the new map that is not
    verified holds back those after it, so weights that fail in the new formats cost one engine, not all. A role that
    dies meanwhile keeps no state: it restarts with the newest policy, and so with the newest map.

    All engines look again and again, so a look reads what concerns the others only where it may have to restart.
    """
    if recipe.controller is None:
        return None
    control, published = ControlFiles(run.control, run.fence), run.published_version()
    step = control.newest_step(published)
    is_suspected = step is not None and _restarts(control, step).get(own.index) == own.started
    # A folder without a map is just being deleted or replaced.
    wanted = digest_of(read_quant_map(run.policy_directory(run.newest_policy(published))))
    if not is_suspected and wanted in ("", own.quant_map):
        return None
    presence = Presence(run, recipe.rollout.start_deadline_s, look or look_with(read_api_key()))
    others = {member.index: member for member in run.membership().engines() if member.index != own.index}

    def has_changed(index: int) -> bool:
        member = others.get(index)
        if member is not None and member.quant_map == wanted and presence.serves(member):
            return True
        return presence.is_lost(index, member)

    if is_suspected:
        reason = "the ESS of its tokens is below the floor, and that of the others is not"
    elif all(map(has_changed, reversed(range(own.index)))):  # the one just before is the last to change
        reason = f"the run has another quant map, {wanted} instead of {own.quant_map or 'none'}"
    else:
        return None
    if recipe.rollout.engines > 1 and not any(presence.serves(member) for member in others.values()):
        return None
    return reason


@lru_cache(maxsize=1)
def _restarts(control: ControlFiles, step: int) -> Mapping[int, int]:
    """Return the engines to restart by the record of a step. A record never changes, and has a part for each engine."""
    record = control.read(step)
    assert record is not None, step
    return record.restarts


def starting_folder(run: RunDirectory, index: int, node: int, start: int) -> Path:
    """Return the folder with the weights of one start of an engine on one host."""
    return run.path / "engines" / "starting" / f"{numbered(index)}-{node}-{numbered(start)}"


def hold_weights(
    run: RunDirectory,
    index: int,
    node: int,
    start: int,
    newest: Callable[[], EngineSpec],
    held: Callable[[EngineSpec], None] = lambda _: None,
) -> EngineSpec:
    """Return `newest()` with a folder of hard links that no learner deletes, for the caller to remove.

    A learner deletes old policies (weights.keep), and SGLang opens their files many seconds after its start, too late
    in a run of fast steps.

        RUN/engines/starting/000003-0-000002/   engine 3, its first host, its second start; removed once it is up

    Each start has a folder, since a superseded start may end late and must not remove its successor's weights. Other
    hosts of an engine link what node 0 holds: ranks with parts of two versions would serve neither. `start` counts the
    engine's starts; folders of earlier ones on this host are removed. `held` is called with the spec before the files
    are verified. Raises StoreError if every policy is deleted while it is linked, or a file is damaged or of another
    version.
    """
    folder = starting_folder(run, index, node, start)
    for left in folder.parent.glob(f"{numbered(index)}-{node}-*"):
        if int(left.name.rpartition("-")[2]) < start:
            shutil.rmtree(left, ignore_errors=True)
    for _ in range(_LINK_ATTEMPTS):
        spec = newest()
        if _link(spec.model, folder):
            held(spec)
            verify_policy(folder, spec.version, f"stop the run; `evenkeel repair {run.path}` has it made anew")
            return replace(spec, model=folder)
    raise StoreError(
        f"{spec.model}, and those before it, were deleted while they were linked to {folder}; raise weights.keep"
    )


def _link(source: Path, folder: Path) -> bool:
    """Link the files of `source`, which may be deleted meanwhile. Returns whether `folder` has all of them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        # A folder within it holds weights for engines with an older quant map.
        names = {entry.name for entry in os.scandir(source) if entry.is_file()}
        for name in names:
            os.link(source / name, folder / name)
        return {entry.name for entry in os.scandir(source) if entry.is_file()} == names != set()
    except FileNotFoundError:
        return False


def run_router(
    run: RunDirectory,
    stop: Stop,
    *,
    host: str = LOOPBACK,
    port: int | None = None,
    metrics_port: int | None = None,
    recipe: Path | None = None,
) -> int:
    """Run the router; return the exit status, 0 once the run is finished. It starts empty, and the fleet gives it
    verified engines. `recipe` is the learner's, if it is known."""
    key = read_api_key()
    address = bind_address(host, key, stop.check)
    frozen = wait_for_recipe(run, stop, recipe)
    rollout = frozen.recipe.rollout
    listens = port or (rollout.port or DEFAULT_PORT) + rollout.engines
    epoch = claim(run.path, "router", recipe=frozen.path.name)
    if not is_in_force(run, frozen):
        return run_router(run, stop, host=host, port=port, metrics_port=metrics_port, recipe=recipe)
    url, membership = server_url(host, listens), run.membership()
    server = start_router(
        listens, key, log_file(), address, metrics_port, request_deadline_s=rollout.request_deadline_s
    )
    try:
        with epoch.as_superseded():
            serve(
                server,
                run,
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
