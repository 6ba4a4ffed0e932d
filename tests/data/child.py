"""Functions that tests run in started processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.data.wire.spill import Spill

from numapin.system import memory

if TYPE_CHECKING:
    from numapin.data.slots.control import Control
    from numapin.data.wire.spill import Handover

    from numapin.data.wire.channel import Channel

WAIT_S: Final = 20


def echo(inbox: Channel, outbox: Channel) -> None:
    """Send the next message back, reversed."""
    outbox.number = 7
    outbox.send(inbox.receive(WAIT_S)[::-1])


def write(control: Control) -> None:
    """Write slot 0's word, and into the memory of the first generation."""
    control.set_state(0, 41)
    generation = control.generation(0)
    memoryview(memory.map_shared(control.fd, generation.num_bytes, offset=generation.offset))[:5] = b"child"


def hand_over(handover: Handover) -> None:
    """Send memory as batch 7 of worker 3."""
    made = Spill()
    made.view[:5] = b"child"
    made.send(handover, 3, 7)
    made.close()
