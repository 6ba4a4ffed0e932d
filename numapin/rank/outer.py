"""The note that a numapin below `numapin exec --children` leaves for it.

A rank imports this only below such a command.
"""

from __future__ import annotations

import json
import os

from numapin.errors import NumapinError
from numapin.rank import handover

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

NESTED: Final = "nested-"


def note(table: str) -> None:
    """Note that this process, or one below it, was bound by a numapin of its own; errors are ignored."""
    try:
        folder = str(json.loads(table.rpartition("\n")[2])["run"])
        if os.path.isdir(folder):
            handover.write_json(folder, f"{NESTED}{os.getpid()}.json", {"pid": os.getpid()})
    except (ValueError, KeyError, TypeError, NumapinError):
        pass
