"""The port on which the ranks of `numapin.spawn` meet: no other user can take it, from its choice to its use."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numapin
from tests.integration import calls
from tests.integration.seam import meeting
from tests.needs import needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

_NOBODY = 65534
_LOOPBACK = ("tcp", "0100007F")

# Tries every address and option that could share the port, until its stdin ends; then prints what it got.
_ATTACK = """
import json, os, select, socket, sys
os.setgroups([])
os.setuid(int(sys.argv[2]))
PLACES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"),
          (socket.AF_INET6, "::"), (socket.AF_INET6, "::ffff:127.0.0.1")]
OPTIONS = [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]
rounds, won = 0, []
while not won and (rounds < 2 or not select.select([0], [], [], 0)[0]):
    for family, address in PLACES:
        for options in OPTIONS:
            with socket.socket(family) as attempt:
                for option in options:
                    attempt.setsockopt(socket.SOL_SOCKET, option, 1)
                if family == socket.AF_INET6:
                    attempt.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                try:
                    attempt.bind((address, int(sys.argv[1])))
                    attempt.listen()
                except OSError:
                    continue
                won.append([address, options])
    rounds += 1
    if rounds == 1:
        print("began", flush=True)
print(json.dumps({"uid": os.getuid(), "rounds": rounds, "won": won}), flush=True)
"""


@contextmanager
def _attacked(port: int) -> Iterator[list[dict[str, Any]]]:
    """Attack a port as another user during the block; the list has the attacker's report afterwards."""
    reports: list[dict[str, Any]] = []
    command = [sys.executable, "-I", "-S", "-c", _ATTACK, str(port), str(_NOBODY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as attacker:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == b"began\n"
        yield reports
        attacker.stdin.close()
        reports.append(json.loads(attacker.stdout.read()))  # not communicate(): the report may be in the buffer already


@needs_root
def test_another_user_never_gets_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker with another uid tries from the choice of the port to the end, and the ranks still meet."""
    held_port, reports = meeting.reserved_port, []

    @contextmanager
    def attacked() -> Iterator[socket.socket]:
        with held_port() as held, _attacked(meeting.port_of(held)) as told:
            yield held
        reports.extend(told)

    monkeypatch.setattr(meeting, "reserved_port", attacked)
    results = numapin.spawn(calls.meet_twice, num_ranks=2, timeout=120)
    (report,) = reports
    assert (report["uid"], report["won"]) == (_NOBODY, [])
    assert report["rounds"] > 10
    assert results == (({_LOOPBACK}, [2.0, 2.0]),) * 2


@needs_root
def test_the_attack_has_teeth() -> None:
    """The attack succeeds on a port held with SO_REUSEADDR, which torch would need to bind it itself."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        with _attacked(meeting.port_of(held)) as reports:
            pass
    assert ["127.0.0.1", [socket.SO_REUSEADDR]] in reports[0]["won"]


def test_the_store_listens_on_the_loopback_only() -> None:
    """Process groups meet, one after the other, on MASTER_PORT of 127.0.0.1; torch's store would listen everywhere.

    A store on another port binds its own socket, clients are not affected, and a server on another address is refused.
    """
    assert numapin.spawn(_meet, timeout=120) == ((({_LOOPBACK}, [1.0, 1.0]), (True, True)),)


def _meet() -> tuple[object, object]:
    return calls.meet_twice(), _other_stores()


def _other_stores() -> tuple[bool, bool]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", other.port, None, False)
    client.set("key", "value")
    try:
        TCPStore(os.uname().nodename, int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    except RuntimeError:
        return other.get("key") == b"value", True
    return other.get("key") == b"value", False
