"""What SGLang shows at /metrics is what dashboard and alerts read."""

from __future__ import annotations

import httpx
import pytest

from pipeline.ports.engines import Sampling
from tests.support.engines import TinyEngine, TinyEngines
from tests.support.promql import expressions, selectors, shown

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def engine(tiny_engines: TinyEngines) -> TinyEngine:
    return tiny_engines.lease(["fp32"])["fp32"]


def test_names_of_the_dashboard_and_the_alerts_appear(engine: TinyEngine) -> None:
    engine.ask(lambda client: client.generate([1, 2, 3], 1, Sampling(max_new_tokens=4)))
    answer = httpx.get(f"{engine.spec.url}/metrics")  # without a key: these are numbers, and Prometheus has none
    assert answer.status_code == 200
    found = shown(answer.text)
    read = {one.name for text in expressions().values() for one in selectors(text) if one.name.startswith("sglang:")}
    assert len(read) >= 5
    assert read <= found.keys()
    assert engine.spec.api_key is not None
    assert engine.spec.api_key not in answer.text
