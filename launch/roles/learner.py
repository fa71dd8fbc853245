"""Run the learner's agent on one host: `evenkeel role learner RUN [NODE]`.

    node 0        freezes the recipe and publishes version 0 at the first start · claims the learner's epoch · says in
                  RUN/learner.json where it listens · waits for the other nodes · starts its ranks · says how it ended
    node 1, 2, …  wait for a learner.json whose epoch is alive · join · start their ranks · follow the next epoch when
                  this one ends before the run does

Ranks that have lost others cannot go on, and torchrun may hang then: whatever ends, the agent ends its ranks. A learner
is started again as a whole, from its newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from launch.build.api_key import API_KEY_VARIABLE, read_api_key
from launch.build.engines import shares_gpus
from launch.roles.base import Rendezvous, await_node_0, wait_for_recipe
from launch.roles.heartbeat import Ending, Peer, Peers
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
"""Longest wait for another node to say why it failed, once this node's ranks have."""
LAST_WORD_S = 60.0
"""Longest wait of a node whose ranks have ended well for node 0 to say that all have."""


@dataclass(frozen=True)
class LearnerNode:
    """One host's part of the learner."""

    run: RunDirectory
    node: int = 0
    nodes: int = 1
    host: str = LOOPBACK
    port: int = DEFAULT_PORT
    """Of torch's rendezvous, on node 0; the agents' heartbeat has the next one."""
    recipe: Path | None = None
    """Node 0 begins the run with it, or goes on with it; the others wait for that."""

    @property
    def rendezvous(self) -> Path:
        return self.run.path / "learner.json"


def run_learner_node(own: LearnerNode, stop: Stop) -> int:
    """Run the agent; returns its exit status."""
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
    changes = go_on_with(own.run, recipe)  # first: who comes with another run's recipe takes over from nobody
    epoch = claim(own.run.path, "learner")
    if changes:
        print(changes_in_words(own.run, changes), flush=True)
    event_log = EventLog(own.run.path, epoch.name)
    note_changes(own.run, event_log)
    for sentence in note_outside(own.run.under(epoch), recipe, event_log):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)
    with epoch.as_superseded():
        return _lead_start(own, recipe, address, epoch, stop, key)


def _lead_start(own: LearnerNode, recipe: Recipe, address: str, epoch: Epoch, stop: Stop, key: str | None) -> Ending:
    run = own.run.under(epoch)
    remove_old_leftovers(run.shared_folders)
    if run.is_finished():
        return Ending(0)
    seed_policy(run, recipe)
    if shares_gpus(recipe):
        wait_for_engines(run, recipe, stop, recipe.rollout.engines)

    def attended(peers: Peers | None) -> Ending:
        ending = attend(own, recipe, address, epoch, stop, peers)
        if ending.status == 0:
            run.set_finished("learner")
        return ending

    return attended(None) if own.nodes == 1 else _lead_others(own, recipe, address, epoch, stop, key, attended)


def _lead_others(
    own: LearnerNode,
    recipe: Recipe,
    address: str,
    epoch: Epoch,
    stop: Stop,
    key: str | None,
    attended: Callable[[Peers], Ending],
) -> Ending:
    """`attended` runs the ranks, and marks a learner that has finished before the other nodes hear of it: they are not
    started again then."""

    def complete() -> bool | None:
        epoch.check()
        return peers.complete or None

    try:
        peers = Peers(address, own.port + 1, nodes=own.nodes, epoch=epoch.number, key=key)
    except OSError as error:
        raise PortInUseError(
            f"port {own.port + 1} of {own.host} is taken ({os.strerror(error.errno or 0)}); stop what listens there or "
            "give --port"
        ) from None
    with peers:
        epoch.check()  # a later start may have written its own
        Rendezvous(epoch.number, own.host, own.port, own.nodes).write(own.rendezvous)
        others = f"the other {own.nodes - 1} nodes of the learner"
        wait_for(stop, complete, others, recipe.rollout.start_deadline_s)
        peers.start_ranks()
        try:
            ending = attended(peers)
        except BaseException as error:
            peers.end(Ending(1, str(error)))
            raise
        peers.end(ending)
    return ending


