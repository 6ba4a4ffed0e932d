"""Stage 3: the ranks' store, as torch's TCPStore clients use it.

Numbers have this machine's byte order. A string is its length (8 bytes) and its bytes. A client begins with VALIDATE;
all other requests may follow.

The same requests, in the same order, are in torch's torch/csrc/distributed/c10d/TCPStoreBackend.hpp; their answers are
in TCPStoreLibUvBackend.cpp. A later torch may add some at the end.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAGIC: Final = 0x3C85F7CE  # the number that VALIDATE brings
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"
# torch's own bounds.
_MAX_KEY_BYTES: Final = 8 << 10
_MAX_VALUE_BYTES: Final = 8 << 20
_MAX_KEYS: Final = 128 << 10
# Bounds of our own. torch's client reads each answer before it asks again, so the first is for one answer of many
# values. The others are for all clients: torch keeps addresses and ids there, some kilobytes for each rank, and a rank
# waits for a few keys, at most one for each other rank.
_MAX_WAITING_BYTES: Final = 256 << 20
_MAX_BYTES: Final = 1 << 30
_MAX_AWAITED: Final = 128 << 10
_ENTRY_BYTES: Final = 128  # of Python's objects for a key or a value
_LENGTH_BYTES: Final = 8
_LEADING_NUMBER: Final = re.compile(rb"\s*[+-]?\d+")


class StoreRefusal(Exception):  # noqa: N818 - the refusal of a request, after which the connection is closed
    """A request that cannot be answered. `is_unknown`: it is valid, but of a torch that is newer than this module."""

    def __init__(self, problem: str, *, is_unknown: bool = False) -> None:
        super().__init__(problem)
        self.is_unknown = is_unknown


class _Incomplete(Exception):  # noqa: N818 - not an error: the rest of the request has not arrived
    """The request has at least this many bytes."""


class StoreClient:
    """A connection: what arrived and is not yet understood, and the answers that are not yet sent.

    Its methods read the parts of a request. They raise _Incomplete where it ends early, StoreRefusal above the bounds.
    """

    def __init__(self) -> None:
        self.received = bytearray()
        self.position = 0  # end of what has been read of the request
        self.needed = 1  # bytes that must be there before the request is read again
        self.strings_read: list[bytes] = []  # the strings of an incomplete request that have been read
        self.strings_end = 0  # where they end in `received`
        self.answers = bytearray()
        self.is_valid = False
        self.awaited: set[bytes] = set()
        self.num_counted = 0  # bytes of this client in the store's sum

    def number(self, form: str) -> int:
        """Return a number of this `struct` format."""
        (number,) = struct.unpack(f"={form}", self._take(struct.calcsize(f"={form}")))
        return int(number)

    def key(self) -> bytes:
        """Return a key."""
        return self._string(_MAX_KEY_BYTES)

    def value(self) -> bytes:
        """Return a value."""
        return self._string(_MAX_VALUE_BYTES)

    def strings(self, *most: int) -> list[bytes]:
        """Return the strings of a request that has nothing else; string i has at most `most[i % len(most)]` bytes.

        If it ends early, those that are there are kept: reading 128,000 of them again with each packet takes minutes.
        """
        number = self.number("Q")
        if number > _MAX_KEYS:
            raise StoreRefusal(f"a request for {number} keys")
        found = self.strings_read
        self.position = self.strings_end or self.position
        while len(found) < number * len(most):
            found.append(self._string(most[len(found) % len(most)]))
            self.strings_end = self.position
        return found

    def _string(self, most: int) -> bytes:
        size = self.number("Q")
        if size > most:
            raise StoreRefusal(f"a key or value of {size} bytes")
        return self._take(size)

    def _take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.received):
            raise _Incomplete(end)
        part = bytes(self.received[self.position : end])
        self.position = end
        return part


class RankStore:
    """The keys, values and queues of a job, and the clients that wait for them."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, list[StoreClient]] = {}
        self._num_awaited = 0
        self._num_bytes = 0
        self._answered: list[StoreClient] = []
        self._methods: tuple[Callable[[StoreClient], None], ...] = (  # by their numbers, from 1 on
            *(self._set, self._compare_set, self._get, self._add, self._check, self._wait, self._num_keys),
            *(self._delete, self._append, self._multi_get, self._multi_set, self._cancel_wait, self._ping),
            *(self._queue_push, self._queue_pop, self._queue_length, self._list_keys, self._barrier),
        )

    def receive(self, client: StoreClient) -> None:
        """Carry out the requests in `client.received`. Raises StoreRefusal if its connection must be closed."""
        while len(client.received) >= client.needed:
            _require_bound(len(client.answers), "unread answers")
            client.position = 0
            try:
                self._carry_out(client)
            except _Incomplete as incomplete:
                (client.needed,) = incomplete.args
                _require_bound(client.needed, "a request")
            else:
                del client.received[: client.position]
                client.needed, client.strings_read, client.strings_end = 1, [], 0
        self.count(client)
        _require_bound(self._num_bytes, "keys, values and requests", _MAX_BYTES)

    def count(self, client: StoreClient) -> None:
        """Count what has arrived from a client and what it has not read."""
        num_bytes = len(client.received) + len(client.answers)
        self._num_bytes += num_bytes - client.num_counted
        client.num_counted = num_bytes

    def take_answered(self) -> list[StoreClient]:
        """Return the clients that have got answers since the last call."""
        answered, self._answered = self._answered, []
        return answered

    def forget(self, client: StoreClient) -> None:
        """Forget what a client waits for, and its bytes until they are counted again."""
        self._num_bytes -= client.num_counted
        client.num_counted = 0
        for key in client.awaited:
            self._waiting[key].remove(client)
            if not self._waiting[key]:
                del self._waiting[key]
        self._num_awaited -= len(client.awaited)
        client.awaited.clear()

    def _carry_out(self, client: StoreClient) -> None:
        code = client.number("B")
        if client.is_valid:
            if not 0 < code <= len(self._methods):
                raise StoreRefusal(f"request {code}, which this numapin does not know", is_unknown=True)
            self._methods[code - 1](client)
        elif code == 0 and client.number("I") == MAGIC:
            client.is_valid = True
        else:
            raise StoreRefusal("not a client of torch's store")

    def _answer(self, client: StoreClient, answer: bytes) -> None:
        """Add an answer. Raises StoreRefusal if it is too large."""
        _require_bound(len(answer), "an answer")
        client.answers += answer
        self._answered.append(client)

    def _set(self, client: StoreClient) -> None:
        key, value = client.key(), client.value()
        self._store(key, value)

    def _compare_set(self, client: StoreClient) -> None:
        """Answer with the value that the key has then, and with the expected one if there is no such key.

        As in torch's server, clients that wait for the key continue in any case.
        """
        key, expected, desired = client.key(), client.value(), client.value()
        current = self._values.get(key, b"")
        if current == expected:
            self._put(key, desired)
        self._wake(key)
        self._answer(client, _string(self._values.get(key, expected)))

    def _get(self, client: StoreClient) -> None:
        key = client.key()
        self._answer(client, _string(self._values.get(key, b"")))

    def _add(self, client: StoreClient) -> None:
        key, amount = client.key(), client.number("q")
        total = _number(self._values.get(key, b"0")) + amount
        answer = _signed(total)
        self._store(key, b"%d" % total)
        self._answer(client, answer)

    def _check(self, client: StoreClient) -> None:
        keys = client.strings(_MAX_KEY_BYTES)
        self._answer(client, _READY if all(map(self._has, keys)) else _NOT_READY)

    def _wait(self, client: StoreClient) -> None:
        missing = [key for key in client.strings(_MAX_KEY_BYTES) if not self._has(key)]
        if missing:
            self._await(client, missing)
        else:
            self._answer(client, _STOP_WAITING)

    def _num_keys(self, client: StoreClient) -> None:
        self._answer(client, _signed(len(self._values)))

    def _delete(self, client: StoreClient) -> None:
        key = client.key()
        value = self._values.pop(key, None)
        if value is not None:
            self._num_bytes -= _size(key) + _size(value)
        self._answer(client, _signed(int(value is not None)))

    def _append(self, client: StoreClient) -> None:
        key, value = client.key(), client.value()
        before = self._values.get(key, b"")
        _require_bound(_LENGTH_BYTES + len(before) + len(value), "a value")  # else it could not be an answer
        self._store(key, before + value)

    def _multi_get(self, client: StoreClient) -> None:
        values = [self._values.get(key, b"") for key in client.strings(_MAX_KEY_BYTES)]
        _require_bound(sum(map(len, values)), "an answer")
        self._answer(client, b"".join(map(_string, values)))

    def _multi_set(self, client: StoreClient) -> None:
        strings = client.strings(_MAX_KEY_BYTES, _MAX_VALUE_BYTES)
        for key, value in zip(strings[::2], strings[1::2], strict=True):
            self._store(key, value)

    def _cancel_wait(self, client: StoreClient) -> None:
        self.forget(client)
        self._answer(client, _WAIT_CANCELED)

    def _ping(self, client: StoreClient) -> None:
        self._answer(client, struct.pack("=I", client.number("I")))

    def _queue_push(self, client: StoreClient) -> None:
        """Add to a queue; one of the clients that wait for it may continue, because only one can take the value."""
        key, value = client.key(), client.value()
        self._reserve(_size(value) + (0 if key in self._queues else _size(key)))
        self._queues.setdefault(key, deque()).append(value)
        for waiting in list(self._waiting.get(key, [])):
            self._let_continue(waiting, key)
            if not waiting.awaited:
                break

    def _queue_pop(self, client: StoreClient) -> None:
        """Answer with the number of values, and the first of them."""
        key = client.key()
        queue = self._queues.get(key, deque())
        first = _string(queue[0]) if queue else b""
        self._answer(client, _signed(len(queue)) + first)
        if queue:
            self._num_bytes -= _size(queue.popleft())

    def _queue_length(self, client: StoreClient) -> None:
        self._answer(client, _signed(len(self._queues.get(client.key(), ()))))

    def _list_keys(self, client: StoreClient) -> None:
        _require_bound(sum(map(len, self._values)), "an answer")
        self._answer(client, _signed(len(self._values)) + b"".join(map(_string, self._values)))

    def _barrier(self, client: StoreClient) -> None:
        """Count arrivals in the key's value; the last one lets all continue."""
        key, expected = client.key(), client.number("q")
        arrived = _number(self._values.get(key, b"0")) + 1
        self._put(key, b"%d" % arrived)
        if arrived < expected:
            self._await(client, [key])
        else:
            self._wake(key)
            self._answer(client, _STOP_WAITING)

    def _has(self, key: bytes) -> bool:
        return key in self._values or bool(self._queues.get(key))

    def _store(self, key: bytes, value: bytes) -> None:
        self._put(key, value)
        self._wake(key)

    def _put(self, key: bytes, value: bytes) -> None:
        former = self._values.get(key)
        self._reserve(_size(value) + (_size(key) if former is None else -_size(former)))
        self._values[key] = value

    def _reserve(self, num_bytes: int) -> None:
        """Count what is about to be kept. Raises StoreRefusal if that is too much."""
        _require_bound(self._num_bytes + num_bytes, "keys, values and requests", _MAX_BYTES)
        self._num_bytes += num_bytes

    def _await(self, client: StoreClient, keys: Iterable[bytes]) -> None:
        missing = set(keys) - client.awaited
        if self._num_awaited + len(missing) > _MAX_AWAITED:
            raise StoreRefusal(f"waits for more than {_MAX_AWAITED} keys")
        self._num_awaited += len(missing)
        for key in missing:
            client.awaited.add(key)
            self._waiting.setdefault(key, []).append(client)

    def _wake(self, key: bytes) -> None:
        for client in list(self._waiting.get(key, [])):
            self._let_continue(client, key)

    def _let_continue(self, client: StoreClient, key: bytes) -> None:
        """Note that a key is there; the client continues if it waits for no other."""
        client.awaited.remove(key)
        self._num_awaited -= 1
        self._waiting[key].remove(client)
        if not self._waiting[key]:
            del self._waiting[key]
        if not client.awaited:
            self._answer(client, _STOP_WAITING)


def _string(content: bytes) -> bytes:
    return struct.pack("=Q", len(content)) + content


def _signed(number: int) -> bytes:
    try:
        return struct.pack("=q", number)
    except struct.error:
        raise StoreRefusal(f"a sum of {number}") from None


def _size(content: bytes) -> int:
    return len(content) + _ENTRY_BYTES


def _require_bound(size: int, what: str, most: int | None = None) -> None:
    """Raise StoreRefusal if a client would take too much of the launcher's memory."""
    if size > (_MAX_WAITING_BYTES if most is None else most):
        raise StoreRefusal(f"{what} of {size} bytes")


def _number(content: bytes) -> int:
    """Return the number that a value begins with, as in C. Raises StoreRefusal."""
    found = _LEADING_NUMBER.match(content)
    if found is None:
        raise StoreRefusal("a sum with a value that is not a number")
    try:
        number = int(found[0])
    except ValueError:  # Python reads at most 4,300 digits
        number = 1 << 64
    if not -(1 << 63) <= number < 1 << 63:
        raise StoreRefusal("a sum with a value of more than 64 bits")
    return number
