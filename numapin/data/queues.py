"""The two queues of torch's iterator, over pipes without locks.

torch's queues hand every message to a feeder thread and take a lock that all workers share; a worker that is killed
while it holds the lock stops the others. Here a message is cut into frames of at most PIPE_BUF bytes, which the kernel
writes whole or not at all (pipe(7)), each with its writer's number. Nothing is shared but the pipe, and a message of a
few hundred bytes costs one system call on each side. A thread writes what does not fit into the pipe.
"""

from __future__ import annotations

import marshal
import os
import pickle
import queue
import select
import struct
import threading
import time
from collections import deque
from itertools import repeat
from multiprocessing import util
from multiprocessing.connection import Pipe
from multiprocessing.context import assert_spawning
from typing import TYPE_CHECKING, Final

from torch.utils.data import get_worker_info

from numapin.data import packing
from numapin.data.message import NO_GRANT, Grant, Head, Parcel, decode, encode_plain, pickled
from numapin.data.torch_names import ExceptionWrapper, _IterableDatasetStopIteration

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

_HEADER: Final = struct.Struct("<IHH")  # bytes that follow in this frame, writer, whether the message ends with it
_ROOM: Final = select.PIPE_BUF - _HEADER.size
_READ_BYTES: Final = 1 << 16  # the capacity of a pipe
_PAUSE_MS: Final = 100  # between looks at a pipe that has no writer
_ENOUGH: Final = 4  # batches: more than are copied ahead