def follow(own: LearnerNode, stop: Stop) -> Ending:
    """Run node 1, 2, …: one start of the learner after the other, until it has ended for good."""
    recipe = wait_for_recipe(own.run, stop, own.recipe).recipe
    processes_a_node(recipe, own.nodes)
    address, seen = bind_address(own.host, read_api_key(), stop.check), 0
    while True:
        joined = _join(own, recipe, seen, stop)
        if joined == "finished":
            return Ending(0)
        rendezvous, peer = joined
        recipe = own.run.recipe()  # a start may have changed it
        with peer:
            ending = _follow_one(own, recipe, address, rendezvous, stop, peer)
        if ending.status in (0, FATAL_EXIT_CODE) or (stop.asked and ending.status == STOPPED_EXIT_CODE):
            return ending
        print(f"start {rendezvous.epoch} of the learner has ended ({ending.reason}); following the next", flush=True)
        if peer.go or peer.ending is not None:
            seen = rendezvous.epoch
        else:
            time.sleep(POLL_S)  # the connection was lost before the ranks were started: it may join the same start


def _join(own: LearnerNode, recipe: Recipe, seen: int, stop: Stop) -> tuple[Rendezvous, Peer] | Literal["finished"]:
    """Join node 0 of a start after `seen` that answers, and knows the key. Raises as `await_node_0` does."""

    def join(found: Rendezvous) -> tuple[Rendezvous, Peer] | None:
        try:
            key = read_api_key()
            return found, Peer(found.host, found.port + 1, node=own.node, epoch=found.epoch, key=key)
        except (OSError, ValueError, KeyError, EOFError):
            return None  # it has ended, or has not begun: the file is read again

    return await_node_0(
        own.run,
        own.rendezvous,
        own.nodes,
        is_alive=lambda found: found.epoch > seen,
        join=join,
        role="the learner",
        stop=stop,
        deadline_s=recipe.rollout.start_deadline_s,
    )


def _follow_one(
    own: LearnerNode, recipe: Recipe, address: str, rendezvous: Rendezvous, stop: Stop, peer: Peer
) -> Ending:
    while not peer.go:
        if (found := peer.trouble()) is not None:
            return found
        if stop.asked:
            return Ending(STOPPED_EXIT_CODE, "asked to end before all nodes were there")
        time.sleep(POLL_S)
    try:
        epoch = Epoch(epoch_folder(own.run.path, "learner"), rendezvous.epoch)
        ending = attend(own, recipe, address, epoch, stop, peer, master=rendezvous)
    except SupersededError as error:  # node 0's start, that is: this node is wanted by the next one
        ending = Ending(SUPERSEDED_EXIT_CODE, str(error))
    peer.end(ending)
    if ending.status == SUPERSEDED_EXIT_CODE:
        return ending
    ends = time.monotonic() + (LAST_WORD_S if ending.status == 0 else REASON_S)
    while peer.trouble() is None and time.monotonic() < ends:
        time.sleep(POLL_S)
    if peer.ending is None and ending.status == 0 and not own.run.is_finished():
        # Node 0 may have died before it said that the learner has finished: it would wait for this node then.
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
    with Ranks(rank_command(own, recipe, address, master), rank_environment(own, address, epoch)) as ranks:
        while (status := ranks.poll()) is None:
            if look():
                outage.tolerate(epoch.check, None)
            if others is not None and (found := others.trouble()) is not None:
                epoch.check()  # first: who was superseded is not started again
                return found
            if ends is None and (stop.asked or (others is not None and others.stop_asked)):
                ends = time.monotonic() + grace_s()
                if isinstance(others, Peer):
                    others.ask_to_stop()
                elif not ranks.have_begun:
                    return Ending(STOPPED_EXIT_CODE, "asked to end before it had begun; started again, it goes on")
                else:
                    ranks.ask_to_stop()
            if ends is not None and time.monotonic() > ends:
                return Ending(STOPPED_EXIT_CODE, f"asked to end; the ranks did not within {grace_s():g} s: killed")
            time.sleep(POLL_S)
    epoch.check()
    if status == 0:
        return Ending(0)
    if (reason := notes.message(epoch.name)) is not None:
        return Ending(FATAL_EXIT_CODE, reason)
    if ends is not None:
        return Ending(STOPPED_EXIT_CODE, "asked to end before the run was finished; started again, it goes on")
    if isinstance(others, Peers) and (found := others.wait_for_trouble(REASON_S)) is not None:
        return found
    log = log_file()
    return Ending(1, f"the ranks died: {log_tail(log) if log else f'torchrun ended with status {status}'}")


