"""The page of scale is what its program says, and the program says what follows from its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.cluster.roles.base import EPOCH_POLL_S
from ops.scale import model
from ops.scale.model import Size
from ops.scale.operations import measured, requests_of
from ops.scale.simulate import LARGEST, MARKS, PAGE, page_with, play, tables

SMALL = Size(8, 32)


@pytest.fixture(scope="module")
def requests() -> dict[str, float]:
    return measured()


def test_the_page_holds_the_numbers_of_the_program() -> None:
    page = PAGE.read_text()
    assert page_with(tables(LARGEST), page) == page, "python -m ops.scale.simulate --write"


def test_another_number_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PARSED_TOKENS_S", 2 * model.PARSED_TOKENS_S)
    page = PAGE.read_text()
    assert page_with(tables(LARGEST), page) != page
    assert page.count(MARKS[0]) == page.count(MARKS[1]) == 1


def test_requests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    assert requests_of(lambda: (tmp_path / "a").read_text()) == 2
    assert requests_of(lambda: (tmp_path / "a").exists()) == 1
    assert requests_of(lambda: (tmp_path / "a").rename(tmp_path / "b")) == 1
    assert requests_of(lambda: None) == 0


def test_looks_grow_with_the_engines(requests: dict[str, float]) -> None:
    few, many = (model.metadata_requests_s(Size(count, 32), requests) for count in (10, 1000))
    engines = next(name for name in few if name.startswith("engines"))
    assert many[engines] == pytest.approx(100 * few[engines])
    assert few[engines] == pytest.approx(10 * (requests["epoch check"] / EPOCH_POLL_S + requests["finished?"] / 10))


def test_a_group_for_each_engine_is_enough_while_the_learner_has_a_rank_for_each() -> None:
    alike, few_ranks = model.publish_s(Size(256, 1024)), model.publish_s(Size(1024, 32))
    assert alike["groups"] == pytest.approx(model.WEIGHT_BYTES / model.NETWORK_BYTES_S)
    assert alike["groups"] < alike["tree"] < alike["disk"]
    assert few_ranks["groups"] == pytest.approx(128 / 4 * alike["groups"])
    assert few_ranks["tree"] < few_ranks["groups"]


def test_a_server_that_takes_fewer_requests_lets_everybody_wait(
    requests: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, busy = play(SMALL, requests)
    assert len(quick.step) == len(quick.save) == SMALL.ranks
    monkeypatch.setattr(model, "METADATA_S", model.METADATA_S / 100)
    slow, busier = play(SMALL, requests)
    assert max(slow.step) > 10 * max(quick.step)
    assert busier > 10 * busy
    assert play(replace(SMALL), requests)[1] == busier, "the same numbers give the same minute"
