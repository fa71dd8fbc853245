"""Run the learner's agent on one host: `evenkeel role learner RUN [NODE]`.

    node 0        freezes the recipe and publishes version 0 at the first start · claims the learner's epoch · writes
                  its address to RUN/learner.json · waits for the other nodes · starts its ranks · tells how they ended
    node 1, 2, …  wait for a learner.json whose epoch is alive · join · start their ranks · follow the next epoch when
                  this one ends before the run does

Ranks cannot go on without the others, and torchrun may hang then, so the agent ends its ranks. A learner restarts as a
whole, from its newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from launch.build.api_key import API_KEY_VARIABLE, read_api_key
from launch.build.engines import shares_gpus
from launch.roles.heartbeat import Ending, Peer, Peers
from launch.roles.lifecycle import Rendezvous, await_node_0, wait_for_recipe
from launch.run.addresses import LOOPBACK, bind_address, interface_environment
from launch.run.metrics import METRICS_PORT_VARIABLE
from launch.run.preflight import check_model_here, preflight, seed_policy, start_warnings
from launch.run.processes import FatalNotes, ProcessTree, child_environment, rendezvous_options, torchrun
from launch.run.waiting import (
    BEGUN,
    EPOCH_POLL_S,
    EPOCH_VARIABLE,
    POLL_S,
    Outage,
    Stop,
    Throttle,
    grace_s,
    log_file,
    wait_for,
    wait_for_engines,
)
from pipeline.child_process import log_tail, make_scratch, remove_scratch, scratch_environment
from pipeline.config.loader import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import Epoch, claim, epoch_folder
from pipeline.data.event_log import EventLog
from pipeline.data.files import remove_old_leftovers
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import (
    FATAL_EXIT_CODE,
    STOPPED_EXIT_CODE,
    SUPERSEDED_EXIT_CODE,
    LayoutError,
    PortInUseError,
    SupersededError,
)
from pipeline.resume import changes_in_words, go_on_with, note_changes, note_outside
from pipeline.tasks.data import with_digest
from pipeline.trainer.batches import STOP_FILE_VARIABLE

DEFAULT_PORT = 29500
REASON_S = 5.0
"""Longest wait for another node's reason after this node's ranks have failed."""
LAST_WORD_S = 60.0
"""Longest wait for node 0's ending after this node's ranks have finished."""


@dataclass
class LearnerNode:
    """One host's part of the learner."""

    run: RunDirectory
    node: int = 0
    nodes: int = 1
    host: str = LOOPBACK
    port: int = DEFAULT_PORT
    """Port of torch's rendezvous on node 0; the agents' heartbeat has the next port."""
    recipe: Path | None = None
    """The recipe that node 0 starts or resumes the run with; other nodes wait for it."""
    rendezvous: Path = field(init=False)

    def __post_init__(self) -> None:
        self.rendezvous = self.run.path / "learner.json"


def run_learner_node(own: LearnerNode, stop: Stop) -> int:
    """Run the agent; return its exit status."""
    if not 0 <= own.node < own.nodes:
        raise LayoutError(f"node {own.node} of --nodes {own.nodes}: nodes count from 0; correct one of them")
    ending = lead(own, stop) if own.node == 0 else follow(own, stop)
    if ending.status:
        kind = "learner" if ending.status == STOPPED_EXIT_CODE else "error"
        print(f"{kind}: {ending.reason}", file=sys.stderr, flush=True)
    return ending.status


def lead(own: LearnerNode, stop: Stop) -> Ending:
    """Run node 0."""
    if own.recipe is None:
        recipe = own.run.recipe()
    else:
        recipe = load_recipe(own.recipe)
        check_model_here(recipe)
        recipe = with_digest(recipe, own.run)
        for sentence in start_warnings(recipe, preflight(recipe)):
            print(f"warning: {sentence}", file=sys.stderr, flush=True)
    processes_a_node(recipe, own.nodes)
    key = read_api_key()
    address = bind_address(own.host, key, stop.check)
    changes = go_on_with(own.run, recipe)  # first: another run's recipe must not take over
    epoch = claim(own.run.path, "learner")
    if changes:
        print(changes_in_words(own.run, changes), flush=True)
    event_log = EventLog(own.run.path, epoch.name)
    note_changes(own.run, event_log)
    for sentence in note_outside(own.run.under(epoch), recipe, event_log):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)
    with epoch.as_superseded():
        return lead_start(own, recipe, address, epoch, stop, key)


