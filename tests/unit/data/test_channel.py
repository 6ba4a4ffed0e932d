"""Messages between processes: bounded waits, and whole messages; tasks with slots, and descriptors."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from tests.contract.datasets import Raise
from tests.data.loopback import interrupted
from tests.unit.data import seam
from tests.unit.data.seam import message_encode, packing
from tests.unit.data.test_packing import HEAD
from tests.waiting import wait_until

WAIT_S: Final = 120
PIPE_BYTES: Final = 1 << 16
LARGE: Final = bytes(range(256)) * 4096  # 1 MiB: 16 times what a pipe holds


@pytest.fixture
def channel() -> Iterator[seam.Channel]:
    made = seam.Channel()
    yield made
    made.close()


def forked(work: Callable[[seam.Channel], object], channel: seam.Channel) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=work, args=(channel,), daemon=True)
    process.start()
    return process


def ended(process: BaseProcess) -> int | None:
    process.join(WAIT_S)
    return process.exitcode


def what_is_open() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


class TestReceive:
    def test_without_a_message_it_is_empty_in_time(self, channel: seam.Channel) -> None:
        """It raises queue.Empty, as multiprocessing's queues do, and not too early; half a message is none."""
        for timeout_s in (0, 0.05):
            began_s = time.monotonic()
            with pytest.raises(queue.Empty):
                channel.receive(timeout_s)
            assert time.monotonic() - began_s >= timeout_s
        channel.send(b"here")
        assert channel.receive(0) == b"here"
        channel.send(LARGE)
        channel._late.discard()  # type: ignore[union-attr] # what did not fit never comes
        with pytest.raises(queue.Empty):
            channel.receive(0.05)

    def test_it_waits_on_where_no_writer_is_left(self) -> None:
        """If the last writer ends, the timeout still holds, and the wait does not spin."""
        channel = seam.Channel()
        channel._writer.close()
        began_s, began_cpu_s = time.monotonic(), time.thread_time()
        with pytest.raises(queue.Empty):
            channel.receive(0.25)
        assert time.monotonic() - began_s >= 0.25
        assert time.thread_time() - began_cpu_s < 0.1
        channel.close()


def test_without_a_reader_messages_are_dropped() -> None:
    """A worker whose rank is gone continues to its own end, as with torch's queues."""
    channel = seam.Channel()
    channel.send(LARGE)  # some of it waits in the thread
    channel._reader.close()
    channel.send(b"small")
    late = channel._late
    assert late is not None
    assert wait_until(lambda: not late.frames, limit_s=WAIT_S)
    channel.send(LARGE)
    assert not late.frames
    channel._writer.close()


def test_a_process_that_ends_sends_all_first(channel: seam.Channel) -> None:
    """A process waits at exit until its messages are sent, as multiprocessing's queues do."""
    process = forked(lambda channel: channel.send(LARGE), channel)
    time.sleep(0.05)
    assert process.is_alive()
    assert channel.receive(WAIT_S) == LARGE
    assert ended(process) == 0


@pytest.mark.parametrize(
    "work",
    [
        lambda channel: (channel.send(LARGE), channel.cancel_join_thread()),
        lambda channel: (channel.cancel_join_thread(), channel.send(LARGE)),
    ],
)
def test_a_process_need_not_wait(channel: seam.Channel, work: Callable[[seam.Channel], object]) -> None:
    """After cancel_join_thread, called before or after the message, it ends without a reader."""
    assert ended(forked(work, channel)) == 0
    # It is for a process that is being started only, as multiprocessing's queues.
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(channel)


def test_a_closed_channel_leaves_no_descriptor_and_no_thread() -> None:
    """A hundred iterators that were left with full pipes leave no thread and no descriptor."""
    before = what_is_open()
    for _ in range(100):
        channel = seam.Channel()
        channel.send(LARGE[: 2 * PIPE_BYTES])
        channel.close()
    assert wait_until(lambda: what_is_open() <= before, limit_s=WAIT_S), what_is_open()


def test_ctrl_c_while_a_message_is_sent(channel: seam.Channel) -> None:
    """The reader gets a message of several frames whole or not at all, and the next one all the same."""
    long, is_sent, num_passed = LARGE[:10_000], False, 0
    while not is_sent:
        try:
            with interrupted(num_passed, seam.queues.__file__):
                channel.send(long)
            is_sent = True
        except KeyboardInterrupt:
            num_passed += 1
        channel.send(b"next")
        received = [channel.receive(WAIT_S)]
        while received[-1] != b"next":
            received.append(channel.receive(WAIT_S))
        assert received in ([b"next"], [long, b"next"])
    assert num_passed > 3


