"""Every expression of the dashboard and of the alerts is PromQL, and names what the roles really show.

Names of SGLang are compared with a real engine in tests/integration/test_engine.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.run.metrics import ALL, BY_NAME
from precision.mismatch.alarms import RULES
from tests.support.metric_feed import fed, run_with_every_file, scraped
from tests.support.promql import DASHBOARD, alerts, expressions, selectors, shown

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


@pytest.mark.parametrize("text", ["max by (run) (evenkeel_ess_ratio", "rate(evenkeel_steps_total)", "sum(1"])
def test_what_is_not_promql_is_seen(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(selectors(text))


def test_a_name_inside_a_call_is_seen() -> None:
    text = "1 + sum by (run) (rate(gone_total[5m])) > on (run) -max_over_time((a - b)[1h:1m])"
    assert {one.name for one in selectors(text)} == {"gone_total", "a", "b"}


def test_there_is_an_alert_for_each_thing_that_goes_wrong() -> None:
    names = {str(rule["alert"]).removeprefix("EvenKeel") for rule in alerts()}
    wanted = {"NoStep", "EssLow", "EngineQuarantined", "EngineBehind", "CollectorStuck", "Restarts"}
    assert (
        wanted | {"DiskFull", "NonFinite", "VerifierFailures", "LagHigh", "GaveUp", "LearnerGone", "RunGone"} <= names
    )
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


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


def test_panels_do_not_overlap_and_have_their_own_numbers() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