def lead_start(own: LearnerNode, recipe: Recipe, address: str, epoch: Epoch, stop: Stop, key: str | None) -> Ending:
    """Run one start of node 0, once the recipe is frozen and the start claimed."""
    run = own.run.under(epoch)
    remove_old_leftovers(run.shared_folders)
    if run.is_finished():
        return Ending(0)
    seed_policy(run, recipe)
    if shares_gpus(recipe) or recipe.rollout.colocated:
        wait_for_engines(run, recipe, stop, recipe.rollout.engines)
    if recipe.rollout.colocated:
        wait_for_turn(run, recipe, stop)
    with ExitStack() as stack:
        peers: Peers | None = None
        if own.nodes > 1:
            try:
                peers = Peers(address, own.port + 1, nodes=own.nodes, epoch=epoch.number, key=key)
            except OSError as error:
                raise PortInUseError(
                    f"port {own.port + 1} of {own.host} is taken ({os.strerror(error.errno or 0)}); stop what listens "
                    "there or give --port"
                ) from None
            joined = stack.enter_context(peers).joined

            def complete() -> bool | None:
                epoch.check()
                return len(joined) == own.nodes - 1 or None

            epoch.check()  # a later start may have written its own
            Rendezvous(epoch.number, own.host, own.port, own.nodes).write(own.rendezvous)
            others = f"the other {own.nodes - 1} nodes of the learner"
            wait_for(stop, complete, others, recipe.rollout.start_deadline_s)
            peers.start_ranks()
        try:
            ending = attend(own, recipe, address, epoch, stop, peers)
            if ending.status == 0:
                run.set_finished("learner")  # before other nodes hear of it, so that they do not restart
        except BaseException as error:
            if peers is not None:
                peers.tell(status=1, reason=str(error))
            raise
        if peers is not None:
            peers.tell(**vars(ending))
    return ending


def wait_for_turn(run: RunDirectory, recipe: Recipe, stop: Stop) -> None:
    """Wait until the engines, on the same GPUs, have nothing left to do before the learner's next publish: a batch of
    the published version is committed, or the final policy is evaluated. Evaluations precede the commit."""
    store, steps = BatchStore(run.batches), recipe.run.steps

    def is_learners() -> bool | None:
        published = run.published_version()
        behind = published < max(run.saved_steps(), default=0)
        ended = published >= steps and steps in run.evaluated_versions()
        return store.is_settled(published) or behind or ended or None

    wait_for(stop, is_learners, "the engines to have sampled what they can", recipe.run.wait_deadline_s)


def follow(own: LearnerNode, stop: Stop) -> Ending:
    """Run node 1, 2, …: join each start of the learner, until it has ended for good."""
    recipe = wait_for_recipe(own.run, stop, own.recipe).recipe
    processes_a_node(recipe, own.nodes)
    key = read_api_key()
    address, ended = bind_address(own.host, key, stop.check), set[int]()

    def join(found: Rendezvous) -> tuple[Rendezvous, Peer] | None:
        try:
            return found, Peer(found.host, found.port + 1, node=own.node, epoch=found.epoch, key=key)
        except (OSError, ValueError, KeyError, EOFError):
            return None  # node 0 has ended, or not begun: read the file again

    while True:
        joined = await_node_0(
            own.run,
            own.rendezvous,
            own.nodes,
            is_alive=lambda found: found.epoch > max(ended, default=0),
            join=join,
            role="the learner",
            stop=stop,
            deadline_s=recipe.rollout.start_deadline_s,
        )
        if joined == "finished":
            return Ending(0)
        rendezvous, peer = joined
        recipe = own.run.recipe()  # a start may have changed it
        with peer:
            ending = follow_one(own, recipe, address, rendezvous, stop, peer)
        if ending.status in (0, FATAL_EXIT_CODE) or (stop.asked and ending.status == STOPPED_EXIT_CODE):
            return ending
        print(f"start {rendezvous.epoch} of the learner has ended ({ending.reason}); following the next", flush=True)
        if peer.go or peer.ending is not None:
            ended.add(rendezvous.epoch)
        else:
            time.sleep(POLL_S)  # lost before the ranks were started: this node may join the same start


def follow_one(
    own: LearnerNode, recipe: Recipe, address: str, rendezvous: Rendezvous, stop: Stop, peer: Peer
) -> Ending:
    """Run this node's part of a start of the learner that it has joined."""
    while not peer.go:
        if (found := peer.trouble()) is not None:
            return found
        if stop.asked:
            return Ending(STOPPED_EXIT_CODE, "asked to end before all nodes were there")
        time.sleep(POLL_S)
    try:
        epoch = Epoch(epoch_folder(own.run.path, "learner"), rendezvous.epoch)
        ending = attend(own, recipe, address, epoch, stop, peer, master=rendezvous)
    except SupersededError as error:  # node 0's start: its next start wants this node
        ending = Ending(SUPERSEDED_EXIT_CODE, str(error))
    peer.tell(**vars(ending))
    if ending.status == SUPERSEDED_EXIT_CODE:
        return ending
    peer.wait_for_trouble(LAST_WORD_S if ending.status == 0 else REASON_S)
    if peer.ending is None and ending.status == 0 and not own.run.is_finished():
        # If node 0 died before it recorded the learner's end, its next start waits for this node.
        return Ending(1, peer.lost or f"node 0 has not said within {LAST_WORD_S:g} s how it ended")
    return peer.ending or ending


