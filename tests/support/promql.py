"""The expressions of the dashboard and of the alert rules, and what they name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "ops/grafana/evenkeel.json"
ALERTS = ROOT / "ops/alerts/evenkeel.yaml"


def alerts() -> list[dict[str, object]]:
    """The alert rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> dict[str, str]:
    """Where it stands → the expression. Grafana's variables stand for what they match."""
    found = {f"alert {rule['alert']}": str(rule["expr"]) for rule in alerts()}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            found[f"panel {panel['title']}, {target['refId']}"] = target["expr"]
    return {where: text.replace("$run", ".*").replace("$engines", ".*") for where, text in found.items()}


def selectors(text: str) -> Iterator[promql_parser.VectorSelector]:
    """Every metric that an expression reads, with its matchers. Raises ValueError for what is not PromQL."""
    waiting: list[object] = [promql_parser.parse(text)]
    while waiting:
        node = waiting.pop()
        match node:
            case promql_parser.VectorSelector():
                yield node
            case promql_parser.MatrixSelector():
                waiting.append(node.vector_selector)
            case promql_parser.BinaryExpr():
                waiting += [node.lhs, node.rhs]
            case promql_parser.Call():
                waiting += node.args
            case promql_parser.AggregateExpr():
                waiting += [node.expr] + ([] if node.param is None else [node.param])
            case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
                pass
            case _:
                waiting.append(node.expr)  # parentheses, a sign, a subquery


def shown(exposition: str) -> dict[str, set[str]]:
    """Name of a sample → names of its labels, of what `/metrics` answers."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found
