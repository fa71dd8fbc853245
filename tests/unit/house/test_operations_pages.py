"""The runbook and the cluster page quote what the code really says, shows and takes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launch.run.metrics import BY_NAME
from tests.support.promql import alerts

ROOT = Path(__file__).parents[3]
RUNBOOK, CLUSTER = ROOT / "ops/runbook.md", ROOT / "docs/cluster.md"
ROOMS = ("precision", "pipeline", "megatron_bridge", "rollout_sglang", "launch")
GAP = "…"


@cache
def messages() -> tuple[str, ...]:
    """Every text of the code, with a gap for what is filled in."""
    return tuple(text for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")) for text in texts(file))


def texts(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def says(message: str) -> bool:
    """Whether some text of the code has the parts of a quoted message, in this order."""
    parts = [re.escape(part) for part in message.split(GAP) if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in messages())


def quotes() -> list[str]:
    return [line.removeprefix("> ") for line in RUNBOOK.read_text().splitlines() if line.startswith("> ")]


@pytest.mark.parametrize("message", quotes())
def test_quoted_messages_are_in_the_code(message: str) -> None:
    assert says(message)


def test_things_are_numbered_and_every_alert_is_one_of_them() -> None:
    page = RUNBOOK.read_text()
    assert re.findall(r"^## (\d+)\. ", page, re.MULTILINE) == [str(number) for number in range(1, 23)]
    assert [str(rule["alert"]) for rule in alerts() if str(rule["alert"]) not in page] == []
    assert set(re.findall(r"EvenKeel\w+", page)) <= {str(rule["alert"]) for rule in alerts()}


@pytest.mark.parametrize("page", [RUNBOOK, CLUSTER])
def test_metrics_exist(page: Path) -> None:
    assert set(re.findall(r"`(evenkeel_\w+)`", page.read_text(encoding="utf-8"))) <= BY_NAME.keys()


def test_ports_of_the_page_are_those_of_the_code() -> None:
    from launch.roles import engine, learner
    from launch.schedulers.kubernetes import run as job

    page = CLUSTER.read_text()
    assert learner.DEFAULT_PORT == job.RENDEZVOUS_PORT
    assert engine.DEFAULT_PORT == job.ENGINE_PORT
    rows = {
        f"| {learner.DEFAULT_PORT} |",
        f"| {job.HEARTBEAT_PORT} |",
        f"| {engine.DEFAULT_PORT} + i |",
        f"| {engine.DEFAULT_PORT + engine.RENDEZVOUS_PORTS} + i |",
        f"(Kubernetes: {job.ROUTER_PORT})",
        f"| {job.ROUTER_METRICS_PORT} (Kubernetes) |",
        f"(Kubernetes: {job.METRICS_PORT})",
    }
    assert {row for row in rows if row not in page} == set()
