"""How the learner's ranks are shared out over hosts, and what torchrun is told."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.roles import learner, lifecycle
from launch.roles.heartbeat import Ending, Peer, Peers
from launch.roles.learner import (
    LearnerNode,
    follow,
    processes_a_node,
    rank_program,
    run_learner_node,
    wait_for_turn,
)
from launch.roles.lifecycle import Rendezvous
from launch.run.waiting import Stop
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import claim
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DeadlineExceededError, LayoutError, StoreError, SupersededError
from rollout_sglang.server.start import free_port


def a_recipe(root: Path, **learner: object) -> Recipe:
    data = dict(
        run=dict(name="r", root=str(root), steps=1),
        model=dict(path=str(root)),
        task=dict(name="sort_digits"),
        learner=learner,
    )
    return recipe_from(data, source="test")


def value_of(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_ranks_are_shared_out_evenly(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, tensor_parallel=2, pipeline_parallel=2)
    assert [processes_a_node(recipe, nodes) for nodes in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(LayoutError, match=r"--nodes is 3, but the learner has 4 ranks.* allowed: 1, 2, 4"):
        processes_a_node(recipe, 3)


def test_one_host_needs_no_port(tmp_path: Path) -> None:
    epoch = claim(tmp_path, "learner")
    argv, _ = rank_program(LearnerNode(RunDirectory(tmp_path)), a_recipe(tmp_path), "127.0.0.1", epoch, None)
    assert value_of(argv, "--rdzv-conf") == "rank=0,host=127.0.0.1,port=0,address=127.0.0.1"
    assert value_of(argv, "--nnodes") == "1"
    assert value_of(argv, "--max-restarts") == "0"


def test_several_hosts_meet_at_node_0(tmp_path: Path) -> None:
    own = LearnerNode(RunDirectory(tmp_path), node=1, nodes=2, host="n2")
    recipe, epoch = a_recipe(tmp_path, tensor_parallel=4), claim(tmp_path, "learner")
    argv, _ = rank_program(own, recipe, "10.0.0.2", epoch, Rendezvous(3, "n1", 29511, 2))
    told = {flag: value_of(argv, f"--{flag}") for flag in ("nnodes", "node-rank", "nproc-per-node", "local-addr")}
    assert told == {"nnodes": "2", "node-rank": "1", "nproc-per-node": "2", "local-addr": "10.0.0.2"}
    assert value_of(argv, "--rdzv-conf") == "rank=1,host=n1,port=29511,address=10.0.0.2"


def test_ranks_know_the_epoch_and_only_rank_0_s_host_shows_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENKEEL_METRICS_PORT", "9000")
    epoch, recipe = claim(tmp_path, "learner"), a_recipe(tmp_path, tensor_parallel=2)
    (_, first), (_, second) = (
        rank_program(LearnerNode(RunDirectory(tmp_path), node=node, nodes=2), recipe, "127.0.0.1", epoch, None)
        for node in (0, 1)
    )
    assert first["EVENKEEL_EPOCH"] == second["EVENKEEL_EPOCH"] == "1"
    assert "EVENKEEL_METRICS_PORT" in first
    assert "EVENKEEL_METRICS_PORT" not in second


def test_a_node_that_lost_node_0_before_the_ranks_started_joins_the_same_start_again(tmp_path: Path) -> None:
    recipe, port = a_recipe(tmp_path, tensor_parallel=2), free_port()
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    own = LearnerNode(run, node=1, nodes=2)
    Rendezvous(3, "127.0.0.1", port - 1, 2).write(own.rendezvous)
    with ThreadPoolExecutor() as pool:
        following, stop = None, Stop()
        try:
            for last in (False, True):
                with Peers("127.0.0.1", port, nodes=2, epoch=3, key=None) as peers:
                    following = following or pool.submit(follow, own, stop)
                    ends = time.monotonic() + 20
                    while not peers.joined:
                        assert time.monotonic() < ends, "it has not joined"
                        time.sleep(0.01)
                    if last:
                        peers.tell(status=0)
                        assert following.result(20) == Ending(0)
        finally:
            stop.asked = True


@pytest.mark.parametrize(
    ("said", "finished", "status"), [(Ending(0), False, 0), (Ending(1, "node 2 died"), False, 1), (None, True, 0)]
)
def test_a_node_whose_ranks_ended_well_goes_by_what_node_0_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Ending | None, finished: bool, status: int
) -> None:
    assert last_word(tmp_path, monkeypatch, said, finished).status == status


def test_a_node_whose_ranks_ended_well_follows_the_next_start_of_a_node_0_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ended with 0 is not started again, and node 0's next start waits for it."""
    assert last_word(tmp_path, monkeypatch, None, finished=False) == Ending(1, "node 0 is gone (reset)")


def last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Ending | None, finished: bool) -> Ending:
    run = RunDirectory((recipe := a_recipe(tmp_path, tensor_parallel=2)).directory)
    run.freeze(recipe)
    if finished:
        for role in ("learner", "collector"):
            run.set_finished(role)
    lost = None if said else "node 0 is gone (reset)"
    peer = SimpleNamespace(go=True, ending=said, lost=lost, wait_for_trouble=lambda _: None, tell=lambda **_: None)
    monkeypatch.setattr(learner, "attend", lambda *_, **__: Ending(0))
    own = LearnerNode(run, node=1, nodes=2)
    return learner.follow_one(own, recipe, "127.0.0.1", Rendezvous(3, "n1", 29511, 2), Stop(), peer)  # type: ignore[arg-type]


