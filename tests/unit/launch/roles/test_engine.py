"""When an engine's role announces its server, and how the other hosts of an engine follow node 0. No SGLang."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_router.router_args import RouterArgs

from launch.roles import engine as role
from launch.roles import lifecycle
from launch.roles.engine import EngineRole, hold_weights, run_engine, run_router, serve, starting_folder
from launch.roles.lifecycle import Rendezvous, status_of
from launch.run import addresses, waiting
from launch.run.waiting import Stop
from pipeline.config.recipe import Recipe
from pipeline.config.sections import CheckpointSection
from pipeline.data.checksums import list_checksums
from pipeline.data.epochs import Epoch, claim, epoch_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import (
    DeadlineExceededError,
    EngineHungError,
    EngineStartError,
    LayoutError,
    RecipeError,
    StoppedError,
    StoreError,
    SupersededError,
)
from pipeline.ports.weights import WeightCheck
from pipeline.resume import go_on_with
from rollout_sglang.server import start
from rollout_sglang.server.start import EngineSpec, free_port
from tests.support.runs import a_recipe
from tests.support.whole_runs import whole_run


class Server:
    """Ready at once; runs until it is killed."""

    def __init__(self, spec: EngineSpec | None = None) -> None:
        self.spec, self.status, self.killed = spec, None, False
        self.pid = os.getpid()

    def poll(self) -> int | None:
        return self.status

    def is_ready(self) -> bool:
        return True

    def how_it_ended(self) -> str:
        return f"ended with status {self.status}"

    def why(self) -> str:
        return "no log"

    def forget_said(self) -> None:
        """It says nothing."""

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return a_recipe(tmp_path, run=dict(steps=1), model=dict(path=str(tmp_path)), rollout=dict(tensor_parallel=2))


@pytest.fixture
def run(recipe: Recipe) -> RunDirectory:
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    run.set_published(0)
    policy = run.policy_directory(0)
    policy.mkdir(parents=True, exist_ok=True)
    (policy / "model.safetensors").write_text("weights")
    WeightCheck(version=0).save(policy)
    list_checksums(policy)
    return run


def finish(run: RunDirectory) -> None:
    run.set_finished("learner")
    run.set_finished("collector")


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EPOCH_POLL_S", "FINISHED_POLL_S", "POLL_S"):
        monkeypatch.setattr(role, name, 0.0)


def at_each_look(monkeypatch: pytest.MonkeyPatch, *script: Callable[[], object]) -> None:
    """What happens while the role sleeps."""
    left = list(script)
    monkeypatch.setattr(role.time, "sleep", lambda _: left.pop(0)())


def test_an_engine_that_is_not_listed_any_more_announces_itself_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: set[str] = set()
    seen: list[bool] = []

    def look() -> None:
        seen.append("engine" in listed)

    at_each_look(monkeypatch, look, listed.clear, look, lambda: finish(run))
    epoch = claim(run.path, "engine", 0)
    serve(Server(), run, epoch, Stop(), 60, lambda _: listed.add("engine"), lambda: "engine" in listed)  # type: ignore[arg-type]
    assert seen == [True, True]


def test_a_recipe_that_is_changed_before_the_start_is_claimed_is_read_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an engine waits for the first policy nothing says that it is there: who changes the recipe ends nobody."""
    later = run.recipe().model_copy(update=dict(checkpoint=CheckpointSection(every=7)))
    changes = [lambda: go_on_with(run, later), lambda: None]
    monkeypatch.setattr(role, "wait_for_policy", lambda *_: changes.pop(0)())
    began: list[tuple[int, int]] = []

    def start(_own: EngineRole, recipe: Recipe, *rest: Any) -> None:
        began.append((recipe.checkpoint.every, rest[-1].number))

    monkeypatch.setattr(role, "_run_start", start)
    assert run_engine(EngineRole(run, 0), Stop()) == 0
    assert began == [(7, 2)]
    go_on_with(run, later)
    assert not Epoch(epoch_folder(run.path, "engine", 0), 2).is_superseded()


def test_a_superseded_engine_does_not_announce_itself(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role, "EPOCH_POLL_S", 3600.0)
    monkeypatch.setattr(role.Throttle, "__call__", lambda every: every.every_s == 0.0)
    epoch = claim(run.path, "engine", 0)
    claim(run.path, "engine", 0)
    announced: list[int] = []
    with pytest.raises(SupersededError):
        serve(Server(), run, epoch, Stop(), 60, lambda _: announced.append(0), lambda: False)  # type: ignore[arg-type]
    assert not announced


