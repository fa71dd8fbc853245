"""The ledger of `make chaos`: verdicts survive a kill, a second call does only what is missing, a wrong one is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.chaos import __main__ as command
from tests.chaos.ledger import Check, Ledger, judge


def says(verdict: str) -> Callable[[dict[str, Any]], str]:
    return lambda details: verdict


def test_a_second_call_runs_what_is_missing(tmp_path: Path) -> None:
    tried: list[str] = []

    def body(details: dict[str, Any]) -> str:
        tried.append("a")
        details["seen"] = 3
        return "ok"

    first = Ledger(tmp_path / "part.jsonl")
    assert [entry.verdict for entry in first.run([Check("a", body)])] == ["ok"]
    second = Ledger(tmp_path / "part.jsonl")
    assert [entry.id for entry in second.run([Check("a", body), Check("b", says("ok"))])] == ["b"]
    assert tried == ["a"]
    assert second.entries["a"].details == {"seen": 3}


def test_a_torn_last_line_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    list(Ledger(path).run([Check("a", says("ok")), Check("b", says("ok"))]))
    path.write_bytes(path.read_bytes()[:-20])
    ledger = Ledger(path)
    assert [case.id for case in ledger.waiting([Check("a", says("ok")), Check("b", says("ok"))])] == ["b"]
    list(ledger.run([Check("b", says("ok"))]))
    assert set(Ledger(path).entries) == {"a", "b"}


def test_what_was_wrong_runs_again_when_asked(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "part.jsonl")
    list(ledger.run([Check("a", says("lost 1"))]))
    assert ledger.waiting([Check("a", says("ok"))]) == []
    assert [entry.verdict for entry in ledger.run([Check("a", says("ok"))], again=True)] == ["ok"]
    assert Ledger(ledger.path).entries["a"].is_ok


def test_what_a_case_raises_is_its_verdict() -> None:
    def body(details: dict[str, Any]) -> str:
        raise OSError("no\n space")

    entry = judge(Check("a", body))
    assert entry.verdict == "raised OSError: no space"
    assert "Traceback" in entry.details["traceback"]


def test_two_cases_may_not_share_an_id(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two cases are called 'a'"):
        Ledger(tmp_path / "part.jsonl").waiting([Check("a", says("ok")), Check("a", says("ok"))])


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A part of two cases, the second of which is wrong."""
    module = ModuleType("tests.chaos.invented")
    module.cases = lambda: [Check("first", says("ok")), Check("second", says("duplicated 1"))]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests.chaos.invented", module)
    monkeypatch.setattr(command, "parts", lambda: ["invented"])
    return module


def test_a_wrong_verdict_is_the_exit_status(part: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert command.main(["--out", str(tmp_path)]) == 1
    assert "invented second: duplicated 1" in capsys.readouterr().out
    assert command.main(["--out", str(tmp_path), "--cases", "1"]) == 0
    assert command.main(["--out", str(tmp_path), "--only", "sec"]) == 1


def test_each_part_has_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.time, "monotonic", lambda: 0.0)
    assert command._end_of_share(["flips", "simulation", "kills"], 70.0) == 10.0
    assert command._end_of_share(["simulation", "kills"], 72.0) == 12.0, "flips have left some"
    assert command._end_of_share(["kills"], 72.0) == 72.0


def test_the_case_under_way_ends_when_the_time_is_over(
    part: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    short = ["--out", str(tmp_path), "--minutes", "0.00001"]
    assert command.main(short) == 0, "none is wrong so far"
    assert "the same command goes on" in capsys.readouterr().out
    assert command.main(short) == 1, "the second is"
    assert "the same command goes on" not in capsys.readouterr().out


def test_an_unknown_part_is_refused(part: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        command.main(["kittens"])
    assert "there is no part 'kittens'; expected invented" in capsys.readouterr().err