class Channel:
    """A pipe with any number of writing processes, each with its own number, and one reading process.

    Travels to a child process as the argument of a multiprocessing Process, under every start method.
    """

    def __init__(self) -> None:
        self._reader, self._writer = Pipe(duplex=False)
        for end in (self._reader, self._writer):
            os.set_blocking(end.fileno(), False)
        self._start()

    def __getstate__(self) -> tuple[Connection, Connection]:
        """Return both ends for a process that is being started. Fails otherwise, as multiprocessing's queues do."""
        assert_spawning(self)
        return self._reader, self._writer

    def __setstate__(self, state: tuple[Connection, Connection]) -> None:
        """Take over both ends."""
        self._reader, self._writer = state
        self._start()

    def _start(self) -> None:
        self.number = 0  # the writer's, in this process
        self.is_flushed_at_exit = True
        self._unread = b""
        self._parts: dict[int, list[bytes]] = {}
        self._messages: deque[bytes] = deque()
        self._poll: select.poll | None = None
        self._late: _LateWriter | None = None

    def send(self, message: bytes) -> None:
        """Send a message without waiting. It is dropped if the reader is gone."""
        if len(message) <= _ROOM:  # most messages
            frames = [_HEADER.pack(len(message), self.number, True) + message]
        else:
            frames = _frames(message, self.number)
        if self._late is not None and self._late.frames:  # later ones must queue up behind these
            self._late.add(frames)
            return
        fd = self._writer.fileno()
        sent: list[int] = []
        try:
            sent.extend(map(os.write, repeat(fd), frames))  # in C: Ctrl-C must not come between two frames
        except BrokenPipeError:
            pass
        except BlockingIOError:
            if self._late is None:
                self._late = _LateWriter(fd)
                if self.is_flushed_at_exit:  # as multiprocessing's own queues do
                    util.Finalize(self._late, self._late.drain, exitpriority=-5)
            self._late.add(frames[len(sent) :])

    def receive(self, timeout_s: float | None) -> bytes:
        """Return the next message; wait for at most `timeout_s`, or forever if None. Raises queue.Empty."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._messages:
            if not self.fill():
                self._wait(deadline_s)
        return self._messages.popleft()

    def fill(self) -> bool:
        """Read what is in the pipe now; return whether there was anything."""
        try:
            data = os.read(self._reader.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._take(self._unread + data if self._unread else data)
        return bool(data)

    def _take(self, data: bytes) -> None:
        """Split bytes into frames and join these to messages; keep an incomplete last frame for later."""
        start, end = 0, len(data)
        while end - start >= _HEADER.size:
            size, writer, is_last = _HEADER.unpack_from(data, start)
            stop = start + _HEADER.size + size
            if stop > end:
                break
            part = data[start + _HEADER.size : stop]
            start = stop
            if not is_last:
                self._parts.setdefault(writer, []).append(part)
            elif writer in self._parts:
                self._messages.append(b"".join((*self._parts.pop(writer), part)))
            else:
                self._messages.append(part)
        self._unread = data[start:]

    def _wait(self, deadline_s: float | None) -> None:
        """Wait until there is something to read. Raises queue.Empty after the deadline."""
        left_ms = None if deadline_s is None else 1000 * (deadline_s - time.monotonic())
        if left_ms is not None and left_ms <= 0:
            raise queue.Empty
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._reader.fileno(), select.POLLIN)
        events = self._poll.poll(left_ms)
        has_no_writer = bool(events) and not events[0][1] & select.POLLIN
        if has_no_writer:  # nothing will come, and poll() would return at once
            time.sleep((_PAUSE_MS if left_ms is None else min(_PAUSE_MS, left_ms)) / 1000)

    def cancel_join_thread(self) -> None:
        """Do not wait at exit for the messages that the pipe had no room for."""
        self.is_flushed_at_exit = False
        if self._late is not None:
            self._late.is_abandoned = True

    def close(self) -> None:
        """Close both ends in this process. Messages that the pipe had no room for are lost."""
        if self._late is not None:
            self._late.discard()
        for end in (self._reader, self._writer):
            end.close()


def _frames(message: bytes, writer: int) -> list[bytes]:
    frames = []
    for start in range(0, max(1, len(message)), _ROOM):
        part = message[start : start + _ROOM]
        frames.append(_HEADER.pack(len(part), writer, start + _ROOM >= len(message)) + part)
    return frames


class _LateWriter:
    """A thread that writes the frames that a full pipe did not take, in order. It ends with the process."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)  # the channel may be closed before the thread has noticed
        self.frames: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._is_discarded = False
        self.is_abandoned = False  # exit does not wait for the frames that are left
        threading.Thread(target=self._run, name="numapin-channel", daemon=True).start()

    def add(self, frames: list[bytes]) -> None:
        """Queue the frames of one message."""
        with self._changed:
            self.frames.extend(frames)
            self._changed.notify_all()

    def discard(self) -> None:
        """Drop the frames that wait, and end the thread."""
        with self._changed:
            self._is_discarded = True
            self.frames.clear()
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all frames are written."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_abandoned or not self.frames)

    def _run(self) -> None:
        """Write frames, one whenever the pipe has room. A frame leaves the queue once it is written."""
        writable = select.poll()
        writable.register(self._fd, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.frames or self._is_discarded)
                if self._is_discarded:
                    break
            writable.poll()
            try:
                while self.frames:
                    os.write(self._fd, self.frames[0])
                    with self._changed:
                        if self.frames:
                            self.frames.popleft()
                        self._changed.notify_all()
            except BlockingIOError:
                continue
            except (BrokenPipeError, IndexError):  # the reader is gone; or `discard` came in between
                self.discard()
        os.close(self._fd)


class TaskQueue(Channel):
    """A queue from the rank to one worker: (number, indices) with a slot, and the beginning and end of epochs."""

    def __init__(self, grant: Callable[[], Grant] | None) -> None:
        """Take what chooses a slot for the next task. The worker has no such thing."""
        super().__init__()
        self._grant = grant

    def put(self, task: object) -> None:
        """Send a task; never waits."""
        body = pickled(task)  # first: a task that cannot be sent must not take a slot with it
        grant = NO_GRANT if self._grant is None or not isinstance(task, tuple) else self._grant()
        self.send(marshal.dumps((*grant, body)))

    def get(self, timeout: float | None = None) -> object:
        """Return the next task; raises queue.Empty after `timeout` seconds."""
        *grant, body = marshal.loads(self.receive(timeout))  # noqa: S302 - from our own rank
        if packing.own is not None:
            packing.own.accept(Grant(*grant))
        task: object = pickle.loads(body)  # noqa: S301 - the same
        return task


