"""Messages between the rank and its workers: many writers, one reader, one pipe, no lock. Edge.

Comes in: bytes. Goes out: the same bytes in the reading process, whole and in order per writer.

torch's queues hand every message to a feeder thread and take a lock that all workers share; a worker that is killed
while it holds the lock stops the others. Here a message is cut into frames of at most PIPE_BUF bytes, which the kernel
writes whole or not at all (pipe(7)), each with its writer's number. Nothing is shared but the pipe, and a message of a
few hundred bytes costs one system call on each side. A thread writes what does not fit into the pipe.
"""

from __future__ import annotations

import os
import queue
import select
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing import util
from multiprocessing.connection import Pipe
from multiprocessing.context import assert_spawning
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

_HEADER: Final = struct.Struct("<IHH")  # bytes that follow in this frame, writer, whether the message ends with it
_ROOM: Final = select.PIPE_BUF - _HEADER.size
_READ_BYTES: Final = 1 << 16  # the capacity of a pipe
_PAUSE_MS: Final = 100  # between looks at a pipe that has no writer


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
        self.has_waited = False  # in this process, for the last message

    def send(self, message: bytes) -> None:
        """Send a message without waiting. It is dropped if the reader is gone."""
        frames = _frames(message, self.number)
        if self._late is not None and self._late.is_busy():
            self._late.add(frames)
            return
        fd = self._writer.fileno()
        with suppress(BrokenPipeError):
            for frame in frames:
                try:
                    os.write(fd, frame)
                except BlockingIOError:
                    self._leave_to_thread(frame, frames)
                    return

    def _leave_to_thread(self, first: bytes, rest: Iterator[bytes]) -> None:
        if self._late is None:
            self._late = _LateWriter(self._writer.fileno())
            if self.is_flushed_at_exit:
                util.Finalize(self._late, self._late.drain, exitpriority=-5)  # as multiprocessing's own queues do
        self._late.add(iter((first, *rest)))

    def receive(self, timeout_s: float | None) -> bytes:
        """Return the next message; wait for at most `timeout_s`, or forever if None. Raises queue.Empty."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.has_waited = False
        while not self._messages:
            if not self.fill():
                self.has_waited = True
                self._wait(deadline_s)
        return self._messages.popleft()

    def fill(self) -> bool:
        """Read what is in the pipe now; return whether there was anything."""
        try:
            chunk = os.read(self._reader.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            self._take(self._unread + chunk if self._unread else chunk)
        return bool(chunk)

    def arrived(self) -> Iterator[bytes]:
        """Yield and remove the messages that were read."""
        while self._messages:
            yield self._messages.popleft()

    def _take(self, data: bytes) -> None:
        """Split bytes into frames; keep an incomplete last one for later."""
        start, end = 0, len(data)
        while end - start >= _HEADER.size:
            size, writer, is_last = _HEADER.unpack_from(data, start)
            stop = start + _HEADER.size + size
            if stop > end:
                break
            self._add_part(data[start + _HEADER.size : stop], writer, is_last=is_last)
            start = stop
        self._unread = data[start:]

    def _add_part(self, part: bytes, writer: int, *, is_last: bool) -> None:
        if not is_last:
            self._parts.setdefault(writer, []).append(part)
        elif writer in self._parts:
            self._messages.append(b"".join((*self._parts.pop(writer), part)))
        else:
            self._messages.append(part)

    def _wait(self, deadline_s: float | None) -> None:
        """Wait until there is something to read. Raises queue.Empty after the deadline."""
        left_ms = None if deadline_s is None else 1000 * (deadline_s - time.monotonic())
        if left_ms is not None and left_ms <= 0:
            raise queue.Empty
        events = self._poller().poll(left_ms)
        has_no_writer = bool(events) and not events[0][1] & select.POLLIN
        if has_no_writer:  # nothing will come, and poll() would return at once
            time.sleep((_PAUSE_MS if left_ms is None else min(_PAUSE_MS, left_ms)) / 1000)

    def _poller(self) -> select.poll:
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._reader.fileno(), select.POLLIN)
        return self._poll

    def stop_reading(self) -> None:
        """Close the reading end in a process that only writes, so that the death of the reader is noticed."""
        self._reader.close()

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


def _frames(message: bytes, writer: int) -> Iterator[bytes]:
    """Yield the frames of a message."""
    for start in range(0, len(message) or 1, _ROOM):
        part = message[start : start + _ROOM]
        yield _HEADER.pack(len(part), writer, start + _ROOM >= len(message)) + part


class _LateWriter:
    """A thread that writes the frames that a full pipe did not take, in order. It ends with the process."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)  # the channel may be closed before the thread has noticed
        self._frames: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._is_discarded = False
        self.is_abandoned = False  # exit does not wait for the frames that are left
        threading.Thread(target=self._run, name="numapin-channel", daemon=True).start()

    def is_busy(self) -> bool:
        """Return whether frames wait, so that later ones must queue up behind them."""
        return bool(self._frames)

    def add(self, frames: Iterator[bytes]) -> None:
        """Queue the frames of one message."""
        with self._changed:
            self._frames.extend(frames)
            self._changed.notify_all()

    def discard(self) -> None:
        """Drop the frames that wait, and end the thread."""
        with self._changed:
            self._is_discarded = True
            self._frames.clear()
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all frames are written."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_abandoned or not self._frames)

    def _run(self) -> None:
        writable = select.poll()
        writable.register(self._fd, select.POLLOUT)
        while self._has_frames():
            writable.poll()
            self._write()
        os.close(self._fd)

    def _has_frames(self) -> bool:
        """Wait for frames; return False when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._is_discarded)
            return not self._is_discarded

    def _write(self) -> None:
        """Write frames until the pipe is full. A frame leaves the queue once it is written."""
        try:
            while self._frames:
                os.write(self._fd, self._frames[0])
                with self._changed:
                    if self._frames:
                        self._frames.popleft()
                    self._changed.notify_all()
        except BlockingIOError:
            return
        except (BrokenPipeError, IndexError):
            self.discard()
