"""One run over four hosts: the learner over two of them, an engine on each of the others, collector and router."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pipeline.data.event_log import read_metrics
from tests.cluster.cluster_run import KEY_FILE, ClusterRun
from tests.cluster.conftest import ROOT
from tests.cluster.rig import Hosts

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def run(hosts: Hosts, sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    """Thirty steps of the demo's task, finished, with engines and router still there."""
    run = ClusterRun(hosts, "four", sorter, tmp_path_factory.mktemp("logs"))
    run.start_all()
    run.wait_steps(3)
    return run


def test_the_key_is_needed_for_every_weight_and_admin_route(run: ClusterRun) -> None:
    """From another host, while the run goes on: without a key, and with a wrong one."""
    run.wait(lambda: len(run.routed()) == 2, "both engines behind the router")
    asked = [(method, run.engine_url(0) + path) for method, path in engine_routes(run, run.engine_url(0))]
    asked += [(method, run.router_url + path) for method, path in ROUTER_ROUTES]
    done = run.hosts.run("h4", sys.executable, "-c", KNOCK, json.dumps(asked), run.key[:-1], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    answers = [tuple(answer) for answer in json.loads(done.stdout)]
    assert len(answers) == 3 * len(asked)
    assert not [answer for answer in answers if answer[-1] not in (401, 403)]


def test_the_key_is_in_no_argument(run: ClusterRun) -> None:
    found = 0
    for host in ("h1", "h2", "h3", "h4"):
        for pid in run.hosts.processes(host):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            found += b"launch" in line or b"sglang" in line
            assert run.key.encode() not in line, line
    assert found >= 7, "learner agents and ranks, collector, router, engines"


def test_thirty_steps_over_four_hosts(run: ClusterRun, table: list[tuple[str, ...]]) -> None:
    end = run.finish()
    run.check_sound(end)
    metrics = read_metrics(run.path)
    took = metrics[-1]["time"] - metrics[0]["time"]
    table.append(("four hosts, 30 steps", f"{took:.0f} s", "0", "0", "bit-identical"))
    assert max(line["grad_norm"] for line in metrics) > 0
    hosts_of_starts = {json.loads(file.read_text())["host"] for file in (run.path / "epochs").glob("*/0*")}
    assert hosts_of_starts >= {"h1", "h3", "h4"}


def test_the_key_is_in_no_file(run: ClusterRun) -> None:
    key = run.key.encode()
    holders = [
        path
        for folder in (run.hosts.shared, run.logs)
        for path in (Path(base) / name for base, _, names in os.walk(folder) for name in names)
        if key in path.read_bytes()
    ]
    assert not holders
    assert run.hosts.run("h1", "grep", "-c", run.key, KEY_FILE).stdout.strip() == "1", "the search finds what is there"


KNOCK = """
import json, sys, urllib.error, urllib.request
answers = []
for method, url in json.loads(sys.argv[1]):
    for key in ("", "wrong", sys.argv[2]):
        headers = {"Content-Type": "application/json", "X-EvenKeel-Update": str(1 << 60)}
        headers |= {"Authorization": "Bearer " + key} if key else {}
        body = None if method == "GET" else b"{}"
        try:
            request = urllib.request.Request(url, data=body, method=method, headers=headers)
            status = urllib.request.urlopen(request, timeout=10).status
        except urllib.error.HTTPError as error:
            status = error.code
        answers.append((method, url, key and "a wrong key", status))
print(json.dumps(answers))
"""
PUBLIC = {"/health", "/health_generate", "/ready", "/metrics"}
"""Say that a process lives, and its numbers; SGLang leaves them open for probes."""
ROUTER_ROUTES = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("DELETE", "/workers/any"),
    ("PUT", "/workers/any"),
    ("POST", "/flush_cache"),
    ("GET", "/get_loads"),
    ("POST", "/generate"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
]


def engine_routes(run: ClusterRun, url: str) -> list[tuple[str, str]]:
    """All routes of the engine, as it lists them itself."""
    status, text = run.call("h1", "GET", f"{url}/openapi.json")
    assert status == 200, text
    paths = json.loads(text)["paths"]
    routes = [(m.upper(), path) for path, methods in paths.items() for m in methods if path not in PUBLIC]
    known = {path for _, path in routes}
    assert {"/update_weights_from_disk", "/update_weights_from_distributed", "/pause_generation"} <= known
    assert {"/init_weights_update_group", "/flush_cache", "/abort_request", "/release_memory_occupation"} <= known
    return routes