def test_a_look_while_another_thread_takes_a_result_in() -> None:
    """The loop looks for the next batch beside torch's pin thread."""
    with closing(seam.ResultQueue(Raise(AssertionError))) as results:

        class Other(int):
            def __eq__(self, _number: object) -> bool:
                results._results.append((2, "two"))
                return False

            __hash__ = int.__hash__

        results._results.append((1, "one"))
        assert results.peek(Other(0)) is None
        assert (results.peek(2), results.peek(None)) == ("two", "one")


GRANT = seam.Grant(7, expected_bytes=4096, forgotten=(3,))


def test_a_task_brings_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker accepts it as it reads the task; the end of an epoch brings none, nor does a task without a pool."""
    grants: list[seam.Grant] = []
    monkeypatch.setattr(packing, "own", SimpleNamespace(accept=grants.append))
    with closing(seam.TaskQueue(lambda: GRANT)) as queue, closing(seam.TaskQueue(None)) as without:
        queue.put((5, [1, 2, 3]))
        queue.put(None)
        without.put((1, [2]))
        assert (queue.get(1), queue.get(1), without.get(1)) == ((5, [1, 2, 3]), None, (1, [2]))
    assert grants == [GRANT, seam.NO_GRANT, seam.NO_GRANT]


def test_a_task_that_cannot_be_sent_takes_no_slot() -> None:
    """A sampler may yield anything: the error is pickle's, and the slot stays free for the next task."""
    grants = [seam.NO_GRANT]
    with closing(seam.TaskQueue(grants.pop)) as queue:
        with pytest.raises(TypeError, match="cannot pickle"):
            queue.put((5, [(number for number in range(3))]))
        assert grants
        queue.put((5, [1]))
        assert not grants


def test_ctrl_c_while_a_batch_is_taken_in() -> None:
    """It is raised at once. A loop that goes on gets an error for this batch, and does not wait for it."""
    with closing(seam.ResultQueue(Raise(KeyboardInterrupt))) as results:
        results.send(message_encode(HEAD, b""))
        with pytest.raises(KeyboardInterrupt):
            results.get(WAIT_S)
        number, error = results.get(0)
    assert (number, type(error).__name__) == (HEAD.number, "ExceptionWrapper")


@pytest.fixture
def handover() -> Iterator[seam.Handover]:
    made = seam.Handover()
    yield made
    made.close()


def send(handover: seam.Handover, number: int, text: bytes) -> None:
    fd = os.memfd_create("a test")
    try:
        os.write(fd, text)
        handover.send(number, fd)
    finally:
        os.close(fd)


def received(handover: seam.Handover, number: int) -> bytes:
    fd = handover.take(number)
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def test_each_is_found_by_its_number(handover: seam.Handover) -> None:
    """Workers share the socket, so descriptors may arrive in another order than they are taken.

    A program that os.system starts does not inherit them: it would keep the memory of a slot that was dropped.
    """
    numbers = [1, 5 << 32, (5 << 32) + 1, (1 << 62)]
    for number in numbers:
        send(handover, number, b"%d" % number)
    for number in (numbers[2], numbers[0], numbers[3], numbers[1]):
        assert received(handover, number) == b"%d" % number
    assert not handover._early
    with pytest.raises(BlockingIOError):
        handover.take(1)  # the reader never waits: a descriptor is sent before the message that mentions it
    send(handover, 1, b"a")
    fd = handover.take(1)
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize("end", ["_sender", "_reader"])
def test_another_end_that_is_gone_is_an_error(end: str) -> None:
    """A worker must not wait for a rank that has ended, nor a signal kill the one that sends."""
    handover = seam.Handover()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, getattr(handover, end).fileno())  # the number stays taken
    os.close(null)
    with pytest.raises(BrokenPipeError):
        handover.take(1) if end == "_sender" else handover.send(1, 0)
    handover.close()


def answer(outbox: seam.Channel, handover: seam.Handover, slots: seam.HandedDown) -> None:
    mapped = slots.map()
    fd = os.memfd_create("a test")
    os.write(fd, b"from a child")
    handover.send(7, fd)
    outbox.send(b"".join(bytes(memory.tolist()) for memory, _populated in mapped.values()))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_slots_that_a_worker_takes_over(channel: seam.Channel, handover: seam.Handover, method: str) -> None:
    """Forked or not, it has those mapped that can be mapped, and its way to send others."""
    fd, huge = os.memfd_create("numapin-slot"), os.memfd_create("numapin-slot")
    os.write(fd, b"from the parent")
    os.ftruncate(huge, 1 << 49)
    slots = seam.HandedDown(lambda: [(7, 15, fd), (8, 1 << 49, huge)])
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=answer, args=(channel, handover, slots), daemon=True)
    process.start()
    assert channel.receive(WAIT_S) == b"from the parent"
    assert ended(process) == 0
    assert received(handover, 7) == b"from a child"
    for each in (fd, huge):
        os.close(each)
