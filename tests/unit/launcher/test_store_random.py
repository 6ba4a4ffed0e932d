"""The ranks' store against torch's own server: the same random requests, the same answers.

Most requests go through torch's client. Those that make a client wait are sent as bytes, followed by a PING, whose
answer shows that the server has read them. So it is known at each step who waits.

Three defects of torch 2.13 are not drawn: a client that has waited for a queue may later be woken by that queue while
it waits for something else; it may be woken before a client that came first; a client that waits for several keys
misses that a queue among them has a value.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # torch marks no exports

from tests.unit.launcher.seam import LOOPBACK, MAGIC, REQUESTS
from tests.unit.launcher.test_store import SERVER, string

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

LIMIT = timedelta(seconds=20)
WAITING: Final = ("get", "multi_get", "wait")
ENOUGH_S: Final = 4
STEPS: Final = 200
KEYS: Final = ("a", "b", "default_pg/0//x", "", "\0é")
QUEUES: Final = ("q", "r")
VALUES: Final = (b"", b"1", b"-7", b"12abc", b" 3 4", b"+5", b"x", b"\0\xff", bytes(5000), b"9" * 30, b"0x10")
SEED = "NUMAPIN_STORE_SEED"


def keys_of(arguments: Sequence[Any]) -> list[str]:
    """Return the keys that a request is about."""
    return [arguments[0]] if isinstance(arguments[0], str) else arguments[0]


class Waiter:
    """A connection on which a client waits. Its answers are compared after each step."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connect()

    def connect(self) -> None:
        """Connect to the server."""
        self.socket = socket.create_connection((LOOPBACK, self.port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send("VALIDATE", struct.pack("=I", MAGIC))

    def send(self, request: str, content: bytes = b"") -> None:
        """Send a request."""
        self.socket.sendall(bytes([REQUESTS.index(request)]) + content)

    def answers(self) -> bytes:
        """Return what the server has answered since the last call, and whether it has closed the connection."""
        mark = b"mark"
        answered = b""
        try:
            self.send("PING", mark)
            while not answered.endswith(mark):
                part = self.socket.recv(100)
                if not part:
                    raise ConnectionError  # noqa: TRY301 - a close and a reset are alike
                answered += part
        except ConnectionError:
            self.socket.close()
            self.connect()
            return answered + b"closed"
        return answered.removesuffix(mark)


class Server:
    """A server with its clients."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.clients = [self.new_client() for _ in range(2)]
        self.waiters = [Waiter(port) for _ in range(3)]
        self.queue_waiters = [Waiter(port) for _ in QUEUES]

    def new_client(self) -> Any:
        """Return a client of torch."""
        return TCPStore(LOOPBACK, self.port, is_master=False, timeout=LIMIT)

    def ask(self, number: int, prefix: str, method: str, arguments: Sequence[Any]) -> object:
        """Return the answer to a client's request; wait until the server has carried it out."""
        client = self.clients[number]
        store = PrefixStore(prefix, client) if prefix else client
        try:
            if method in WAITING and not store.check(keys_of(arguments)):
                return "missing"
            answer = getattr(store, method)(*arguments)
            client.num_keys()
        except Exception as error:  # noqa: BLE001 - torch raises RuntimeErrors of its own
            return self._failed(number, error)
        return sorted(answer) if method == "list_keys" else answer

    def _failed(self, number: int, error: Exception) -> str:
        if "queue is empty" in str(error):
            return "empty"
        self.clients[number] = self.new_client()  # the server has closed the connection
        return "closed"

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections of the waiting clients."""
        for waiter in (*self.waiters, *self.queue_waiters):
            waiter.socket.close()

    def changes(self) -> list[bytes]:
        """Return what the waiting clients have got."""
        return [waiter.answers() for waiter in (*self.waiters, *self.queue_waiters)]


class Talk:
    """Random requests, from a seed."""

    def __init__(self, seed: int, methods: Sequence[str]) -> None:
        self.random = random.Random(seed)  # noqa: S311 - not for secrets
        self.methods = methods
        self.waiting: set[int] = set()

    def step(self) -> tuple[str, Callable[[Server], object]]:
        """Return a request, in words and as a function."""
        if self.random.random() < 0.3:
            return self._waiter_step()
        number, prefix = self.random.randrange(2), self.random.choice(("", "", "p"))
        method = self.random.choice(self.methods)
        arguments = ARGUMENTS[method](self)
        return f"client {number} {prefix!r} {method}{arguments}", lambda server: server.ask(
            number, prefix, method, arguments
        )

    def _waiter_step(self) -> tuple[str, Callable[[Server], object]]:
        """Let a client wait that does not, or give up."""
        number = self.random.randrange(3 + len(QUEUES))
        if number in self.waiting:
            request, content = "CANCEL_WAIT", b""
            self.waiting.discard(number)
        elif number >= 3:
            request, content = "WAIT", struct.pack("=Q", 1) + string(QUEUES[number - 3].encode())
            self.waiting.add(number)
        elif self.random.random() < 0.3 and hasattr(TCPStore, "barrier"):
            request, content = "BARRIER", string(self.key().encode()) + struct.pack("=q", self.random.randint(1, 4))
            self.waiting.add(number)
        else:
            keys = [f"{self.random.choice(('', 'p/'))}{self.key()}" for _ in range(self.random.randint(0, 3))]
            request, content = "WAIT", struct.pack("=Q", len(keys)) + b"".join(string(key.encode()) for key in keys)
            self.waiting.add(number)
        return f"waiter {number} {request} {content!r}", lambda server: [
            *server.waiters,
            *server.queue_waiters,
        ][number].send(request, content)

    def note(self, changes: Sequence[bytes]) -> None:
        """Note which waiting clients have got an answer."""
        self.waiting -= {number for number, change in enumerate(changes) if change}

    def key(self) -> str:
        """Return a random key."""
        return self.random.choice(KEYS)

    def keys(self) -> list[str]:
        """Return some random keys."""
        return [self.key() for _ in range(self.random.randint(0, 3))]


def _value(talk: Talk) -> bytes:
    return talk.random.choice(VALUES)


def _queue(talk: Talk) -> str:
    return talk.random.choice(QUEUES)


def _multi_set(talk: Talk) -> tuple[object, ...]:
    keys = talk.keys()
    return keys, [_value(talk) for _ in keys]


# The arguments of torch's methods that a talk can use.
ARGUMENTS: Final[dict[str, Callable[[Talk], tuple[object, ...]]]] = {
    "set": lambda talk: (talk.key(), _value(talk)),
    "append": lambda talk: (talk.key(), _value(talk)),
    "add": lambda talk: (talk.key(), talk.random.randint(-3, 3)),
    "get": lambda talk: (talk.key(),),
    "delete_key": lambda talk: (talk.key(),),
    "compare_set": lambda talk: (talk.key(), *talk.random.choices(("", "1", "x", "12abc"), k=2)),
    "multi_get": lambda talk: (talk.keys(),),
    "multi_set": _multi_set,
    "check": lambda talk: ([*talk.keys(), *talk.random.sample(QUEUES, talk.random.randint(0, 1))],),
    "wait": lambda talk: (talk.keys(), LIMIT),
    "num_keys": lambda _: (),
    "list_keys": lambda _: (),
    "queue_push": lambda talk: (_queue(talk), _value(talk)),
    "queue_pop": lambda talk: (_queue(talk), False),
    "queue_len": lambda talk: (_queue(talk),),
}


@pytest.fixture
def ours() -> Iterator[Callable[[], int]]:
    """Give a function that starts one of our servers and returns its port."""
    started: list[subprocess.Popen[str]] = []

    def start() -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())

    yield start
    for process in started:
        process.communicate()


def test_same_requests_same_answers(ours: Callable[[], int], capfd: pytest.CaptureFixture[str]) -> None:
    """Every request has the same answer, and lets the same clients continue, as with torch's server."""
    first = int(os.environ.get(SEED) or random.SystemRandom().randrange(1 << 32))
    methods = sorted(name for name in ARGUMENTS if hasattr(TCPStore, name))
    assert len(methods) >= 12
    start_s = time.monotonic()
    num_talks = 0
    while num_talks < 3 or (time.monotonic() < start_s + ENOUGH_S and SEED not in os.environ):
        master = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        with Server(ours()) as mine, Server(master.port) as theirs:
            compare(first + num_talks, methods, mine, theirs)
        num_talks += 1
    capfd.readouterr()  # both servers report closed connections


def compare(seed: int, methods: Sequence[str], mine: Server, theirs: Server) -> None:
    """Send the same requests to both servers."""
    talk = Talk(seed, methods)
    said = []
    for _ in range(STEPS):
        words, request = talk.step()
        said.append(words)
        answers = [(request(server), server.changes()) for server in (mine, theirs)]
        assert answers[0] == answers[1], f"{SEED}={seed}; ours, torch's after:\n" + "\n".join(said[-40:])
        talk.note(answers[0][1])