def attend(
    own: LearnerNode,
    recipe: Recipe,
    address: str,
    epoch: Epoch,
    stop: Stop,
    others: Peers | Peer | None,
    master: Rendezvous | None = None,
) -> Ending:
    """Run this node's ranks to their end. Raises SupersededError when a later start has begun."""
    notes, look, outage, ends = FatalNotes(own.run), Throttle(EPOCH_POLL_S), Outage("the learner's agent"), None
    scratch = make_scratch("learner")
    stop_file = scratch / "stop"
    command, environment = rank_program(own, recipe, address, epoch, master)
    environment |= {**scratch_environment(scratch), STOP_FILE_VARIABLE: str(stop_file)}
    ranks = _Torchrun(command, log_file(), environment, own_session=True)
    try:
        while (status := ranks.poll()) is None:
            if look():
                outage.tolerate(epoch.check, None)
            if others is not None and (found := others.trouble()) is not None:
                epoch.check()  # first: a superseded start is not restarted
                return found
            if ends is None and (stop.asked or (others is not None and others.stop_asked)):
                ends = time.monotonic() + grace_s()
                if isinstance(others, Peer):
                    others.tell(stop=True)
                elif not stop_file.with_name(BEGUN).exists():  # loading ranks do not look for the file
                    return Ending(STOPPED_EXIT_CODE, "asked to end before it had begun; started again, it goes on")
                else:
                    stop_file.touch()  # rank 0 finds it at its next step, and tells the others
            if ends is not None and time.monotonic() > ends:
                return Ending(STOPPED_EXIT_CODE, f"asked to end; the ranks did not within {grace_s():g} s: killed")
            time.sleep(POLL_S)
    finally:
        ranks.kill()
        remove_scratch(scratch)
    epoch.check()
    if status == 0:
        return Ending(0)
    if (error := notes.error(epoch.name)) is not None:
        return Ending(FATAL_EXIT_CODE, str(error))
    if ends is not None:
        return Ending(STOPPED_EXIT_CODE, "asked to end before the run was finished; started again, it goes on")
    if isinstance(others, Peers) and (found := others.wait_for_trouble(REASON_S)) is not None:
        return found
    log = log_file()
    return Ending(1, f"the ranks died: {log_tail(log) if log else f'torchrun ended with status {status}'}")


def processes_a_node(recipe: Recipe, nodes: int) -> int:
    """Return the number of ranks of each host. Raises LayoutError if they do not divide evenly."""
    processes = recipe.learner.num_processes
    if processes % nodes:
        raise LayoutError(
            f"--nodes is {nodes}, but the learner has {processes} ranks, which that does not divide; allowed: "
            f"{', '.join(str(n) for n in range(1, processes + 1) if processes % n == 0)}"
        )
    return processes // nodes


def rank_program(
    own: LearnerNode, recipe: Recipe, address: str, epoch: Epoch, master: Rendezvous | None
) -> tuple[list[str], dict[str, str]]:
    """Return torchrun's command for this node's ranks, and its environment; `master` is None on node 0."""
    if own.nodes == 1:
        rendezvous = rendezvous_options(0, address, 0, address)
    else:
        host, port = (own.host, own.port) if master is None else (master.host, master.port)
        rendezvous = rendezvous_options(own.node, host, port, address, own.nodes)
    # Ranks ignore SIGTERM, so torchrun must not handle it: when a rank fails, torchrun need not wait for the others.
    command = torchrun(
        processes_a_node(recipe, own.nodes),
        "launch.run.learn_rank",
        str(own.run.path),
        options=(*rendezvous, "--signals-to-handle", "SIGHUP"),
    )
    environment = {**child_environment(), **interface_environment(address), EPOCH_VARIABLE: str(epoch.number)}
    if key := read_api_key():
        environment[API_KEY_VARIABLE] = key
    if own.node != 0:
        environment.pop(METRICS_PORT_VARIABLE, None)  # rank 0 alone has something to show
    return command, environment


class _Torchrun(ProcessTree):
    """The torchrun of this host. Ranks die with it (launch.run.learn_rank), and it dies with the agent.

    Slurm signals every process of a step. Only the agent answers SIGTERM, by the stop file: a rank that died of the
    signal would not save.
    """

    when_parent_dies = signal.SIGKILL
    ignored = (signal.SIGTERM, signal.SIGINT)