def test_a_node_of_a_finished_run_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 has found nothing to do and ended; the file of its last start is still there."""
    monkeypatch.setattr(lifecycle, "FINISHED_POLL_S", 0.0)
    run = RunDirectory((recipe := a_recipe(tmp_path, tensor_parallel=2)).directory)
    run.freeze(recipe)
    own, stop = LearnerNode(run, node=1, nodes=2), Stop()
    Rendezvous(3, "127.0.0.1", free_port(), 2).write(own.rendezvous)
    for role in ("learner", "collector"):
        run.set_finished(role)
    with ThreadPoolExecutor() as pool:
        following = pool.submit(follow, own, stop)
        try:
            assert following.result(20) == Ending(0)
        finally:
            stop.asked = True


def test_a_node_outside_the_learner_and_a_run_that_was_not_begun_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="node 2 of --nodes 2"):
        run_learner_node(LearnerNode(RunDirectory(tmp_path), node=2, nodes=2), Stop())
    with pytest.raises(StoreError, match="is not a run directory"):
        run_learner_node(LearnerNode(RunDirectory(tmp_path)), Stop())


def leading(tmp_path: Path) -> tuple[LearnerNode, Recipe]:
    """Node 0 of two, of a run that was begun."""
    run = RunDirectory((recipe := a_recipe(tmp_path, tensor_parallel=2)).directory)
    run.freeze(recipe)
    return LearnerNode(run, nodes=2, port=free_port() - 1), recipe


def test_a_learner_is_marked_finished_before_its_other_nodes_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their next start finds it finished then, and waits for nobody."""
    own, recipe = leading(tmp_path)
    epoch, told, end = claim(own.run.path, "learner"), list[tuple[object, bool]](), Peers.tell

    def tell(peers: Peers, **message: object) -> None:
        told.append((message.get("status"), (own.run.path / "finished" / "learner").exists()))
        end(peers, **message)

    monkeypatch.setattr(learner, "seed_policy", lambda *_: None)
    monkeypatch.setattr(learner, "attend", lambda *_: Ending(0))
    monkeypatch.setattr(Peers, "tell", tell)
    with ThreadPoolExecutor() as pool:
        stop = Stop()
        leads = pool.submit(learner.lead_start, own, recipe, "127.0.0.1", epoch, stop, None)
        try:
            ends = time.monotonic() + 20
            while Rendezvous.read(own.rendezvous) is None:
                assert time.monotonic() < ends, "it has not said where it listens"
                time.sleep(0.01)
            with Peer("127.0.0.1", own.port + 1, node=1, epoch=epoch.number, key=None):
                assert leads.result(20) == Ending(0)
        finally:
            stop.asked = True
    assert told == [(None, False), (0, True)]


def test_a_superseded_node_0_leaves_the_rendezvous_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, recipe = leading(tmp_path)
    epoch = claim(own.run.path, "learner")

    def frozen_meanwhile(*_: object) -> None:
        Rendezvous(claim(own.run.path, "learner").number, "n2", 29500, 2).write(own.rendezvous)

    monkeypatch.setattr(learner, "seed_policy", frozen_meanwhile)
    with pytest.raises(SupersededError, match="start 2 has taken over"):
        learner.lead_start(own, recipe, "127.0.0.1", epoch, Stop(), None)
    assert Rendezvous.read(own.rendezvous) == Rendezvous(2, "n2", 29500, 2)


@pytest.mark.parametrize(
    ("published", "batches", "saved", "evaluated", "learners"),
    [
        (2, 2, 2, (), False),  # engines sample batch 2
        (2, 3, 2, (), True),  # it is there
        (7, 7, 5, (), False),  # the batches of steps 5 and 6 are there, but the engines sample batch 7 first
        (7, 8, 5, (), True),
        (2, 2, 3, (), True),  # the checkpoint's own version has yet to be published
        (9, 9, 9, (), False),  # the final policy is evaluated
        (9, 9, 9, (9,), True),
    ],
)
def test_a_learner_begins_when_engines_on_its_gpus_can_sample_no_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    published: int,
    batches: int,
    saved: int,
    evaluated: tuple[int, ...],
    learners: bool,
) -> None:
    """Otherwise it would put engines to sleep that have yet to make what it needs."""
    recipe = a_recipe(tmp_path)
    recipe = recipe.model_copy(update=dict(run=recipe.run.model_copy(update=dict(steps=9, wait_deadline_s=0.01))))
    monkeypatch.setattr(RunDirectory, "published_version", lambda _: published)
    monkeypatch.setattr(RunDirectory, "saved_steps", lambda _: [saved])
    monkeypatch.setattr(RunDirectory, "evaluated_versions", lambda _: set(evaluated))
    monkeypatch.setattr(learner.BatchStore, "is_settled", lambda _, index: index < batches)
    if learners:
        wait_for_turn(RunDirectory(tmp_path), recipe, Stop())
    else:
        with pytest.raises(DeadlineExceededError, match="the engines to have sampled what they can"):
            wait_for_turn(RunDirectory(tmp_path), recipe, Stop())
