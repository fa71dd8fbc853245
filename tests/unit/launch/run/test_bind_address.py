"""Which hosts a server may listen for, and by which interface torch finds an address."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from launch.run import addresses
from launch.run.addresses import bind_address, interface_environment
from pipeline.errors import RecipeError


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
