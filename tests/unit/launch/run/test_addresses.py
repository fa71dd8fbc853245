"""The address behind --host: names of pods appear late, and may lead to the pod before."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from launch.run import addresses
from launch.run.addresses import own_address
from pipeline.errors import DeadlineExceededError, RecipeError, StoppedError

OTHER_HOST = "203.0.113.7"


def names(*answers: str | None) -> Callable[..., Any]:
    """getaddrinfo that gives one answer after the other, and then the last one again; None: not known."""
    left = list(answers)

    def getaddrinfo(*_: object, **__: object) -> list[Any]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, 0))]

    return getaddrinfo


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_NAME_POLL_S", 0.0)


def test_a_name_is_waited_for_until_it_leads_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", names(None, OTHER_HOST, "127.0.0.1"))
    assert own_address("run-engine-0-0.run") == "127.0.0.1"
    assert capsys.readouterr().out.count("waiting") == 1


@pytest.mark.parametrize("answer", [None, OTHER_HOST])
def test_a_name_that_never_leads_here_may_be_tried_again(monkeypatch: pytest.MonkeyPatch, answer: str | None) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", names(answer))
    with pytest.raises(DeadlineExceededError, match="give a name or an address of this machine"):
        own_address("run-engine-0-0.run", deadline_s=0.0)


def test_who_waits_for_a_name_notices_that_it_was_asked_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise StoppedError("asked to end")

    monkeypatch.setattr(socket, "getaddrinfo", names(None))
    with pytest.raises(StoppedError):
        own_address("run-engine-0-0.run", check)


def test_an_address_of_another_machine_is_refused_at_once() -> None:
    with pytest.raises(RecipeError, match="no address of this machine"):
        own_address(OTHER_HOST)
