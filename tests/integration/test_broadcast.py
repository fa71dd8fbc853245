"""The broadcast channel: real Megatron ranks send to real SGLang servers, of which one is killed and one is stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from launch.convert.new_model import new_model
from rollout_sglang.server.start import EngineSpec, ServerProcess, free_port
from rollout_sglang.server.update_fence import UPDATE_HEADER
from rollout_sglang.weights.update_lease import fresh_number
from tests.doubles.receiving_double import ReceivingDouble
from tests.integration.workers import broadcast_worker
from tests.support.engine_forks import start_engine
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

KEY = "a-key-of-the-tests"
DEADLINE_S = 16.0
START_DEADLINE_S = 200.0


def refusals(url: str) -> list[tuple[str, int, bool]]:
    """What a server answers to weight update calls out of order."""
    update = dict(names=[], dtypes=[], shapes=[], group_name="unknown", flush_cache=False)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/update_weights_from_distributed", update),
        ("/begin_weight_update", {}),
        ("/begin_weight_update", {}),
        ("/update_weights_from_distributed", update),
        ("/destroy_weights_update_group", dict(group_name="unknown")),
        ("/end_weight_update", {}),
        ("/end_weight_update", {}),
    ]
    headers = {"Authorization": f"Bearer {KEY}", UPDATE_HEADER: str(fresh_number())}
    with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as http:
        answers = [(path, http.post(path, json=request)) for path, request in calls]
    return [(path, answer.status_code, answer.json()["success"]) for path, answer in answers]


class Servers:
    """Two engines."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "model"
        new_model(self.model, hidden=256, layers=4)
        self.specs = [self.spec(index, self.model) for index in range(2)]
        self.processes: list[ServerProcess] = [start_engine(spec) for spec in self.specs]

    def spec(self, index: int, model: Path, port: int | None = None) -> EngineSpec:
        return EngineSpec(
            model=model,
            port=port or free_port(),
            precision="fp32",
            dtype="float32",
            log=self.root / f"engine-{index}.log",
            version=0,
            api_key=KEY,
            context_tokens=128,
        )

    def restart(self, index: int, model: Path) -> int:
        """As the supervisor does: on the same port, from a policy folder."""
        self.processes[index].kill()
        self.processes[index] = start_engine(self.spec(index, model, self.specs[index].port))
        self.processes[index].wait_ready(START_DEADLINE_S)
        return self.processes[index].pid

    def wake(self, index: int) -> int:
        process = psutil.Process(self.processes[index].pid)
        for one in [process, *process.children(recursive=True)]:
            one.send_signal(signal.SIGCONT)
        return process.pid


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("broadcast")
    servers = Servers(root)
    with ExitStack() as stack:
        stack.callback(lambda: [process.kill() for process in servers.processes])
        for process in servers.processes:
            process.wait_ready(START_DEADLINE_S)
        with ReceivingDouble() as double:
            assert refusals(servers.specs[0].url) == refusals(double.url), "the double answers like the server"
        task = dict(
            model=str(servers.model),
            urls=[spec.url for spec in servers.specs],
            pids=[process.pid for process in servers.processes],
            key=KEY,
            out=str(root),
            deadline_s=DEADLINE_S,
        )
        ranks = stack.enter_context(Ranks(4, broadcast_worker.measure, task))
        mend(ranks, root, servers)
        results = ranks.results(deadline_s=240)
        results[0]["groups_of_engine_0"] = (root / "engine-0.log").read_text().count("init custom process group")
        yield results


def mend(ranks: Ranks, root: Path, servers: Servers) -> None:
    """Start the killed engine again and wake the stopped one, when the ranks say that they noticed."""
    for version in (3, 5):
        while not (root / f"broken-{version}").exists():
            ranks.check()
            time.sleep(0.1)
        newest = root / "run" / "policy" / f"{version - 1:06}"
        pid = servers.restart(1, newest) if version == 3 else servers.wake(1)
        temporary = root / "mended"
        temporary.write_text(str(pid))
        temporary.rename(root / f"mended-{version}")


