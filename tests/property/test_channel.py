"""Messages of any size from several writers arrive whole and in order per writer, even if one writer is killed."""

from __future__ import annotations

import os
import queue
import signal
import warnings
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.seam_torch import Channel, _frames

WAIT_S: Final = 300

# Sizes around a frame (4088 bytes of message) and a pipe (64 KiB), and in between.
sizes = st.one_of(
    st.integers(0, 300),
    st.sampled_from([4087, 4088, 4089, 8175, 8176, 8177, 65_527, 65_528, 65_529, 65_536, 65_537]),
    st.integers(0, 200_000),
)
scripts = st.lists(sizes, max_size=5)  # the sizes of one writer's messages
casts = st.lists(scripts, min_size=1, max_size=4)


def messages(writer: int, script: list[int]) -> list[bytes]:
    """Return one writer's messages: each non-empty one begins with the writer's name, and the last marks the end."""
    noise = bytes((7 * writer + i) % 251 for i in range(997)) * 202
    bodies = [(bytes((writer, number)) + noise[number:])[:size] for number, size in enumerate(script)]
    return [*bodies, bytes([writer]) + b"end"]


def write(channel: Channel, writer: int, script: list[int]) -> Channel:
    """Send one writer's messages through its own end of the channel, and return that end."""
    end = Channel.__new__(Channel)
    end.__setstate__((channel._reader, channel._writer))
    end.number = writer
    for message in messages(writer, script):
        end.send(message)
    return end


def fork_writer(channel: Channel, writer: int, script: list[int], *, is_killed: bool = False) -> int:
    """Send one writer's messages from a new process; if it is killed, messages that the pipe did not take are lost."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about a fork beside threads
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        late = write(channel, writer, script)._late
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if late is not None:
            late.drain()
        status = 0
    finally:
        os._exit(status)


def receive(channel: Channel, num_writers: int) -> list[bytes]:
    """Return the messages that arrive until this many writers have ended."""
    received: list[bytes] = []
    missing = {messages(writer, [])[0] for writer in range(num_writers)}
    while missing:
        received.append(channel.receive(WAIT_S))
        missing.discard(received[-1])
    return received


def of(writer: int, received: list[bytes]) -> list[bytes]:
    """Return one writer's messages among the received ones; empty messages belong to no writer."""
    return [message for message in received if message[:1] == bytes([writer])]


def check(received: list[bytes], cast: list[list[int]]) -> None:
    """Assert that exactly the sent messages arrived, in order per writer."""
    for writer, script in enumerate(cast):
        assert of(writer, received) == list(filter(None, messages(writer, script)))
    assert len(received) == sum(len(script) + 1 for script in cast)


@settings(max_examples=50)
@given(scripts)
def test_one_writer_that_is_not_read_meanwhile(script: list[int]) -> None:
    """Everything is sent before anything is read: the messages wait in the pipe, and behind it."""
    channel = Channel()
    write(channel, 0, script)
    assert receive(channel, 1) == messages(0, script)
    with pytest.raises(queue.Empty):
        channel.receive(0)
    channel.close()


@settings(max_examples=25)
@given(scripts, casts)
def test_a_killed_writer_harms_no_other(script: list[int], cast: list[list[int]]) -> None:
    """Of several processes, one is killed while sending: its first messages arrive whole, and all of the others'."""
    channel, killed = Channel(), len(cast)
    victim = fork_writer(channel, killed, script, is_killed=True)
    pids = [fork_writer(channel, *item) for item in enumerate(cast)]
    received = receive(channel, len(cast))
    assert os.waitpid(victim, 0)[1] == signal.SIGKILL
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
    came = of(killed, received)
    assert came == list(filter(None, messages(killed, script)))[: len(came)]
    empties = script.count(0)
    others = [message for message in received if message[:1] != bytes([killed])]
    while len(others) > sum(len(one) + 1 for one in cast) and empties:  # empty messages of the killed writer
        others.remove(b"")
        empties -= 1
    check(others, cast)
    channel.close()


@given(scripts, st.lists(st.integers(1, 70_000), min_size=1, max_size=50))
def test_reads_may_end_anywhere(script: list[int], cuts: list[int]) -> None:
    """The messages are the same, whatever pieces the kernel returns them in."""
    channel, raw = Channel(), b"".join(frame for message in messages(0, script) for frame in _frames(message, 0))
    for cut in (*cuts, len(raw)):
        channel._take(channel._unread + raw[:cut])
        raw = raw[cut:]
    assert list(channel._messages) == messages(0, script)
    assert channel._unread == b""
    channel.close()