class ResultQueue(Channel):
    """A queue from the workers to the rank: batches, errors, ends of iterable datasets."""

    _is_workers = False

    def __init__(self, accept: Callable[[Head, bytes], Parcel]) -> None:
        super().__init__()
        self.number = 0xFFFF  # the rank's, as a writer; workers have theirs
        self._accept = accept
        self._results: deque[tuple[object, object]] = deque()
        self._open: Callable[[Parcel], object] | None = None
        self._begin: Callable[[], None] | None = None

    def open_in_thread(self, begin: Callable[[], None], open_parcel: Callable[[Parcel], object]) -> None:
        """Open parcels in the thread that reads them, torch's pin thread, which first calls `begin` once."""
        self._begin, self._open = begin, open_parcel

    def put(self, result: tuple[object, object]) -> None:
        """Send (number, batch) from a worker; never waits. A batch that cannot be pickled is sent as that error."""
        info, (number, data) = get_worker_info(), result
        if info is not None and not self._is_workers:
            self.number, self._is_workers = info.id, True
            self._reader.close()  # so that the death of the reader is noticed
        if info is None or not isinstance(number, int) or isinstance(data, _IterableDatasetStopIteration):
            if packing.own is not None:
                packing.own.finish()  # what was allocated for a batch that does not come
            self.send(encode_plain(result))
        else:
            self.send(packing.pack(number, data, where=f"in DataLoader worker process {info.id}"))

    def get(self, timeout: float | None = None) -> tuple[object, object]:
        """Return the next (number, parcel) or plain message in the rank; raises queue.Empty after `timeout` seconds."""
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()
        while not self._results:
            self._take_in(self.receive(timeout))
        number, data = self._results.popleft()
        if self._open is None or not isinstance(data, Parcel):  # an error, or the end of an iterable dataset
            return number, data
        try:
            return number, self._open(data)
        except Exception:  # noqa: BLE001 - a user's type may raise anything
            return number, ExceptionWrapper(where="in pin memory thread")

    def forget(self) -> list[Head]:
        """Accept no more batches, drop those that were not asked for, and return the heads of those not accepted.

        The dropped ones hold slots, and `accept` may refer to the owner of this queue, which would be a cycle.
        """
        self._results.clear()
        self._accept = _refuse
        while not self._reader.closed and self.fill():
            pass
        heads = [decode(message)[0] for message in self._messages]
        self._messages.clear()
        return [head for head in heads if head is not None]

    def peek(self, number: int | None) -> object:
        """Return the result of this number, or the first one for None, if it was taken in; it stays in the queue."""
        results = self._results.copy()  # torch's pin thread may take in another one meanwhile
        return next((data for own, data in results if number is None or number == own), None)

    def look_ahead(self) -> None:
        """Accept batches that have arrived, so that copies start ahead of time; do nothing while enough wait."""
        if self._open is None and len(self._results) < _ENOUGH:
            self.fill()
            while self._messages:
                self._take_in(self._messages.popleft())

    def _take_in(self, message: bytes) -> None:
        head, body = decode(message)
        if head is not None:
            try:
                self._results.append((head.number, self._accept(head, body)))
            except BaseException as error:  # torch raises it when the batch is due: no other batch is lost
                self._results.append((head.number, ExceptionWrapper(where="while a batch was taken in")))
                if not isinstance(error, Exception):  # Ctrl-C
                    raise
        else:
            self._results.append(body)


def _refuse(_head: Head, _body: bytes) -> Parcel:
    message = "the iterator has ended"
    raise RuntimeError(message)
