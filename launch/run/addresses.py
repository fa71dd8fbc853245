"""Find the addresses that servers bind to, and the network interface behind an address."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping

import psutil

from pipeline.errors import DeadlineExceededError, RecipeError

LOOPBACK = "127.0.0.1"
NAME_DEADLINE_S = 120.0
_NAME_POLL_S = 0.5
_INTERFACE_VARIABLES = dict(GLOO_SOCKET_IFNAME="", TP_SOCKET_IFNAME="", NCCL_SOCKET_IFNAME="=")
"""By which torch's backends are told where to listen, and what stands before the name. Without `=` NCCL takes eth1 for
eth10, too."""


def bind_address(host: str, api_key: str | None, check: Callable[[], None] = lambda: None) -> str:
    """Return the address that `host` resolves to, for servers of this machine to bind to.

    Raises RecipeError when other hosts could not reach it, or when they could, and there is no API key; otherwise as
    `own_address` does.
    """
    address = own_address(host, check)
    if is_loopback(address):
        if host != "localhost" and not _is_address(host):
            raise RecipeError(
                f"--host {host} resolves to {address}, which other hosts cannot reach; give the address of a network "
                "interface, or correct /etc/hosts"
            )
    elif not api_key:
        raise RecipeError(
            f"--host {host} can be reached from other hosts, so servers need an API key; set EVENKEEL_API_KEY, or "
            "EVENKEEL_API_KEY_FILE to a file of mode 0600 that holds one"
        )
    return address


def own_address(host: str, check: Callable[[], None] = lambda: None, deadline_s: float = NAME_DEADLINE_S) -> str:
    """Wait for an address of this machine that `host` resolves to.

    The name of a pod appears in DNS a while after the pod has started, and until then it may lead to the pod before it.
    `check` is called while the name is waited for, and may raise. Raises DeadlineExceededError, and RecipeError for a
    literal address that this machine does not have.
    """
    ends, told = time.monotonic() + deadline_s, False
    while True:
        try:
            address = first_address(host)
            if is_loopback(address) or interface_of(address) is not None:
                return address
            problem = f"leads to {address}, which is no address of this machine"
        except OSError as error:
            problem = f"cannot be resolved ({error.strerror})"
        if _is_address(host):
            raise RecipeError(f"--host {host} {problem}; give a name or an address of this machine")
        check()
        if time.monotonic() > ends:
            raise DeadlineExceededError(
                f"--host {host} {problem}, after {deadline_s:g} s; give a name or an address of this machine"
            )
        if not told:
            print(f"waiting: --host {host} {problem}", flush=True)
            told = True
        time.sleep(_NAME_POLL_S)


def first_address(host: str) -> str:
    """Return what a name leads to, an IPv4 address if there is one. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def own_address_towards(address: str) -> str:
    """Return the address of this machine from which it reaches another one; nothing is sent. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Tell whether only this machine reaches the address."""
    return ipaddress.ip_address(address).is_loopback


def interface_environment(
    address: str, environment: Mapping[str, str] = os.environ, *, alone: bool = False
) -> dict[str, str]:
    """Make the variables that let gloo and NCCL listen at `address`, but for those that the user has set. Left to
    themselves, they listen at the address of this machine's name.

    None for loopback, since a learner that is reached there may yet send weights to engines on other hosts; unless the
    run is `alone` on this machine, and nothing of it need be reached from outside.
    """
    if (is_loopback(address) and not alone) or (name := interface_of(address)) is None:
        return {}
    return {key: f"{before}{name}" for key, before in _INTERFACE_VARIABLES.items() if key not in environment}


def interface_of(address: str) -> str | None:
    """Return the network interface that has the address; None when none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
