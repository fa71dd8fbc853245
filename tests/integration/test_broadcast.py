"""The broadcast channel: real Megatron ranks send to real SGLang servers, of which one is killed and one is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from launch.convert.new_model import new_model
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.run_directory import RunDirectory
from rollout_sglang.server.start import EngineSpec, ServerProcess, free_port
from rollout_sglang.server.update_fence import UPDATE_HEADER
from rollout_sglang.weights.update_lease import fresh_number
from tests.doubles.receiving_double import ReceivingDouble
from tests.integration.workers import broadcast_worker
from tests.support.engine_forks import start_engine
from tests.support.processes import with_words
from tests.support.ranks import Ranks
from tests.support.runs import ROOT, environment, evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

KEY = "a-key-of-the-tests"
DEADLINE_S = 8.0
STEPS = 6
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
        assert DEADLINE_S < measured["transfer_s"] < 2 * DEADLINE_S
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


@pytest.mark.slow
@pytest.mark.repeated  # engines of whole runs die in tests.chaos.kills, and freeze in test_hung_engines, as well
def test_a_run_with_a_dying_engine(tmp_path: Path) -> None:
    """The command line from start to end, with 128×128-block FP8 sent."""
    make_model(tmp_path / "model")
    recipe = make_recipe(
        tmp_path,
        tmp_path / "model",
        "run",
        run=dict(name="run", steps=STEPS),
        rollout=dict(
            prompts_per_batch=4, group_size=4, max_new_tokens=12, context_tokens=64, engines=2, precision="fp8_block"
        ),
        learner=dict(tensor_parallel=2, micro_batch_tokens=256, optimizer=dict(lr=1e-3, warmup_steps=0)),
        weights=dict(channel="broadcast", bucket_mib=1, publish_deadline_s=60),
    )
    run = tmp_path / "runs" / "run"
    command = [sys.executable, "-m", "launch.cli", "train", str(recipe), "--json"]
    supervisor = psutil.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        while len(read_metrics(run)) < 2:
            assert supervisor.poll() is None, supervisor.communicate()
            time.sleep(0.1)
        victims = with_words(supervisor.children(recursive=True), f"--port {engine_port(run, 1)} ")
        victims[0].kill()  # the server; its role and what it has forked end with it
        output, errors = supervisor.communicate(timeout=250)
    finally:
        if supervisor.is_running():
            supervisor.kill()
    assert supervisor.returncode == 0, errors.decode()[-3000:]
    assert json.loads(output.splitlines()[-1])["steps"] == STEPS
    audit = evenkeel_json("verify", "history", run)
    assert (audit["lost"], audit["duplicated"], audit["version_violations"]) == (0, 0, 0)
    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == list(range(STEPS))
    for line in metrics:
        served = line["engines_checked"]  # their checksums are those of what was sent
        assert 1 <= served <= 2 - line["engines_failed"], "one that is being started again takes no part"
        assert 0 < line["transfer_bytes"] <= 0.55 * (served + line["engines_failed"]) * bf16_bytes(tmp_path / "model")
        assert line["probe_gap_nats"] < 0.2
        assert line["ess"] > 0.5
    assert [event["version"] for event in read_events(run, "published")] == list(range(1, STEPS + 1))
    assert [event["process"] for event in read_events(run, "restarted")] == ["engine-1"]
    assert (run / "policy" / f"{STEPS:06}" / "weight_check.json").exists()


def bf16_bytes(model: Path) -> int:
    """What the model's weights would take without FP8."""
    return sum(2 * tensor.numel() for tensor in load_file(model / "model.safetensors").values())


def engine_port(run: Path, index: int) -> int:
    return int(RunDirectory(run).membership().engines()[index].url.rpartition(":")[2])
