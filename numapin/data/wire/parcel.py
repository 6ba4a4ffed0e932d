"""A batch that has arrived in the rank and is not opened yet. Pure.

Comes in: the head, the pickle and the memory of a batch. Goes out: the same, for an opener.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numapin.data.wire.message import Head


@dataclass(slots=True)
class Parcel:
    """A batch that has arrived.

    Attributes:
        head: Its head.
        body: Its pickle.
        views: The memory of its parts. None: nothing was written to that part.
        is_pinned: Whether all of that memory is pinned.
        begun: The work that its opener started before the batch was due.
    """

    head: Head
    body: memoryview
    views: tuple[memoryview | None, ...] = ()
    is_pinned: bool = False
    begun: Any = None

    def find_body(self) -> None:
        """Take a long pickle from the batch's memory, of which it is the end, once the views are known."""
        if self.head.body_room is not None:
            part, start, num_bytes = self.head.body_room
            view = self.view(part)
            self.body = view[start : start + num_bytes]
            self.views = (*self.views[:part], view[:start] or None, *self.views[part + 1 :])

    @property
    def is_mostly_pickle(self) -> bool:
        """Whether the pickle in the batch's memory is larger than its tensors: one that is kept would keep it, too."""
        return self.head.body_room is not None and sum(len(view) for view in self.views if view) < len(self.body)

    def num_bytes(self, part: int) -> int:
        """Return how many bytes were written to a part."""
        return len(self.views[part] or ())

    def view(self, part: int) -> memoryview:
        """Return the memory of a part. Raises LookupError if nothing was written to it."""
        view = self.views[part]
        if view is None:
            raise LookupError(f"batch {self.head.number} has nothing in part {part}")
        return view

    def bytes(self, part: int, start: int, num_bytes: int) -> torch.Tensor:
        """Return a range of a part as uint8."""
        return torch.frombuffer(self.view(part), dtype=torch.uint8, count=num_bytes, offset=start)
