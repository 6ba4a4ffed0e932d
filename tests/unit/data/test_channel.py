"""Messages between processes: bounded waits, and whole messages, whatever happens to a writer; tasks with slots."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import select
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
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


def writer(channel: Channel, number: int) -> Channel:
    """Return the end of another writer, in this process."""
    made = Channel.__new__(Channel)
    made.__setstate__((channel._reader, channel._writer))
    made.number = number
    return made


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

    def test_a_message_of_any_size_arrives_whole(self, channel: Channel) -> None:
        """Messages of any size arrive whole, even at the edges of a frame (4088 bytes) and if empty."""
        for size in (0, 1, 4087, 4088, 4089, 8176, 8177, PIPE_BYTES, 200_000):
            channel.send(LARGE[:size])
            assert channel.receive(WAIT_S) == LARGE[:size]

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
        late = threading.Timer(0.1, channel.send, [b"late"])
        late.start()
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


class TestFill:
    """Looking ahead without waiting."""

    def test_it_says_whether_anything_came(self, channel: Channel) -> None:
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

    def test_a_frame_that_came_in_part_is_finished_later(self, channel: Channel) -> None:
        """A read may end in the middle of a header or of a body."""
        sender = Channel()
        sender.send(b"first")
        sender.send(b"second")
        raw = os.read(sender._reader.fileno(), PIPE_BYTES)
        for byte in raw:
            os.write(channel._writer.fileno(), bytes([byte]))
            channel.fill()
        assert list(channel._messages) == [b"first", b"second"]
        sender.close()


class TestSend:
    """Sending never waits."""

    def test_a_full_pipe_does_not_hold_the_sender_up(self, channel: Channel) -> None:
        """Messages that do not fit in the pipe, which nobody reads yet, are sent later, in order, before later ones."""
        messages = [LARGE, b"small", LARGE[::-1], b""]
        for message in messages:
            channel.send(message)
        assert read_all(channel, 4) == messages
        later = [b"%d" % number for number in range(200)]  # straight out, as the backlog is gone
        for message in later:
            channel.send(message)
        assert read_all(channel, 200) == later

    def test_nothing_overtakes_what_waits(self, channel: Channel) -> None:
        """A message queues up behind the backlog, even if the pipe has room again."""
        waiting: list[list[bytes]] = []
        late: Any = SimpleNamespace(
            is_busy=lambda: True, add=lambda frames: waiting.append(list(frames)), discard=lambda: None
        )
        channel._late = late
        channel.send(b"small")
        assert not channel.fill()
        assert [frame[-5:] for frames in waiting for frame in frames] == [b"small"]

    @pytest.mark.parametrize("message", [b"small", LARGE], ids=["small", "large"])
    def test_without_a_reader_messages_are_dropped(self, message: bytes) -> None:
        """A worker whose rank is gone continues to its own end, as with torch's queues."""
        channel = Channel()
        channel.send(LARGE)  # some of it waits in the thread
        channel._reader.close()
        channel.send(message)
        wait_until(lambda: channel._late is None or not channel._late.is_busy(), limit_s=WAIT_S)
        channel.send(message)
        assert channel._late is not None
        assert not channel._late.is_busy()
        channel._writer.close()

    def test_writers_do_not_mix(self, channel: Channel) -> None:
        """Each message is assembled from its own writer's frames, even if frames of others lie between them."""
        one, other = writer(channel, 1), writer(channel, 2)
        threads = [threading.Thread(target=end.send, args=(LARGE[end.number :],)) for end in (one, other)]
        for thread in threads:
            thread.start()
        assert sorted(read_all(channel, 2), key=len) == [LARGE[2:], LARGE[1:]]


def _send_and_leave(channel: Channel) -> None:
    channel.send(LARGE)


def _send_and_sleep(channel: Channel) -> None:
    channel.send(LARGE)
    time.sleep(WAIT_S)


def _cancel_and_leave(channel: Channel) -> None:
    channel.send(LARGE)
    channel.cancel_join_thread()


def _cancel_first(channel: Channel) -> None:
    channel.cancel_join_thread()
    channel.send(LARGE)


class TestProcesses:
    """Starts and ends of processes."""

    def test_a_process_that_ends_sends_all_first(self, channel: Channel) -> None:
        """A process waits at exit until its messages are sent, as multiprocessing's queues do."""
        process = forked(_send_and_leave, channel)
        time.sleep(0.05)
        assert process.is_alive()
        assert channel.receive(WAIT_S) == LARGE
        assert ended(process) == 0

    @pytest.mark.parametrize("work", [_cancel_and_leave, _cancel_first])
    def test_a_process_need_not_wait(self, channel: Channel, work: Callable[[Channel], None]) -> None:
        """After cancel_join_thread, called before or after the message, it ends without a reader."""
        assert ended(forked(work, channel)) == 0

    def test_it_cannot_be_pickled_elsewhere(self, channel: Channel) -> None:
        """A channel can be pickled only for a process that is being started, as multiprocessing's queues."""
        with pytest.raises(RuntimeError, match="inheritance"):
            pickle.dumps(channel)

    def test_a_writer_killed_in_mid_message_harms_no_other(self, channel: Channel) -> None:
        """A killed writer holds no lock; its partial message is dropped, and those of others arrive whole."""
        victim = writer(channel, 1)
        process = forked(_send_and_sleep, victim)
        select.select([channel._reader.fileno()], [], [], WAIT_S)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert ended(process) == -signal.SIGKILL
        for number in (2, 3):
            writer(channel, number).send(b"%d" % number * 30_000)
        assert sorted(read_all(channel, 2)) == [b"2" * 30_000, b"3" * 30_000]
        with pytest.raises(queue.Empty):
            channel.receive(0.05)

    def test_a_closed_channel_leaves_no_descriptor_and_no_thread(self) -> None:
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