def publish(found: list[dict[str, Any]], version: int) -> dict[str, Any]:
    assert [one["publishes"] for one in found[1:]] == [{}] * 3, "only rank 0 is_rank_zero"
    result: dict[str, Any] = found[0]["publishes"][str(version)]
    assert result["published"] == version
    return result


@pytest.mark.parametrize("version", [1, 2])
def test_engines_hold_what_the_learner_sent(found: list[dict[str, Any]], version: int) -> None:
    result = publish(found, version)
    assert set(result["versions"].values()) == {version}
    assert len(result["gaps"]) == 2
    assert max(result["gaps"].values()) < 1e-4
    measured = result["measured"]
    assert measured["transfer_bytes"] == 2 * found[0]["nbytes"], "each engine gets each tensor once"
    assert measured["engines_failed"] == 0
    assert {"lock_s", "pause_s", "gather_s", "quantize_s", "transfer_s", "load_s", "publish_s"} <= measured.keys()


@pytest.mark.parametrize(("version", "how"), [(3, "killed"), (5, "stopped")])
def test_an_engine_that_breaks_between_buckets_breaks_nothing_else(
    found: list[dict[str, Any]], version: int, how: str
) -> None:
    result = publish(found, version)
    assert sorted(result["versions"].values(), key=str) == [version, None], how
    assert len(result["gaps"]) == 1, "the other engine got the broken one's requests"
    assert max(result["gaps"].values()) < 1e-4
    measured = result["measured"]
    assert measured["engines_failed"] == 1
    assert found[0]["nbytes"] < measured["transfer_bytes"] < 2 * found[0]["nbytes"], "it broke half-way"
    if how == "stopped":
        assert measured["transfer_s"] < 2 * DEADLINE_S
        assert measured["publish_s"] < 4 * DEADLINE_S


@pytest.mark.parametrize(("version", "how"), [(4, "started again"), (6, "woken")])
def test_an_engine_that_came_back_is_fed_again(found: list[dict[str, Any]], version: int, how: str) -> None:
    result = publish(found, version)
    assert set(result["versions"].values()) == {version}, how
    assert max(result["gaps"].values()) < 1e-4
    assert result["measured"]["engines_failed"] == 0


def test_a_dead_sender_leaves_engines_that_are_resynced(found: list[dict[str, Any]]) -> None:
    assert found[0]["after_crash"] == [None, None], "engines with half of the weights claim no version"
    resynced = found[0]["publishes"]["6 resynced"]
    assert set(resynced["versions"].values()) == {6}
    assert len(resynced["gaps"]) == 2
    assert max(resynced["gaps"].values()) < 1e-4
    assert set(publish(found, 7)["versions"].values()) == {7}
    assert max(publish(found, 7)["gaps"].values()) < 1e-4


def test_a_bit_that_flips_on_the_way_is_never_served(found: list[dict[str, Any]]) -> None:
    result = publish(found, 8)
    assert sorted(result["versions"].values(), key=str) == [8, None], "the spoilt engine claims no version"
    assert len(result["gaps"]) == 1, "and is asked nothing"
    assert result["measured"]["engines_failed"] == 1
    assert result["measured"]["transfer_bytes"] == 2 * found[0]["nbytes"], "nobody noticed while it was sent"


def test_the_folder_is_written_behind(found: list[dict[str, Any]]) -> None:
    """Version 2 (from which an engine was started above) and others were pruned; 9 was never published."""
    assert [name for name in found[0]["folders"] if name[0].isdigit()] == ["000006", "000007", "000008"]


def test_all_engines_failing_is_an_error_on_every_rank(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["refused"].startswith("no engine of 2 took version 9")
        assert rank["published_after_refusal"] == 8


def test_groups_of_a_healthy_engine_are_kept(found: list[dict[str, Any]]) -> None:
    assert found[0]["groups_of_engine_0"] == 2, "one for each pipeline stage, through all publishes"


def test_torch_does_not_hear_of_the_groups(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["registry_after"] == rank["registry"]
