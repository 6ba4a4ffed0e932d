"""The ranks' store and its server: bounds, refusals, faults. What requests mean: test_store_random.py."""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch marks no exports

from tests.needs import needs_root
from tests.unit.launcher.seam import (
    LOOPBACK,
    LocalPeers,
    RankStore,
    StoreClient,
    StoreRefusal,
    listen,
    proc,
    serving,
    store_server,
)
from tests.unit.launcher.seam import store as launcher_store

LIMIT = timedelta(seconds=120)
PIPE = subprocess.PIPE
SERVER = f"""
import sys
from numapin.launcher.store_server import listen, serving
with listen({LOOPBACK!r}, 0) as listening, serving(listening):
    print(listening.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@contextmanager
def serving_process(before: str = "") -> Iterator[tuple[Any, int]]:
    """Serve a store in a process of its own, after some code; yield the process and the port."""
    command = [sys.executable, "-c", before + SERVER]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        if process.poll() is None:
            process.communicate()
    assert process.returncode == 0


def test_large_values() -> None:
    """A value of 8 MiB arrives in parts, and goes to many of torch's clients at once; one that leaves is forgotten."""
    # In a process of its own, because some calls of torch's client keep Python's lock while they wait.
    with serving_process() as (_, port):
        clients: list[Any] = [TCPStore(LOOPBACK, port, is_master=False, timeout=LIMIT) for _ in range(5)]
        with pytest.raises(Exception, match="wait timeout"):
            clients.pop().wait(["large"], timedelta(milliseconds=50))
        value = bytes(range(256)) * (8 << 12)
        clients[0].set("large", value)
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(lambda client: client.get("large") == value, clients)] == [True] * 4


VALID = b"\0" + struct.pack("=I", 0x3C85F7CE)


def string(content: bytes) -> bytes:
    return struct.pack("=Q", len(content)) + content


def strings(contents: Sequence[bytes]) -> bytes:
    return struct.pack("=Q", len(contents)) + b"".join(map(string, contents))


def request(number: int, *contents: bytes, after: bytes = b"") -> bytes:
    return bytes([number]) + b"".join(map(string, contents)) + after


def receive(store: RankStore, client: StoreClient, parts: Sequence[bytes]) -> None:
    for part in parts:
        client.received += part
        store.receive(client)


SENT = {
    b"GET / HTTP/1.1": "not a client",
    b"\0\1\2\3\4": "not a client",
    VALID + b"\xfe": "request 254",
    VALID + b"\1" + struct.pack("=Q", 1 << 20): "1048576 bytes",
    VALID + b"\5" + struct.pack("=Q", 1 << 40): "keys",
    VALID + request(1, b"k", b"x") + request(4, b"k", after=bytes(8)): "not a number",
    VALID + request(1, b"k", b"9" * 4300) + request(4, b"k", after=bytes(8)): "64 bits",
}


@pytest.mark.parametrize("sent", SENT, ids=["http", "magic", "unknown", "key", "count", "sum", "large"])
def test_what_is_refused(sent: bytes) -> None:
    """What is not torch's protocol, or beyond its bounds, is refused, also if it arrives byte by byte."""
    for step in (1, len(sent)):
        parts = [sent[start : start + step] for start in range(0, len(sent), step)]
        with pytest.raises(StoreRefusal, match=SENT[sent]):
            receive(RankStore(), StoreClient(), parts)


@pytest.mark.parametrize(
    ("requests", "problem"),
    [
        pytest.param([request(1, b"k", bytes(1020)), request(3, b"k")], "an answer of 1028 bytes", id="GET"),
        pytest.param([request(2, b"k", b"", bytes(1020))], "an answer of 1028 bytes", id="COMPARE_SET"),
        pytest.param([request(1, b"k", bytes(600)), *[request(3, b"k")] * 3], "unread answers of 1216", id="unread"),
        pytest.param([request(9, b"k", bytes(400))] * 3, "a value of 1208 bytes", id="APPEND"),
        pytest.param(
            [request(1, b"k", bytes(300)), b"\x0a" + strings([b"k"] * 5)], "an answer of 1500 bytes", id="MULTI_GET"
        ),
        pytest.param(
            [(b"\x0b" + struct.pack("=Q", 8) + strings([b"k", bytes(400)] * 8)[8:])[:1200]],
            "a request of [0-9]+",
            id="MULTI_SET",
        ),
        pytest.param([request(14, b"q", bytes(1020)), request(15, b"q")], "an answer of 1036 bytes", id="QUEUE_POP"),
        pytest.param(
            [*(request(1, b"%0250d" % number, b"") for number in range(4)), b"\x11"],
            "an answer of [0-9]+",
            id="LIST_KEYS",
        ),
    ],
)
def test_answers_have_a_bound(monkeypatch: pytest.MonkeyPatch, requests: list[bytes], problem: str) -> None:
    """No request makes an answer, or a value, larger than the bound; nor do answers that a client does not read."""
    monkeypatch.setattr(launcher_store, "_MAX_WAITING_BYTES", 1024)
    with pytest.raises(StoreRefusal, match=problem):
        receive(RankStore(), StoreClient(), [VALID, *requests])