def processes_a_node(recipe: Recipe, nodes: int) -> int:
    """Return the number of ranks of each host. Raises LayoutError when they cannot be shared out evenly."""
    processes = recipe.learner.num_processes
    if processes % nodes:
        raise LayoutError(
            f"--nodes is {nodes}, but the learner has {processes} ranks, which that does not divide; allowed: "
            f"{', '.join(str(n) for n in range(1, processes + 1) if processes % n == 0)}"
        )
    return processes // nodes


def rank_command(own: LearnerNode, recipe: Recipe, address: str, master: Rendezvous | None) -> list[str]:
    """Make the command of torchrun for this node's ranks; `master` is None on node 0."""
    if own.nodes == 1:
        rendezvous = rendezvous_options(0, address, 0, address)
    else:
        host, port = (own.host, own.port) if master is None else (master.host, master.port)
        rendezvous = rendezvous_options(own.node, host, port, address, own.nodes)
    # Ranks ignore SIGTERM, and torchrun leaves it alone: when one of them fails, it need not wait for the others.
    return torchrun(
        processes_a_node(recipe, own.nodes),
        "launch.run.learn_rank",
        str(own.run.path),
        options=(*rendezvous, "--signals-to-handle", "SIGHUP"),
    )


def rank_environment(own: LearnerNode, address: str, epoch: Epoch) -> dict[str, str]:
    """Make the environment of this node's ranks."""
    environment = {**child_environment(), **interface_environment(address), EPOCH_VARIABLE: str(epoch.number)}
    if key := read_api_key():
        environment[API_KEY_VARIABLE] = key
    if own.node != 0:
        environment.pop(METRICS_PORT_VARIABLE, None)  # rank 0 alone has something to show
    return environment


class _Torchrun(ProcessTree):
    """Ranks die with torchrun (launch.run.learn_rank), and torchrun with the agent.

    Slurm signals every process of a step. The agent alone answers SIGTERM, by the stop file: a rank that died of it
    would not save.
    """

    when_parent_dies = signal.SIGKILL
    ignored = (signal.SIGTERM, signal.SIGINT)


class Ranks:
    """This host's ranks under torchrun. A context manager that leaves no process behind."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._folder = make_scratch("learner")
        self._stop_file = self._folder / "stop"
        given = {**environment, **scratch_environment(self._folder), STOP_FILE_VARIABLE: str(self._stop_file)}
        self._torchrun = _Torchrun(command, log_file(), given, own_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._torchrun.kill()
        remove_scratch(self._folder)

    def poll(self) -> int | None:
        """Exit status of torchrun; None while it runs."""
        return self._torchrun.poll()

    def ask_to_stop(self) -> None:
        """Rank 0 finds the file at its next step, and tells the others."""
        self._stop_file.touch()

    @property
    def have_begun(self) -> bool:
        """Whether there may be anything to save. Until then ranks import, join and load, and look for no file."""
        return self._stop_file.with_name(BEGUN).exists()