def test_a_server_that_does_not_take_its_arguments_is_not_started_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor starts again what ends with another error than a fatal one."""
    server, epoch = Server(), claim(run.path, "engine", 0)
    monkeypatch.setattr(Server, "is_ready", lambda _: False)
    for status, error in ((2, RecipeError), (3, EngineStartError)):
        at_each_look(monkeypatch, lambda status=status: setattr(server, "status", status))
        server.status = None
        with pytest.raises(error, match="no log"):
            serve(server, run, epoch, Stop(), 60, lambda _: None, lambda: True)  # type: ignore[arg-type]


def test_a_server_that_hangs_is_announced_as_such_and_ended_when_it_stays_so(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str | None] = [None, "it is stopped", "it is stopped", None, "it is stopped again"]
    lost = [False]

    class Watched:
        hung_s, is_lost = 31.0, property(lambda _: lost[0])

        def look(self) -> str | None:
            return looks.pop(0) if len(looks) > 1 else looks[0]

    monkeypatch.setattr(role, "Liveness", lambda *_: Watched())
    monkeypatch.setattr(role, "ALIVE_POLL_S", 0.0)
    told: list[str] = []
    at_each_look(monkeypatch, *[lambda: None] * 6, lambda: lost.__setitem__(0, True))
    epoch = claim(run.path, "engine", 0)
    with pytest.raises(EngineHungError, match=r"it is stopped again.* did not go on within 31 s"):
        serve(Server(), run, epoch, Stop(), 60, told.append, lambda: True)  # type: ignore[arg-type]
    assert told == ["", "it is stopped", "", "it is stopped again"]
    assert status_of(EngineHungError("")) == 1, "its supervisor starts it again"


def test_an_engine_of_one_host_listens_where_the_learner_reaches_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By broadcast its ranks join groups with the learner's. Left alone, NCCL takes the first interface there is."""
    entry = SimpleNamespace(address="10.1.2.3")
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: {"docker0": [], "ib0": [entry]})
    monkeypatch.setattr(role, "bind_address", lambda *_: "10.1.2.3")
    monkeypatch.setattr(role, "check_engines", lambda _: None)
    expected = dict(GLOO_SOCKET_IFNAME="mine", TP_SOCKET_IFNAME="ib0", NCCL_SOCKET_IFNAME="=ib0")
    for name in expected:
        monkeypatch.setenv(name, "mine")
    for name in ("TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name)
    given: list[dict[str, str | None]] = []
    monkeypatch.setattr(role, "_run_start", lambda *_: given.append({name: os.environ.get(name) for name in expected}))
    assert run_engine(EngineRole(run, 0), Stop()) == 0
    assert given == [expected]


class OtherHost:
    """Node 1 of engine 0, whose servers are doubles."""

    def __init__(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.servers = run, list[Server]()
        self.own = EngineRole(run, 0, nodes=2, node=1)
        monkeypatch.setattr(role, "check_engines", lambda _: None)
        monkeypatch.setattr(role, "start", self.start)

    def start(self, spec: EngineSpec) -> Server:
        assert (spec.model / "model.safetensors").exists()
        self.servers.append(Server(spec))
        return self.servers[-1]

    def node_0_ends_as_it_starts(self) -> None:
        """It leaves its rendezvous, and no weights."""
        self.node_0_starts()
        shutil.rmtree(self.run.path / "engines" / "starting")

    def node_0_starts(self) -> None:
        """With the policy that is published now."""
        start, run = claim(self.run.path, "engine", 0).number, self.run
        version = run.published_version()
        held = starting_folder(run, 0, 0, start)
        shutil.copytree(run.policy_directory(version), held)
        Rendezvous(start, "n1", 40000 + start, 2, version).write(self.own.rendezvous)


@pytest.mark.parametrize("status", [None, 1])
def test_another_host_follows_node_0_s_next_start(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    other = OtherHost(run, monkeypatch)
    other.node_0_starts()

    def node_0_starts_again() -> None:
        other.servers[0].status = status
        other.node_0_starts()

    at_each_look(monkeypatch, node_0_starts_again, lambda: finish(run))
    assert run_engine(other.own, Stop()) == 0
    assert [one.spec.rendezvous for one in other.servers if one.spec] == ["n1:40001", "n1:40002"]
    assert all(one.killed for one in other.servers)
    assert [path.name[:8] for path in (run.path / "engines" / "starting").iterdir()] == ["000000-0"] * 2, "node 0's own"


def test_another_host_starts_with_the_weights_of_node_0(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a version was published since node 0 took its own, and that one is gone."""
    other = OtherHost(run, monkeypatch)
    other.node_0_starts()
    newer = run.policy_directory(1)
    shutil.copytree(run.policy_directory(0), newer)
    (newer / "model.safetensors").write_text("newer weights")
    WeightCheck(version=1).save(newer)
    list_checksums(newer)
    run.set_published(1)
    shutil.rmtree(run.policy_directory(0))
    found: list[tuple[int, str]] = []

    def look() -> None:
        spec = other.servers[0].spec
        assert spec is not None
        found.append((spec.version, (spec.model / "model.safetensors").read_text()))
        finish(run)

    at_each_look(monkeypatch, look)
    assert run_engine(other.own, Stop()) == 0
    assert found == [(0, "weights")]


def test_another_host_of_a_start_that_has_ended_is_started_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows the next one then."""
    other = OtherHost(run, monkeypatch)
    other.node_0_ends_as_it_starts()
    monkeypatch.setattr(role, "VISIBLE_S", 0.0)
    monkeypatch.setattr(waiting, "POLL_S", 0.0)
    with pytest.raises(DeadlineExceededError, match="the weights that node 0 holds"):
        run_engine(other.own, Stop())


def test_another_host_that_waits_for_weights_follows_node_0_s_next_start_at_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = OtherHost(run, monkeypatch)
    other.node_0_ends_as_it_starts()
    at_each_look(monkeypatch, other.node_0_starts, lambda: finish(run))
    assert run_engine(other.own, Stop()) == 0
    assert [one.spec.rendezvous for one in other.servers if one.spec] == ["n1:40002"]


def test_a_superseded_node_0_leaves_the_rendezvous_of_its_successor(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, hold = EngineRole(run, 0, nodes=2), role.hold_weights
    later = Rendezvous(2, "n2", 40000, 2, 0)

    def frozen_meanwhile(*given: Any) -> EngineSpec:
        assert claim(run.path, "engine", 0).number == later.epoch
        later.write(own.rendezvous)
        return hold(*given)

    monkeypatch.setattr(role, "check_engines", lambda _: None)
    monkeypatch.setattr(role, "hold_weights", frozen_meanwhile)
    monkeypatch.setattr(role, "start", lambda _: pytest.fail("it starts a server"))
    with pytest.raises(SupersededError, match="start 2 has taken over"):
        run_engine(own, Stop())
    assert Rendezvous.read(own.rendezvous) == later


def test_node_0_says_which_version_it_holds(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Rendezvous | None] = []
    own = EngineRole(run, 0, nodes=2)

    def start(spec: EngineSpec) -> Server:
        said.append(Rendezvous.read(own.rendezvous))
        raise EngineStartError("far enough")

    monkeypatch.setattr(role, "check_engines", lambda _: None)
    monkeypatch.setattr(role, "start", start)
    with pytest.raises(EngineStartError):
        run_engine(own, Stop())
    assert [one.version for one in said if one] == [0]


def test_another_host_ends_with_its_server(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    other = OtherHost(run, monkeypatch)
    other.node_0_starts()
    at_each_look(monkeypatch, lambda: setattr(other.servers[0], "status", 3))
    with pytest.raises(EngineStartError, match="node 1 of engine 0 ended with status 3"):
        run_engine(other.own, Stop())


def test_another_host_waits_for_the_rendezvous_of_the_newest_start(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = OtherHost(run, monkeypatch)
    other.node_0_starts()
    claim(run.path, "engine", 0)  # it has not said yet where it listens
    stop = Stop()
    at_each_look(monkeypatch, lambda: setattr(stop, "asked", True))
    with pytest.raises(StoppedError):
        run_engine(other.own, stop)
    assert not other.servers


def test_another_host_that_waits_while_the_run_is_finished_ends(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 finds nothing to do at its next start."""
    other = OtherHost(run, monkeypatch)
    monkeypatch.setattr(lifecycle, "FINISHED_POLL_S", 0.0)
    at_each_look(monkeypatch, lambda: finish(run))
    assert run_engine(other.own, Stop()) == 0
    assert not other.servers


def test_a_file_of_a_start_with_other_hosts_is_waited_out(
    run: RunDirectory, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was started with three hosts before, and the file of that start is still there."""
    other = OtherHost(run, monkeypatch)
    Rendezvous(claim(run.path, "engine", 0).number, "n1", 40000, 3).write(other.own.rendezvous)
    at_each_look(monkeypatch, lambda: None, other.node_0_starts, lambda: None, lambda: finish(run))
    assert run_engine(other.own, Stop()) == 0
    assert len(other.servers) == 1
    Rendezvous(claim(run.path, "engine", 0).number, "n1", 40000, 3).write(other.own.rendezvous)
    section = recipe.rollout.model_copy(update=dict(start_deadline_s=0.0))
    with pytest.raises(LayoutError, match="node 0 has --nodes 3, this one 2"):
        role._run_other_host(other.own, recipe.model_copy(update=dict(rollout=section)), "n2", 1, None, Stop())


def spec(folder: Path, version: int) -> EngineSpec:
    return EngineSpec(
        model=folder, port=1, precision="fp32", dtype="float32", log=folder / "log", version=version, api_key="key"
    )


def policy(run: RunDirectory, version: int) -> EngineSpec:
    folder = run.policy_directory(version)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(str(version))
    (folder / "model.safetensors").write_text(f"weights {version}")
    WeightCheck(version=version).save(folder)
    list_checksums(folder)
    return spec(folder, version)


def test_weights_outlive_the_policy_that_they_are_of(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    seven = policy(run, 7)
    held = hold_weights(run, 3, 0, 1, lambda: seven)
    shutil.rmtree(seven.model)
    assert (held.model / "model.safetensors").read_text() == "weights 7"
    assert (held.version, held.port) == (7, 1)
    eight = hold_weights(run, 3, 0, 2, lambda: policy(run, 8))
    names = ["SHA256SUMS", "config.json", "model.safetensors", "weight_check.json"]
    assert sorted(path.name for path in eight.model.iterdir()) == names
    assert (eight.model / "config.json").read_text() == "8", "nothing of version 7"
    assert not held.model.exists(), "a new start removes what an earlier one has left"
    assert run.membership().engines() == [], "the folder is no member"
    shutil.rmtree(eight.model)
    assert (run.policy_directory(8) / "model.safetensors").exists()


def test_a_superseded_start_leaves_its_successor_s_weights(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    seven = policy(run, 7)
    old, new, other_host = (
        hold_weights(run, 3, node, start, lambda: seven) for node, start in ((0, 1), (0, 2), (1, 1))
    )
    shutil.rmtree(old.model, ignore_errors=True)
    late = hold_weights(run, 3, 0, 1, lambda: seven)
    shutil.rmtree(late.model)
    assert (new.model / "model.safetensors").exists()
    assert (other_host.model / "model.safetensors").exists()


def test_a_policy_that_is_gone_is_replaced_by_a_newer_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    newest = iter([spec(tmp_path / "gone", 7), policy(run, 8)])
    assert hold_weights(run, 0, 1, 1, lambda: next(newest)).version == 8


def test_no_engine_starts_with_damaged_weights(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    seven = policy(run, 7)
    (seven.model / "model.safetensors").write_text("weights 3")
    with pytest.raises(StoreError, match=r"model\.safetensors is damaged .*stop the run; `evenkeel repair "):
        hold_weights(run, 0, 0, 1, lambda: seven)
    (seven.model / "SHA256SUMS").unlink()
    with pytest.raises(StoreError, match="SHA256SUMS is missing"):
        hold_weights(run, 0, 0, 2, lambda: seven)


def test_no_engine_starts_with_the_weights_of_another_version_under_a_newer_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    five, six = policy(run, 5), policy(run, 6)
    shutil.rmtree(six.model)
    shutil.copytree(five.model, six.model)
    with pytest.raises(StoreError, match="holds version 5, expected 6; stop the run and repair it"):
        hold_weights(run, 0, 0, 1, lambda: six)


def test_policies_that_always_go_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"gone, and those before it.*raise weights\.keep"):
        hold_weights(RunDirectory(tmp_path), 0, 0, 1, lambda: spec(tmp_path / "gone", 7))


def with_deadline(recipe: Recipe, seconds: float) -> Recipe:
    return recipe.model_copy(update=dict(rollout=recipe.rollout.model_copy(update=dict(request_deadline_s=seconds))))


def patience_s(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> int:
    """For how long the router of the run's newest recipe waits for an answer, as SGLang reads its arguments."""
    commands = list[Sequence[str]]()

    def note(command: Sequence[str], **_: object) -> None:
        commands.append(command)
        raise EngineStartError("noted")

    monkeypatch.setattr(start, "ServerProcess", note)
    with pytest.raises(EngineStartError, match="noted"):
        run_router(run, Stop(), port=free_port())
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    own = commands[0][commands[0].index("--host") :]
    return RouterArgs.from_cli_args(parser.parse_args(own)).request_timeout_secs


@pytest.mark.parametrize("deadline_s", [0.5, 1800.0, 7200.5])
def test_the_router_waits_for_longer_than_the_recipe_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_s: float
) -> None:
    """The key may change between two starts of a run."""
    run = whole_run(tmp_path, committed=1, published=1, saved=(1,), policies=(1,))
    go_on_with(run, with_deadline(run.recipe(), deadline_s))
    assert patience_s(run, monkeypatch) >= deadline_s + 30
