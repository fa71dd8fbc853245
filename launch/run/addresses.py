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
"""Variable with a backend's interface → prefix of its name. Without `=`, NCCL would take eth10 for eth1, too."""


def bind_address(host: str, api_key: str | None, check: Callable[[], None] = lambda: None) -> str:
    """Return the address that `host` resolves to, for servers of this machine to bind to.

    Raises RecipeError for a name that leads to loopback, and without an API key for an address that other hosts can
    reach; otherwise as `own_address` does.
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
    """Return the address of this machine that `host` resolves to, waiting for DNS where necessary.

    A pod's name appears in DNS some time after its start, and may lead to an earlier pod until then. `check` is called
    meanwhile, and may raise. Raises DeadlineExceededError, and RecipeError for a literal address of another machine.
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
    """Return an address that `host` resolves to, IPv4 if there is one. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def own_address_towards(address: str) -> str:
    """Return this machine's address on the route to `address`; nothing is sent. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def interface_environment(
    address: str, environment: Mapping[str, str] = os.environ, *, alone: bool = False
) -> dict[str, str]:
    """Return the variables that make gloo and NCCL listen at `address`, except those that the user has set.

    By default they listen at the address of this machine's name. Loopback gives none, since a learner reached there may
    send weights to engines on other hosts, unless the whole run is `alone` on this machine.
    """
    if (is_loopback(address) and not alone) or (name := interface_of(address)) is None:
        return {}
    return {key: f"{before}{name}" for key, before in _INTERFACE_VARIABLES.items() if key not in environment}


def interface_of(address: str) -> str | None:
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
