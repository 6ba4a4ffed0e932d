"""The ranks' store against torch's own server: the same random requests, the same answers.

Requests are sent as torch's client sends them, each followed by a PING on every connection. The answer to that shows
that the server has carried them out, so it is known at each step which connections wait.

Three defects of torch 2.13 are not drawn: a client that has waited for a queue may later be woken by that queue while
it waits for something else; it may be woken before a client that came first; a client that waits for several keys
misses that a queue among them has a value. So each queue has a connection that waits for it alone.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch marks no exports

from tests.unit.launcher.seam import LOOPBACK, MAGIC
from tests.unit.launcher.test_store import serving_process, string, strings

REQUESTS: Final = (  # by their numbers
    *("VALIDATE", "SET", "COMPARE_SET", "GET", "ADD", "CHECK", "WAIT", "GETNUMKEYS", "DELETE_KEY", "APPEND"),
    *("MULTI_GET", "MULTI_SET", "CANCEL_WAIT", "PING", "QUEUE_PUSH", "QUEUE_POP", "QUEUE_LEN", "LIST_KEYS", "BARRIER"),
)
NUM_TALKS: Final = 4
STEPS: Final = 250
KEYS: Final = (b"a", b"b", b"p/a", b"p/b", b"default_pg/0//x", b"", "\0é".encode())
QUEUES: Final = (b"q", b"r")
VALUES: Final = (b"", b"1", b"-7", b"12abc", b" 3 4", b"+5", b"x", b"\0\xff", bytes(5000), b"9" * 30, b"0x10")
SEED: Final = "NUMAPIN_STORE_SEED"
MARK: Final = b"mark"
READY: Final = b"\0"
NUM_ASKING: Final = 3
Chance = random.Random


def some(chance: Chance) -> list[bytes]:
    return chance.choices(KEYS, k=chance.randint(0, 3))


def one(chance: Chance, *values: Sequence[bytes]) -> bytes:
    """Return a value of each kind, as they are sent."""
    return b"".join(string(chance.choice(each)) for each in values)


def pairs(chance: Chance) -> bytes:
    keys = some(chance)
    return struct.pack("=Q", len(keys)) + b"".join(string(key) + one(chance, VALUES) for key in keys)


# The content of each request.
CONTENT: Final[dict[str, Callable[[Chance], bytes]]] = {
    "SET": lambda chance: one(chance, KEYS, VALUES),
    "COMPARE_SET": lambda chance: one(chance, KEYS, *[(b"", b"1", b"x", b"12abc")] * 2),
    "GET": lambda chance: one(chance, KEYS),
    "ADD": lambda chance: one(chance, KEYS) + struct.pack("=q", chance.randint(-3, 3)),
    "CHECK": lambda chance: strings([*some(chance), *chance.sample(QUEUES, chance.randint(0, 1))]),
    "WAIT": lambda chance: strings(some(chance)),
    "GETNUMKEYS": lambda _: b"",
    "DELETE_KEY": lambda chance: one(chance, KEYS),
    "APPEND": lambda chance: one(chance, KEYS, VALUES),
    "MULTI_GET": lambda chance: strings(some(chance)),
    "MULTI_SET": pairs,
    "QUEUE_PUSH": lambda chance: one(chance, QUEUES, VALUES),
    "QUEUE_POP": lambda chance: one(chance, QUEUES),
    "QUEUE_LEN": lambda chance: one(chance, QUEUES),
    "LIST_KEYS": lambda _: b"",
    "BARRIER": lambda chance: one(chance, KEYS) + struct.pack("=q", chance.randint(1, 4)),
}
# A torch that lacks the method lacks the request.
KNOWN: Final = [name for name in CONTENT if name not in REQUESTS[14:] or hasattr(TCPStore, name.lower())]


class Connection:
    """A connection to a server, made again when that closes it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connect()

    def _connect(self) -> None:
        self.socket = socket.create_connection((LOOPBACK, self._port), timeout=120)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send("VALIDATE", struct.pack("=I", MAGIC))

    def send(self, request: str, content: bytes = b"") -> None:
        self.socket.sendall(bytes([REQUESTS.index(request)]) + content)

    def answers(self) -> bytes:
        """Return what the server has answered since the last call, and whether it has closed the connection."""
        answered = b""
        try:
            self.send("PING", MARK)
            while not answered.endswith(MARK):
                part = self.socket.recv(1 << 16)
                if not part:
                    raise ConnectionError  # noqa: TRY301 - a close and a reset are alike
                answered += part
        except ConnectionError:
            self.socket.close()
            self._connect()
            return b"closed"
        return answered.removesuffix(MARK)


def in_order(answer: bytes) -> bytes:
    """Return an answer of strings with these in order, after their number."""
    found, position = [], 8
    while position < len(answer):
        (size,) = struct.unpack_from("=Q", answer, position)
        found.append(answer[position : position + 8 + size])
        position += 8 + size
    return answer[:8] + b"".join(sorted(found))


class Talk:
    """Random requests, from a seed, to both servers on connections of the same number."""

    def __init__(self, seed: int, ours: int, torchs: int) -> None:
        self._chance = Chance(seed)
        self._said = [f"{SEED}={seed}; ours, torch's after:"]
        self._waiting: set[int] = set()
        self._servers = [[Connection(port) for _ in range(NUM_ASKING + len(QUEUES))] for port in (ours, torchs)]

    def close(self) -> None:
        for connection in chain(*self._servers):
            connection.socket.close()

    def step(self) -> None:
        """Let a connection ask or wait, or give up if it waits."""
        number, name = self._chance.randrange(NUM_ASKING + len(QUEUES)), self._chance.choice(KNOWN)
        if number in self._waiting:
            self._ask(number, "CANCEL_WAIT", b"")
        elif number >= NUM_ASKING:
            self._ask(number, "WAIT", strings([QUEUES[number - NUM_ASKING]]))
        else:
            content = CONTENT[name](self._chance)
            keys = {"GET": struct.pack("=Q", 1) + content, "MULTI_GET": content}.get(name)
            if keys is None or self._ask(number, "CHECK", keys) == READY:  # torch's client waits for them first
                self._ask(number, name, content)

    def _ask(self, number: int, name: str, content: bytes) -> bytes:
        """Send a request to both servers; return the answer. All connections must get the same from both."""
        self._said.append(f"connection {number} {name} {content!r}")
        for server in self._servers:
            server[number].send(name, content)
        ours, torchs = ([connection.answers() for connection in server] for server in self._servers)
        if name == "LIST_KEYS":
            ours[number], torchs[number] = (in_order(answers[number]) for answers in (ours, torchs))
        assert ours == torchs, "\n".join([self._said[0], *self._said[-40:]])
        if name in ("WAIT", "BARRIER"):
            self._waiting.add(number)
        self._waiting -= {other for other, answer in enumerate(ours) if answer}
        return ours[number]


def test_same_requests_same_answers(capfd: pytest.CaptureFixture[str]) -> None:
    """Every request has the same answer, and lets the same clients continue, as with torch's server."""
    assert len(KNOWN) >= 11
    first = int(os.environ.get(SEED) or random.SystemRandom().randrange(1 << 32))
    for seed in range(first, first + NUM_TALKS):
        master = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        with serving_process() as (_, port):
            talk = Talk(seed, port, master.port)
            for _ in range(STEPS):
                talk.step()
            talk.close()
    capfd.readouterr()  # both servers report closed connections
