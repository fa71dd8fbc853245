"""Every expression of the dashboard and of the alerts is PromQL, and names what the roles really show.

Names of SGLang are compared with a real engine in tests/integration/test_engine.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.run.metrics import ALL, BY_NAME
from precision.mismatch.alarms import RULES
from tests.support.metric_feed import fed, run_with_every_file, scraped
from tests.support.promql import alerts, expressions, selectors, shown

ROOT = Path(__file__).parents[4]
GROUPED_BY = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
OF_A_TARGET = {"instance", "job", "namespace"}
"""Labels that Prometheus itself, or its operator, gives."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What all roles show."""
    run = run_with_every_file(tmp_path_factory.mktemp("metrics"))
    return {name: labels for role in ALL for name, labels in shown(scraped(fed(role, run))).items()}


@pytest.mark.parametrize("where", expressions())
def test_every_name_is_shown(ours: dict[str, set[str]], where: str) -> None:
    text = expressions()[where]
    read = list(selectors(text))
    assert read
    for selector in read:
        assert selector.name.startswith(("evenkeel_", "sglang:"))
        if selector.name.startswith("evenkeel_"):
            assert selector.name in ours
            assert {matcher.name for matcher in selector.matchers.matchers} <= {"run", *BY_NAME[selector.name].labels}
    known = {label for one in read if one.name in BY_NAME for label in ("run", *BY_NAME[one.name].labels)}
    known |= OF_A_TARGET | ({"le"} if "_bucket" in text else set())
    grouped = {label.strip() for labels in GROUPED_BY.findall(text) for label in labels.split(",")}
    assert grouped <= known


def test_runs_of_one_name_in_two_namespaces_are_two_runs() -> None:
    """In every rule that puts series together: one run would hide what goes wrong in the other."""
    together = {where: GROUPED_BY.findall(text) for where, text in expressions().items() if where.startswith("alert ")}
    assert len(together) > 15
    groups = [(where, labels) for where, found in together.items() for labels in found if labels]
    assert [one for one in groups if "namespace" not in re.split(r",\s*", one[1])] == []


def test_every_alarm_has_its_alert_and_no_alert_asks_for_another() -> None:
    """The bounds stand in precision.mismatch.alarms alone; the alerts read what the learner makes of them."""
    asked: dict[str, set[str]] = {}
    for rule in alerts():
        for selector in selectors(str(rule["expr"])):
            if selector.name.startswith("evenkeel_alarm"):
                (label,) = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "alarm"]
                asked.setdefault(label, set()).add(str(rule["alert"]))
    named = {rule.name: {"EvenKeel" + "".join(part.title() for part in rule.name.split("_"))} for rule in RULES}
    assert asked == named