@pytest.mark.parametrize("code", [b"\x0b", b"\x0a", b"\5", b"\6"], ids=["MULTI_SET", "MULTI_GET", "CHECK", "WAIT"])
def test_many_strings_are_read_once(code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of many strings takes as many steps in many packets as in one."""
    counts: list[int] = []
    number, take = 1000, StoreClient._take

    def counted(reader: StoreClient, size: int) -> bytes:
        counts[-1] += 1
        return take(reader, size)

    monkeypatch.setattr(StoreClient, "_take", counted)
    sent = code + struct.pack("=Q", number) + string(b"k") * (2 * number if code == b"\x0b" else number)
    for size in (len(sent), 100):
        store, client = RankStore(), StoreClient()
        counts.append(0)
        receive(store, client, [VALID, *(sent[start : start + size] for start in range(0, len(sent), size))])
        receive(store, client, [request(1, b"k", b"after"), request(3, b"k")])
        assert client.answers.endswith(string(b"after"))
    assert counts[1] < 2 * counts[0]


def test_a_queue_wakes_a_client_that_can_take_the_value() -> None:
    """A client that waits for another key, too, does not keep the value from one that waits for the queue alone."""
    store, waiting, pushing = RankStore(), [StoreClient(), StoreClient()], StoreClient()
    for client, keys in zip(waiting, ((b"queue", b"missing"), (b"queue",)), strict=True):
        receive(store, client, [VALID, b"\6" + strings(keys)])
    receive(store, pushing, [VALID, request(14, b"queue", b"value")])
    assert [client.answers for client in waiting] == [b"", b"\0"]


def test_all_clients_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, values, queues and unfinished requests have one bound; what was deleted, taken or closed does not count."""
    monkeypatch.setattr(launcher_store, "_MAX_BYTES", 10_000)
    store, client, begun = RankStore(), StoreClient(), StoreClient()
    small, large = bytes(4000), bytes(8000)
    receive(store, client, [VALID, request(1, b"k", small), request(14, b"q", small)])
    for sent in (request(1, b"k", large), request(14, b"q", small), request(1, b"new", small)):
        with pytest.raises(StoreRefusal, match="keys, values and requests"):
            receive(store, StoreClient(), [VALID, sent])
    with pytest.raises(StoreRefusal, match="keys, values and requests"):
        receive(store, begun, [VALID, request(1, b"begun", large)[:7000]])
    store.forget(begun)
    receive(store, client, [request(8, b"k"), request(15, b"q")])
    client.answers.clear()  # they are sent
    store.count(client)
    for number in range(100):  # each value replaces the one before
        receive(store, client, [request(1, b"new", bytes(8000 + number))])


def test_waits_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients together wait for so many keys; a wait that is over, canceled or closed no longer counts."""
    monkeypatch.setattr(launcher_store, "_MAX_AWAITED", 3)
    store, clients = RankStore(), [StoreClient() for _ in range(3)]
    wait = b"\6" + strings([b"a", b"b"])
    receive(store, clients[0], [VALID, wait])
    with pytest.raises(StoreRefusal, match="waits for more than 3 keys"):
        receive(store, clients[1], [VALID, wait])
    for end in (b"\x0c", request(1, b"a", b"") + request(1, b"b", b"")):
        receive(store, clients[0], [end, request(8, b"a"), request(8, b"b"), wait])
    store.forget(clients[0])
    receive(store, clients[2], [VALID, wait])


def test_the_server_closes_what_it_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    """A stranger is disconnected silently; a request of a newer torch is also reported, with what to do."""
    with listen(LOOPBACK, 0) as listening, serving(listening):
        for sent in (b"GET / HTTP/1.1\r\n\r\n", VALID + b"\x63"):
            with socket.create_connection(listening.getsockname(), timeout=120) as stranger:
                stranger.sendall(sent)
                assert stranger.recv(1) == b""
    assert capfd.readouterr().err == (
        "numapin: a program asked the ranks' store for request 99, which this numapin does not know; "
        "hint: let torch serve it: numapin run --rdzv-backend static --rdzv-endpoint localhost:29500\n"
    )


def test_the_server_drops_a_client_that_does_not_read(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is disconnected, with one message for all such clients; the others are served."""
    monkeypatch.setattr(launcher_store, "_MAX_WAITING_BYTES", 1 << 20)
    with listen(LOOPBACK, 0) as listening, serving(listening):
        address = listening.getsockname()
        with socket.create_connection(address, timeout=120) as other:
            other.sendall(VALID + request(1, b"k", bytes(1 << 19)))
            for _ in range(2):
                with socket.create_connection(address) as deaf, pytest.raises(OSError, match=r"reset|[Bb]roken"):
                    deaf.sendall(VALID + request(3, b"k") * 1_000_000)
            other.sendall(b"\7")
            assert other.recv(8) == struct.pack("=q", 1)
    assert re.fullmatch(
        "numapin: the ranks' store closed a connection: unread answers of [0-9]+ bytes\n", capfd.readouterr().err
    )


AS_USER = """
import encodings.idna, os, socket, sys  # what is imported later, another user may not be able to read
os.setgroups([])
os.setuid(int(sys.argv[1]))
with socket.create_connection(("127.0.0.1", int(sys.argv[2]))) as client:
    client.settimeout(120)
    try:
        client.sendall(bytes.fromhex(sys.argv[3]))
        print(len(client.recv(8)))
    except ConnectionError:
        print(0)
"""


@needs_root
def test_other_users_are_refused() -> None:
    """The user of the launcher and root are served; others are disconnected, and the first one is reported."""
    as_user = "import numapin.launcher.store_server, os, encodings.idna; os.setuid(65534)"
    with serving_process(as_user) as (process, port):
        answers = {}
        for user in (65534, 0, 65533, 65532):
            command = [sys.executable, "-I", "-S", "-c", AS_USER, str(user), str(port), (VALID + b"\7").hex()]
            answers[user] = subprocess.run(command, stdout=PIPE, text=True, check=True, cwd="/").stdout.strip()
        _, said = process.communicate()
    assert answers == {65534: "8", 0: "8", 65533: "0", 65532: "0"}
    assert said == (
        "numapin: the ranks' store refused a connection of user 65533; if a rank runs as that user, "
        "hint: let torch serve it: numapin run --rdzv-backend static --rdzv-endpoint localhost:29500\n"
    )


def test_a_closed_connection_has_no_user() -> None:
    """The kernel reports user 0 for a socket that was closed, so only established connections count."""
    peers = LocalPeers()
    with socket.create_server((LOOPBACK, 0)) as server:
        client = socket.create_connection(server.getsockname())
        with closing(server.accept()[0]) as accepted:
            assert peers.user_of(accepted) == os.geteuid()
            client.close()
            assert peers.user_of(accepted) is None
    peers.close()


def test_users_that_the_kernel_does_not_report(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel cannot be asked, all are served, as by torch's store, and a warning says so."""

    def unknown() -> None:
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    monkeypatch.setattr(store_server, "LocalPeers", unknown)
    with (
        listen(LOOPBACK, 0) as listening,
        serving(listening),
        socket.create_connection(listening.getsockname(), timeout=120) as client,
    ):
        client.sendall(VALID + b"\7")
        assert client.recv(8) == bytes(8)
    assert capfd.readouterr().err == (
        "numapin: warning: any local user can connect to the ranks' store, because the kernel reports no users: "
        "[Errno 93] Protocol not supported\n"
    )


def test_the_server_without_descriptors() -> None:
    """New clients wait for a descriptor, without work for the launcher, and the others are served; it says so once."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))"
    with ExitStack() as stack:
        process, port = stack.enter_context(serving_process(few))
        clients = [stack.enter_context(socket.create_connection((LOOPBACK, port), timeout=120)) for _ in range(30)]
        for client in clients:
            client.sendall(VALID + b"\7")
        said = process.stderr.readline()
        used_ticks = proc.stat(proc.folder_of(process.pid)).own_ticks
        time.sleep(0.5)
        assert proc.stat(proc.folder_of(process.pid)).own_ticks - used_ticks < 0.1 * os.sysconf("SC_CLK_TCK")
        assert clients[0].recv(8) == bytes(8)
        clients[0].sendall(b"\7")
        assert clients[0].recv(8) == bytes(8)
        for client in clients[1:]:  # each frees a descriptor for one that waits
            assert client.recv(8) == bytes(8)
            client.close()
        _, rest = process.communicate()
    assert re.fullmatch(
        r"numapin: the ranks' store cannot accept more connections than [0-9]+: Too many open files; "
        r"hint: raise the limit with: ulimit -n\n",
        said + rest,
    )
