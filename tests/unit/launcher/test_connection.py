"""A connection between two launchers: what a stranger cannot do to it, and for how long its network may be down."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.unit.launcher.seam import Connection, PeerRefused


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as one:
        other, _ = listening.accept()
        with other:
            yield one, other


@pytest.mark.parametrize("secret", [None, b"0123456789abcdef0123456789abcdef"])
def test_a_nonce_that_cannot_be_encoded(pair: tuple[socket.socket, socket.socket], secret: bytes | None) -> None:
    """It is refused, with and without a secret, like anything else that no launcher sends."""
    stranger, own = pair
    connection = Connection(own, secret=secret, is_server=True)
    stranger.sendall(b"- " + json.dumps({"numapin": 1, "nonce": "\ud800"}).encode() + b"\n")
    own.setblocking(True)
    with pytest.raises(PeerRefused, match="it is not a launcher of numapin"):
        connection.receive()


def test_a_network_that_is_down(pair: tuple[socket.socket, socket.socket]) -> None:
    """The kernel ends the connection after five minutes."""
    Connection(pair[0], secret=None, is_server=False)
    idle_s, interval_s, count = (
        pair[0].getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert idle_s + interval_s * count == 300
