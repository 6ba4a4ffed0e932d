"""Messages between processes: bounded waits, and whole messages, whatever happens to a writer; tasks with slots."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.unit.data.seam import NO_GRANT, Channel, Grant, ResultQueue, TaskQueue, message_encode, packing
from tests.unit.data.test_packing import HEAD
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

WAIT_S: Final = 120
PIPE_BYTES: Final = 1 << 16
LARGE: Final = bytes(range(256)) * 4096  # 1 MiB: 16 times what a pipe holds


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Give a channel, closed after the test."""
    made = Channel()
    yield made
    made.close()


def forked(work: Callable[[Channel], None], channel: Channel) -> BaseProcess:
    """Start a process that writes to the channel and exits as a worker does, through multiprocessing."""
    process = multiprocessing.get_context("fork").Process(target=work, args=(channel,), daemon=True)
    process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    """Wait for a process and return its exit code."""
    process.join(WAIT_S)
    return process.exitcode


def read_all(channel: Channel, num_messages: int) -> list[bytes]:
    """Return the next messages."""
    return [channel.receive(WAIT_S) for _ in range(num_messages)]


def what_is_open() -> tuple[int, int]:
    """Return the number of descriptors and of threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


class TestReceive:
    """Waiting for a message."""

    def test_without_a_message_it_is_empty_in_time(self, channel: Channel) -> None:
        """It raises queue.Empty, as multiprocessing's queues do, and not too early; what is there needs no time."""
        for timeout_s in (0, 0.05):
            began_s = time.monotonic()
            with pytest.raises(queue.Empty):
                channel.receive(timeout_s)
            assert time.monotonic() - began_s >= timeout_s
        channel.send(b"here")
        assert channel.receive(0) == b"here"

    def test_half_a_message_is_none(self, channel: Channel) -> None:
        """A large message that has arrived in part does not extend the wait."""
        channel.send(LARGE)
        channel._late.discard()  # type: ignore[union-attr] # what did not fit never comes
        with pytest.raises(queue.Empty):
            channel.receive(0.05)

    def test_it_wakes_up_for_a_late_message(self, channel: Channel) -> None:
        """Without a timeout it waits for a message."""
        threading.Timer(0.1, channel.send, [b"late"]).start()
        assert channel.receive(None) == b"late"

    def test_it_waits_on_where_no_writer_is_left(self) -> None:
        """If the last writer ends, the timeout still holds, and the wait does not spin."""
        channel = Channel()
        channel._writer.close()
        began_s, began_cpu_s = time.monotonic(), time.thread_time()
        with pytest.raises(queue.Empty):
            channel.receive(0.25)
        assert time.monotonic() - began_s >= 0.25
        assert time.thread_time() - began_cpu_s < 0.1
        channel.close()


def test_it_says_whether_anything_came(channel: Channel) -> None:
    """Messages are received once, in order, however they are read; sending small ones costs no thread."""
    assert not channel.fill()
    channel.send(b"one")
    channel.send(b"two")
    assert channel._late is None
    assert channel.fill()
    assert not channel.fill()
    channel.send(b"three")
    assert read_all(channel, 3) == [b"one", b"two", b"three"]
    assert not channel.fill()


def test_without_a_reader_messages_are_dropped() -> None:
    """A worker whose rank is gone continues to its own end, as with torch's queues."""
    channel = Channel()
    channel.send(LARGE)  # some of it waits in the thread
    channel._reader.close()
    channel.send(b"small")
    late = channel._late
    assert late is not None
    assert wait_until(lambda: not late.frames, limit_s=WAIT_S)
    channel.send(LARGE)
    assert not late.frames
    channel._writer.close()


def _send_and_leave(channel: Channel) -> None:
    channel.send(LARGE)


def _cancel_and_leave(channel: Channel) -> None:
    channel.send(LARGE)
    channel.cancel_join_thread()


def _cancel_first(channel: Channel) -> None:
    channel.cancel_join_thread()
    channel.send(LARGE)


def test_a_process_that_ends_sends_all_first(channel: Channel) -> None:
    """A process waits at exit until its messages are sent, as multiprocessing's queues do."""
    process = forked(_send_and_leave, channel)
    time.sleep(0.05)
    assert process.is_alive()
    assert channel.receive(WAIT_S) == LARGE
    assert ended(process) == 0


@pytest.mark.parametrize("work", [_cancel_and_leave, _cancel_first])
def test_a_process_need_not_wait(channel: Channel, work: Callable[[Channel], None]) -> None:
    """After cancel_join_thread, called before or after the message, it ends without a reader."""
    assert ended(forked(work, channel)) == 0
    # It is for a process that is being started only, as multiprocessing's queues.
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(channel)


def test_a_closed_channel_leaves_no_descriptor_and_no_thread() -> None:
    """A hundred iterators that were left with full pipes leave no thread and no descriptor."""
    before = what_is_open()
    for _ in range(100):
        channel = Channel()
        channel.send(LARGE[: 2 * PIPE_BYTES])
        channel.close()
    assert wait_until(lambda: what_is_open() <= before, limit_s=WAIT_S), what_is_open()


GRANT = Grant(7, expected_bytes=4096, forgotten=(3,))


class Worker:
    """A packer that notes what came with its tasks."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []

    def accept(self, grant: Grant) -> None:
        """Note a grant."""
        self.grants.append(grant)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Make this process a worker."""
    made = Worker()
    monkeypatch.setattr(packing, "own", made)
    return made


def test_a_task_brings_a_slot(worker: Worker) -> None:
    """The worker accepts it when it reads the task."""
    with closing(TaskQueue(lambda: GRANT)) as queue:
        queue.put((5, [1, 2, 3]))
        assert queue.get(1) == (5, [1, 2, 3])
    assert worker.grants == [GRANT]


def test_what_is_no_task_brings_none(worker: Worker) -> None:
    """The beginning and the end of an epoch are messages, too; without a pool there are no slots."""
    with closing(TaskQueue(lambda: GRANT)) as queue, closing(TaskQueue(None)) as without:
        queue.put(None)
        without.put((1, [2]))
        assert (queue.get(1), without.get(1)) == (None, (1, [2]))
    assert worker.grants == [NO_GRANT, NO_GRANT]


def test_a_task_that_cannot_be_sent_takes_no_slot() -> None:
    """A sampler may yield anything: the error is pickle's, and the slot stays free for the next task."""
    granted: list[Any] = []

    def grant() -> Grant:
        granted.append(NO_GRANT)
        return NO_GRANT

    with closing(TaskQueue(grant)) as queue:
        with pytest.raises(TypeError, match="cannot pickle"):
            queue.put((5, [(number for number in range(3))]))
        assert not granted
        queue.put((5, [1]))
        assert len(granted) == 1


def test_ctrl_c_while_a_batch_is_taken_in() -> None:
    """It is raised at once. A loop that goes on gets an error for this batch, and does not wait for it."""

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    with closing(ResultQueue(interrupt)) as results:
        results.send(message_encode(HEAD, b""))
        with pytest.raises(KeyboardInterrupt):
            results.get(WAIT_S)
        number, error = results.get(0)
    assert (number, type(error).__name__) == (HEAD.number, "ExceptionWrapper")
