"""The learner's agents over real sockets of loopback."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from launch.roles import heartbeat
from launch.roles.heartbeat import Ending, Peer, Peers, _Line
from rollout_sglang.server.start import free_port

HOST, KEY, EPOCH = "127.0.0.1", "a key", 3


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def peers(port: int) -> Iterator[Peers]:
    with Peers(HOST, port, nodes=3, epoch=EPOCH, key=KEY) as found:
        yield found


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_nodes_join_start_and_hear_the_verdict(peers: Peers, port: int) -> None:
    with Peer(HOST, port, node=1, epoch=EPOCH, key=KEY) as one, Peer(HOST, port, node=2, epoch=EPOCH, key=KEY) as two:
        until(lambda: len(peers.joined) == 2)
        assert not one.go
        peers.start_ranks()
        until(lambda: one.go and two.go)
        two.tell(stop=True)
        until(lambda: peers.stop_asked)
        one.tell(status=64, reason="the model is gone")
        until(peers.trouble)
        assert peers.trouble() == Ending(64, "node 1: the model is gone")
        peers.tell(status=64, reason="node 1: the model is gone")
        until(two.trouble)
        assert two.trouble() == Ending(64, "node 1: the model is gone")


@pytest.mark.parametrize(("key", "epoch"), [("another key", EPOCH), (None, EPOCH), (KEY, EPOCH - 1)])
def test_another_key_or_another_start_is_refused_by_both(peers: Peers, port: int, key: str | None, epoch: int) -> None:
    with pytest.raises((ValueError, KeyError, EOFError)):
        Peer(HOST, port, node=1, epoch=epoch, key=key)
    assert not peers.joined


def test_who_does_not_know_the_key_does_not_join(peers: Peers, port: int) -> None:
    with socket.create_connection((HOST, port)) as stranger:
        lines = stranger.makefile("rwb")
        lines.write(b'{"node": 1, "nonce": "x"}\n')
        lines.flush()
        proof = json.loads(lines.readline())["proof"]
        lines.write(json.dumps(dict(proof=proof)).encode() + b"\n")  # node 0's own, thrown back
        lines.flush()
        assert lines.readline() == b""
    assert not peers.joined


@pytest.mark.parametrize("answer", [b"{}", '{"nonce": "x", "proof": "é"}'.encode(), b'{"nonce": [], "proof": 1}'])
def test_a_node_0_that_shows_no_proof_is_refused(port: int, answer: bytes) -> None:
    with socket.create_server((HOST, port)) as stranger:

        def serve() -> None:
            connection, _ = stranger.accept()
            with connection, connection.makefile("rwb") as lines:
                lines.readline()
                lines.write(answer + b"\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ValueError, match="another API key"):
            Peer(HOST, port, node=1, epoch=EPOCH, key=KEY)
        thread.join()


def test_a_node_that_ends_is_missed_once_ranks_run(peers: Peers, port: int) -> None:
    early = Peer(HOST, port, node=1, epoch=EPOCH, key=KEY)
    until(lambda: peers.joined.keys() == {1})
    with early:
        pass
    until(lambda: not peers.joined)  # it may come again
    with Peer(HOST, port, node=1, epoch=EPOCH, key=KEY), Peer(HOST, port, node=2, epoch=EPOCH, key=KEY) as two:
        until(lambda: len(peers.joined) == 2)
        peers.start_ranks()
        until(lambda: two.go)
        assert peers.trouble() is None
    until(peers.trouble)
    assert "is gone" in str(peers.lost)


def test_a_node_that_is_started_again_ends_the_epoch(peers: Peers, port: int) -> None:
    with Peer(HOST, port, node=1, epoch=EPOCH, key=KEY), Peer(HOST, port, node=2, epoch=EPOCH, key=KEY):
        until(lambda: len(peers.joined) == 2)
        peers.start_ranks()
        with Peer(HOST, port, node=2, epoch=EPOCH, key=KEY):
            until(peers.trouble)
    assert peers.lost == "node 2 was started again"


def test_ranks_are_not_started_without_a_node_that_left_just_before(peers: Peers, port: int) -> None:
    with Peer(HOST, port, node=1, epoch=EPOCH, key=KEY) as one:
        until(lambda: peers.joined.keys() == {1})
        peers.start_ranks()
        assert peers.trouble() == Ending(1, "a node left before the ranks were started")
        peers.tell(status=1, reason="again")
        until(one.trouble)
        assert not one.go


def test_who_comes_too_late_hears_that_this_start_ends(peers: Peers, port: int) -> None:
    with Peer(HOST, port, node=1, epoch=EPOCH, key=KEY), Peer(HOST, port, node=2, epoch=EPOCH, key=KEY):
        until(lambda: len(peers.joined) == 2)
        peers.start_ranks()
        with Peer(HOST, port, node=2, epoch=EPOCH, key=KEY) as again:
            until(again.trouble)
            assert again.trouble() == Ending(1, "node 2 was started again")


def test_silence_counts_as_death_whatever_tcp_says(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "DEAD_S", 1.5)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    with (
        Peers(HOST, port, nodes=2, epoch=EPOCH, key=KEY) as peers,
        Peer(HOST, port, node=1, epoch=EPOCH, key=KEY) as one,
    ):
        until(lambda: peers.joined)
        peers.start_ranks()
        until(lambda: one.go)
        with one._line._sending:  # it cannot speak, with its connection open
            until(peers.trouble)
        assert peers.lost == "node 1 is gone (silent for 1.5 s)"


def test_a_node_misses_node_0(port: int) -> None:
    peers = Peers(HOST, port, nodes=2, epoch=EPOCH, key=KEY)
    with Peer(HOST, port, node=1, epoch=EPOCH, key=KEY) as one:
        with peers:
            until(lambda: peers.joined)
        until(one.trouble)
        assert str(one.lost).startswith("node 0 is gone")


def test_a_taken_port_is_an_error(peers: Peers, port: int) -> None:
    with pytest.raises(OSError, match="Address already in use"):
        Peers(HOST, port, nodes=2, epoch=EPOCH, key=KEY)


@pytest.mark.parametrize(
    "message", [b"[" * 60_000, b'{"status": [1]}', b'{"status": 1e999}', b"9" * 5000, b"{}" * 40_000]
)
def test_a_message_that_is_none_is_an_error_that_is_expected(message: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=theirs.sendall, args=(message + b"\n",), daemon=True).start()
        line = _Line(ours)
        with pytest.raises(ValueError, match=r"."):
            line.read()
