"""The address behind --host: names of pods appear late, and may lead to the pod before."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from launch.run import addresses
from launch.run.addresses import bind_address, interface_environment, own_address
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


def resolving_to(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, 0, 0, "", (one, 0)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert bind_address(host, None) == "127.0.0.1"


def test_a_name_becomes_the_address_that_servers_bind_to(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving_to(monkeypatch, "fe80::1", "10.1.2.3")
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: {"ib0": [SimpleNamespace(address="10.1.2.3")]})
    assert bind_address("n1", "key") == "10.1.2.3"
    with pytest.raises(RecipeError, match=r"--host n1 can be reached from other hosts.*EVENKEEL_API_KEY_FILE"):
        bind_address("n1", None)


def test_a_name_of_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts has the host's own name at 127.0.1.1."""
    resolving_to(monkeypatch, "127.0.1.1")
    with pytest.raises(RecipeError, match=r"n1 resolves to 127\.0\.1\.1, which other hosts cannot reach"):
        bind_address("n1", "key")


def test_torch_is_told_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(address="10.1.2.3")
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: {"ib0": [entry]})
    told = interface_environment("10.1.2.3", {"NCCL_SOCKET_IFNAME": "mine"})
    assert told == {"GLOO_SOCKET_IFNAME": "ib0", "TP_SOCKET_IFNAME": "ib0"}
    assert interface_environment("10.1.2.3", {})["NCCL_SOCKET_IFNAME"] == "=ib0", "without the sign also ib01"
    assert interface_environment("10.1.2.4", {}) == {}
    assert interface_environment("127.0.0.1", {}) == {}


def test_a_run_on_one_machine_keeps_to_loopback() -> None:
    told = interface_environment("127.0.0.1", {"NCCL_SOCKET_IFNAME": "mine"}, alone=True)
    assert told == {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
